"""The engine side: claims jobs, runs them on one engine, publishes their frames."""
