"""The harness that compares checkpointing policies: models x configurations x budgets x policies, predicted and measured.

A suite (`suite`) is a small TOML file. `run_suite` simulates every policy of it and plans the ones that need planning,
`measure` runs the same policies for real, `results` is the table with its figures and claims, `report` draws it. The
evaluation follows AUTO-SAC section 5.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosac.bench.policies import Policy
    from autosac.bench.results import PolicyRow, Results
    from autosac.bench.run import run_suite
    from autosac.bench.suite import Suite, load_suite

__all__ = ["Policy", "PolicyRow", "Results", "Suite", "load_suite", "run_suite"]

_PLACES = {
    "Policy": "policies",
    "Results": "results",
    "PolicyRow": "results",
    "Suite": "suite",
    "load_suite": "suite",
    "run_suite": "run",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line only needs the options."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
