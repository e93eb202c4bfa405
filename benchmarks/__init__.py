"""Benchmarks: cost, memory and scheduling, compared with a minimal loop and other frameworks. `run.py` starts them."""
