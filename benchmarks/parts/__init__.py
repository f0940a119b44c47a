"""One module per part; each has a coroutine `run(options)` that returns a `Part`."""
