"""Engines: what answers a job. `interface` is the contract, `vllm` and `simulated` fulfil it."""
