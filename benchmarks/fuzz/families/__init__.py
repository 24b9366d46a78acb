"""The families by theme. Importing this package registers all of them."""

from benchmarks.fuzz.families import (
    custom,
    hidden,
    hooks,
    inplace,
    models,
    modes,
    normalisation,
    parallel,
    recurrent,
    structures,
    training,
    writes,
)

__all__ = [
    "custom",
    "hidden",
    "hooks",
    "inplace",
    "models",
    "modes",
    "normalisation",
    "parallel",
    "recurrent",
    "structures",
    "training",
    "writes",
]
