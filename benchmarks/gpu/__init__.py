"""Real training steps on one CUDA device, measured beside what AutoSAC predicts; see `run_all.sh`."""
