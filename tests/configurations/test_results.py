"""Rows of a search's result, and the space that is printed: without captures."""

from __future__ import annotations

import tomllib

import pytest

from autosac.cli.parser import main
from autosac.configurations.evaluating.evaluations import PredictedStep
from autosac.configurations.found.results import ConfigurationRow, is_tied
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Offer
from autosac.configurations.space.space import Space, space_of


def test_ties_are_within_the_errors_of_the_difference() -> None:
    """Errors that two steps share cancel; less than one percent tells no two configurations apart."""

    def row(step_ms: float, **errors_ms: float) -> ConfigurationRow:
        measured = PredictedStep(
            checkpointing="none",
            step_ms=step_ms,
            recompute_ms=0.0,
            peak_reserved_bytes=1,
            fits=True,
            tokens_per_second=1.0,
            mfu=0.1,
            parts={},
            errors_ms=errors_ms,
        )
        return ConfigurationRow(
            layout=Layout(gpu="any"), measured=measured, score=step_ms, offer=Offer(gpu="any", world_size=1)
        )

    assert is_tied(row(100, gemm=5), row(100.9, gemm=5))
    assert not is_tied(row(100, gemm=5), row(103, gemm=5))
    assert is_tied(row(100, gemm=5), row(103, gemm=5, nccl=4))


def test_show_space_prints_a_space(capfd: pytest.CaptureFixture[str]) -> None:
    """The default space, without a job."""
    assert main(["search", "--show-space"]) == 0
    assert space_of(tomllib.loads(capfd.readouterr().out)) == Space()
