"""A search from its inputs to its end: best-first with bounds, sampling of large spaces, what TorchTitan refuses."""
