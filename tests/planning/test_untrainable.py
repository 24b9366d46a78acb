"""Jobs that the installed PyTorch cannot train are refused, though their steps can be captured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosac.errors import CaptureError
from autosac.jobs.untrainable import check_trainable
from autosac.plans import Plan, Unit
from autosac.trace import Parallelism, TraceInfo
from tests.support.plans import MADE_FOR

JOB = TraceInfo(compiled=True, parallelism=Parallelism(tp=2), checkpointing="full", torch_version="2.13.0+cpu")


def plan_with(budget: float | None) -> Plan:
    """A plan of one unit, which is left to the compiler with a budget."""
    unit = Unit(
        fqn="layers.0", discard_fraction=1.0, kept_bytes=0, recompute_ms=0.0, decisions=(), memory_budget=budget
    )
    return Plan(made_for=MADE_FOR, units=(unit,))


@pytest.mark.parametrize("mode", ["full", "selective-op", "selective-2"])
def test_compiled_checkpointed_layers_under_tensor_parallelism_are_refused(mode: str) -> None:
    """Two gloo ranks of torch 2.12 and 2.13 fail so; the message names versions that do not."""
    with pytest.raises(
        CaptureError,
        match=r"this torch \(2\.13\.0\+cpu\) cannot train the job: its compiler fails .* use torch 2\.11 or 2\.14\.1",
    ):
        check_trainable(replace(JOB, checkpointing=mode))
    with pytest.raises(CaptureError, match="cannot train the job"):
        check_trainable(replace(JOB, checkpointing="plan"), plan_with(None))


@pytest.mark.parametrize(
    "change",
    [
        {"compiled": False},
        {"parallelism": Parallelism(tp=1)},
        {"checkpointing": "none"},
        {"checkpointing": "memory_budget"},
        {"torch_version": "2.11.0+cpu"},
        {"torch_version": "2.14.1+cu130"},
    ],
)
def test_other_jobs_are_not(change: dict[str, object]) -> None:
    """Any one of the conditions missing; and plans that leave the layers to the compiler."""
    check_trainable(replace(JOB, **change))  # type: ignore[arg-type]
    check_trainable(replace(JOB, checkpointing="plan"), plan_with(0.5))
