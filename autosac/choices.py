"""What users choose by name. Imports nothing, so that the command line knows the names at once."""

SOLVERS = ("pareto", "ilp", "greedy", "knapsack")
"""Solvers that choose operators within a module (`autosac.solvers.local_solvers`)."""

CURVES = ("staircase", "pwlf")
"""Models of a module's trade-off of time against memory (`autosac.estimator.sac_curves`)."""

LEVERS = ("off", "quick", "all")
"""How many of a job's other settings a plan is compared with (`autosac.jobs.levers`)."""
