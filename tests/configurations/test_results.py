"""Rows of a search's result, and the space that is printed: without captures."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from autosac.cli.parser import main
from autosac.configurations.evaluating.evaluations import PredictedStep
from autosac.configurations.found.results import (
    ConfigurationRow,
    Counts,
    SearchResult,
    is_tied,
    least_of_kinds,
    told_as,
)
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Offer
from autosac.configurations.space.space import Space, space_of
from autosac.plans import Plan, Settings
from plans import MADE_FOR


def row(step_ms: float, *, fits: bool = True, **errors_ms: float) -> ConfigurationRow:
    """A configuration on one GPU without checkpointing."""
    measured = PredictedStep(
        checkpointing="none",
        step_ms=step_ms,
        recompute_ms=0.0,
        peak_reserved_bytes=3 * 2**30,
        fits=fits,
        tokens_per_second=1.0,
        mfu=0.1,
        parts={},
        errors_ms=errors_ms,
    )
    return ConfigurationRow(
        layout=Layout(gpu="any"), measured=measured, score=step_ms, offer=Offer(gpu="any", world_size=1)
    )


def result(*rows: ConfigurationRow, proven: bool = True) -> SearchResult:
    """Of a search that worked out these."""
    counts = Counts(**dict.fromkeys(Counts.__dataclass_fields__, 0))
    return SearchResult(rows=rows, counts=counts, objective="tokens-per-second", gap=0.0, proven=proven)


def test_ties_are_within_the_errors_of_the_difference() -> None:
    """Errors that two steps share cancel; less than one percent tells no two configurations apart."""
    assert is_tied(row(100, gemm=5), row(100.9, gemm=5))
    assert not is_tied(row(100, gemm=5), row(103, gemm=5))
    assert is_tied(row(100, gemm=5), row(103, gemm=5, nccl=4))


def test_show_space_prints_a_space(capfd: pytest.CaptureFixture[str]) -> None:
    """The default space, without a job."""
    assert main(["search", "--show-space"]) == 0
    assert space_of(tomllib.loads(capfd.readouterr().out)) == Space()


def test_a_result_prints_in_a_line() -> None:
    """The best that fits, and whether it is proven; or that nothing fits."""
    found = result(row(80.0, fits=False), row(1234.5), row(2000.0))
    best = "batch 1 x 1, none, step 1,234.5 ms, peak 3.00 GiB reserved"
    assert str(found) == f"best of 3 configurations (proven): {best}"
    assert str(result(row(1234.5), proven=False)) == f"best of 1 configurations (not proven): {best}"
    assert str(result(row(80.0, fits=False), row(90.0, fits=False))) == "none of 2 configurations fits (proven)"
    assert str(result(proven=False)) == "none of 0 configurations fits (not proven)"


def test_a_row_is_told_by_what_its_plan_does() -> None:
    """Without a plan, or with one that does no more than others, it is that of the layout without."""
    layout = Layout(gpu="any", activation_offload=True, chunk_loss=True)
    usual, chunked = (
        Plan(made_for=MADE_FOR, units=(), settings=Settings(loss_chunks=chunks)).to_bytes().decode()
        for chunks in (1, 4)
    )
    assert told_as(layout, None) == told_as(layout, usual) == layout.without_plans
    assert told_as(layout, chunked) == replace(layout, activation_offload=False)
    assert told_as(layout.without_plans, usual) == layout.without_plans


def test_the_least_bound_of_each_kind_of_gpu() -> None:
    """In whatever order layouts were ruled out; kinds without any have none."""
    bounds = {Layout(gpu="b", shard=2): 9.0, Layout(gpu="a"): 3.0, Layout(gpu="b"): 4.0, Layout(gpu="a", shard=2): 5.0}
    assert least_of_kinds(bounds) == {"b": 4.0, "a": 3.0}


@pytest.mark.parametrize(
    ("confidence", "message"),
    [
        (
            None,
            "fits 4.00 GiB of each GPU: the least that was simulated needs 3.00 GiB (batch 1 x 1, none)",
        ),
        (0.99, "fits 4.00 GiB of each GPU with a probability of 99%: the least that was simulated needs 3.00 GiB"),
    ],
)
def test_why_nothing_fits_says_how_surely(
    confidence: float | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs less than the budget does not fit with every probability; a lower one is a way out."""
    found = replace(result(row(80.0, fits=False)), confidence=confidence, budgets_bytes={"any": 4 * 2**30})
    monkeypatch.setattr("autosac.report.search_files.completed_search", lambda *_: (found, []))
    assert main(["search", "job.toml", "--gpu", "h100-sxm-80gb", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert message in said and ("a lower --confidence" in said) == (confidence is not None)
