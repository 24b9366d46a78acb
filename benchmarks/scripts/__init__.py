"""Training scripts as their users write them, and `python -m benchmarks.scripts`, which runs them under `autosac run`."""
