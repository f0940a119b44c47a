"""The HTTP side: accepts requests, submits jobs, relays their frames to clients. Holds no state."""
