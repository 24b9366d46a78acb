"""Calibration from traces of PyTorch's profiler: `autosac.kineto` reads them, `evidence` makes rows of them,
`correction` corrects the shipped models by these rows, `learn` does all of it and writes the profile.

Only what reads traces needs PyTorch, and is imported by name: ``from autosac.estimator.calibration.traces.learn import
learn``.
"""
