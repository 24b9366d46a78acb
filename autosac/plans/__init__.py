"""Plans: their values and file (`plan`, `schema`), what differs between two (`diff`), why they are as they are (`reasons`)."""

from autosac.plans.plan import (
    SMALLEST_OFFLOAD_BYTES,
    Binding,
    Certainty,
    Decision,
    MadeFor,
    OutputMetadata,
    Parameters,
    Plan,
    Prediction,
    Reasons,
    Settings,
    Unit,
)
from autosac.plans.schema import (
    ANY_SIZE,
    GRAPH,
    SCHEMA_VERSION,
)

__all__ = [
    "ANY_SIZE",
    "GRAPH",
    "SCHEMA_VERSION",
    "SMALLEST_OFFLOAD_BYTES",
    "Binding",
    "Certainty",
    "Decision",
    "MadeFor",
    "OutputMetadata",
    "Parameters",
    "Plan",
    "Prediction",
    "Reasons",
    "Settings",
    "Unit",
]
