"""Real TorchTitan training on the CPU, with and without plans."""
