"""Measures the pool on this machine: `python -m benchmarks [part ...]`, see docs/benchmarks.md."""
