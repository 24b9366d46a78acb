"""Margins, probabilities of fitting, and the spread of step times, where they can be derived by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.cli.parser import main
from autosac.errors import InfeasibleError, UsageError
from autosac.estimator import Pricing
from autosac.memory_sim import AllocatorConfig
from autosac.planning.closed_loop import Planned
from autosac.planning.confidence import Confidence, Margin, margin_of, step_errors_ms
from autosac.planning.planner import Goal, plan_of
from autosac.simulation import Pipeline, Simulation
from autosac.trace import Collective
from benchmarks.margins import MARGINS, PUBLISHED_PAGE, STUDY_PAGE, margins

GIB = 2**30


def t2(probability: float) -> float:
    """The quantile of Student's t distribution with two degrees of freedom."""
    return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))


def test_margins_of_two_runs() -> None:
    """Errors of -3 % and 3 %: their root mean square. Of 0 and 3 %: 3 % has to be as rare as one in three."""
    assert Margin.fit([-0.03, 0.03]) == Margin(scale=0.03, freedom=2)
    margin = Margin.fit([0.0, 0.03])
    assert margin.scale == pytest.approx(0.03 / t2(5 / 6)) and margin.scale > 0.03 / math.sqrt(2)
    assert margin.budget_bytes(GIB, 0.99) == int(GIB / (1 + margin.scale * t2(0.99)))
    assert margin.probability(100, 103) - margin.probability(100, 97) == pytest.approx(2 / 3)


@settings(deadline=None, max_examples=60)
@given(
    errors=st.lists(st.floats(-0.1, 0.1).filter(lambda x: abs(x) > 1e-5), min_size=1, max_size=20),
    confidence=st.floats(0.01, 0.9999),
    budget=st.integers(GIB, 100 * GIB),
)
def test_what_is_planned_for_fits_as_asked(errors: list[float], confidence: float, budget: int) -> None:
    """A peak as large as what is left fits with the probability asked for, hardly more; the whole budget in half the cases."""
    margin = Margin.fit(errors)
    left = margin.budget_bytes(budget, confidence)
    wanted = max(confidence, 0.5)
    assert left <= budget
    assert wanted - 1e-9 <= margin.probability(left, budget)
    assert margin.probability(left + 2, budget) <= wanted + 1e-6
    assert margin.probability(budget, budget) == pytest.approx(0.5)


def test_each_cause_has_its_rule() -> None:
    """Active memory is predicted best, reserved memory without expandable segments worst; every rule covers its worst run at
    99 %: 0.04 %, 0.24 % and 4.8 %.
    """
    expandable = AllocatorConfig(expandable_segments=True)
    rules = [
        margin_of("active", expandable),
        margin_of("reserved", expandable),
        margin_of("reserved", AllocatorConfig()),
    ]
    assert [margin.freedom for margin in rules] == [23, 12, 23]
    shares = [1 - margin.budget_bytes(10**12, 0.99) / 1e12 for margin in rules]
    assert 0.00035 < shares[0] < 0.0006 and 0.0024 < shares[1] < 0.005 and 0.0477 < shares[2] < 0.06
    assert margin_of("active", AllocatorConfig()) == rules[0]


def test_the_margins_are_those_of_the_published_comparison() -> None:
    """The data file is what `python -m benchmarks.margins` makes of docs/accuracy.md and docs/published.md."""
    assert MARGINS.read_text() == margins(STUDY_PAGE.read_text(), PUBLISHED_PAGE.read_text())


def priced(simulation: Simulation, operator_std: float, gather_std: float) -> Simulation:
    """The same step, its operators priced by one model and its gathers by another, with these standard errors."""
    old = simulation.pricing
    gathers = np.array([type(event) is Collective for event in simulation.trace.events])
    prices = Pricing(
        event_ms=old.event_ms,
        source=("operators", "gathers"),
        event_source=gathers.astype(np.int16),
        event_rel_std=np.where(gathers, gather_std, operator_std).astype(np.float32),
    )
    return replace(simulation, other_prices=prices)


def test_errors_of_a_step(make_job: Callable[..., Any]) -> None:
    """30 ms of operators, 12.5 % slower: 3.75 ms. Three gathers of 0.5 ms that take twice as long hide, but for what they
    hinder the operators beside them; of 5 ms, and 1.25 ms more, they do not.
    """
    step = priced(make_job(4, gather_ms=0.0).observed(), 0.125, 1.0)
    assert step.step_ms == pytest.approx(30.0)
    assert step_errors_ms(step) == pytest.approx({"operators": 3.75, "gathers": 0.0})
    hidden = priced(make_job(4, gather_ms=0.5).observed(), 0.0, 1.0)
    exposed = priced(make_job(4, gather_ms=5.0).observed(), 0.0, 0.25)
    assert step_errors_ms(hidden)["gathers"] < 0.2 * 3 * 0.5
    assert step_errors_ms(exposed)["gathers"] >= 3 * 1.25


def test_errors_of_a_pipeline_are_of_all_its_stages(make_job: Callable[..., Any]) -> None:
    """Two ranks that meet in gathers, one twice as fast: the slow one decides, and by how much its own 30 ms may be longer."""
    slow = make_job(4, gather_ms=0.0).observed()
    prices = replace(slow.pricing, event_ms=slow.pricing.event_ms / 2)
    fast = replace(slow, trace=replace(slow.trace, info=replace(slow.trace.info, rank=1)), other_prices=prices)
    stage, _ = Pipeline(stages=(priced(fast, 0.5, 0.0), priced(slow, 0.125, 0.0))).joined()
    assert stage.step_ms == pytest.approx(30.0)
    assert step_errors_ms(stage) == pytest.approx({"operators": 3.75, "gathers": 0.0})


def test_a_stage_has_its_memory_and_prices_in_its_pipeline_as_well(make_job: Callable[..., Any]) -> None:
    """They are worked out once: what the stage knows by itself is what it says as a part of the pipeline."""
    alone = make_job(4, gather_ms=0.0).observed()
    alone.work_ahead()
    (stage,) = Pipeline(stages=(alone,)).joined()
    assert stage.unlimited_allocation is alone.unlimited_allocation and stage.allocation is alone.allocation
    assert stage.memory is alone.memory and stage.idle is alone.idle
    assert stage.pricing is alone.pricing


def test_the_answer(make_job: Callable[..., Any]) -> None:
    """The plan states the whole budget, the margin, the probability and the interval; an error says what was planned for."""
    step = priced(make_job(4, gather_ms=0.0).observed(), 0.125, 0.0)
    wanted = Confidence(level=0.9, margin=Margin(scale=0.02, freedom=2))
    inner = wanted.inner_bytes(GIB)
    assert inner == int(GIB / (1 + 0.02 * t2(0.9)))
    plan = plan_of(step, Goal(budget_bytes=inner, budget_kind="active"), ())
    plan = replace(plan, predictions={"autosac": step.prediction()})
    result = wanted.certain(Planned(plan=plan, simulation=step, notes=("more",)), GIB)
    assert isinstance(result, Planned) and result.plan.certainty is not None
    certainty = result.plan.certainty
    assert result.plan.made_for.budget_bytes == GIB and certainty.margin_bytes == GIB - inner
    assert certainty.fits == wanted.margin.probability(step.peak_active_bytes, GIB)
    width = NormalDist().inv_cdf(0.95) * 3.75
    assert (certainty.step_low_ms, certainty.step_high_ms) == pytest.approx((30 - width, 30 + width))
    assert "the error of operators counts most" in result.notes[1] and result.notes[2] == "more"
    assert type(plan).from_bytes(result.plan.to_bytes()) == result.plan

    refused = wanted.certain(InfeasibleError("no plan"), GIB)
    assert isinstance(refused, InfeasibleError) and "of 1.00 GiB to errors of the prediction" in str(refused)


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, -1.0, math.nan, math.inf, 0.99995])
def test_what_is_no_probability(level: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    with pytest.raises(UsageError, match=r"expected a probability above 0 and at most 0\.9999"):
        Confidence(level=level, margin=Margin(scale=0.01, freedom=1))
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "llama3"\n')
    assert main(["plan", str(job), "--gpu", "h100-sxm-80gb", f"--confidence={level}"]) == 2
    said = capsys.readouterr().err
    assert said == f"autosac: confidence {level:g}: expected a probability above 0 and at most 0.9999, such as 0.99\n"


def test_a_curve_has_no_budget_to_keep_a_margin_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--pareto with --confidence is refused."""
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "llama3"\n')
    assert main(["plan", str(job), "--gpu", "h100-sxm-80gb", "--confidence", "0.9", "--pareto", "3"]) == 2
    assert "--confidence needs a budget to keep a margin of" in capsys.readouterr().err
