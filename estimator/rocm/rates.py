"""Rates that the kernels of AMD's GPUs have in common."""

BANDWIDTH = 0.9
"""Of the memory's peak: 4.6 to 5.1 TB/s in additions of 50 to 800 MB on MI300Xs, whose third cache makes no difference."""
