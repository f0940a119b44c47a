"""What runs Headrace: container files, the environment's set-up, the launcher of `make demo`."""
