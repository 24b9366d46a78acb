"""The families by theme. Importing this package registers all of them."""

from benchmarks.fuzz.families import (
    classes,
    custom,
    hidden,
    hooks,
    inplace,
    library,
    methods,
    models,
    modes,
    normalisation,
    parallel,
    recurrent,
    steps,
    structures,
    training,
    writes,
)

__all__ = [
    "classes",
    "custom",
    "hidden",
    "hooks",
    "inplace",
    "library",
    "methods",
    "models",
    "modes",
    "normalisation",
    "parallel",
    "recurrent",
    "steps",
    "structures",
    "training",
    "writes",
]
