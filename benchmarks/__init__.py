"""What the rollout costs, holds and wastes, beside a plain floor and peers: `python benchmarks/run.py`."""
