"""The table: what follows from a row, the claims, and the files, by hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace

import pytest

from autosac.bench.case_study import BudgetChoice, CaseResult, ModuleChoice, OperatorRow, recomputed_at
from autosac.bench.figures import figures
from autosac.bench.report import page, picture
from autosac.bench.results import MeasuredRun, PolicyRow, Results
from autosac.bench.solver_times import SolverTiming

Make = Callable[..., PolicyRow]


def results(*rows: PolicyRow) -> Results:
    """Results of these rows."""
    return Results(suite="Tiny", gpu="h100", rows=rows)


def test_what_follows_from_a_row(row: Make) -> None:
    """1 ms of recomputation in a step of 10 ms is 10 %, and 75 % less than the 4 ms of full checkpointing."""
    one = row("ilp", 98, 1.0)
    assert (one.budget_use, one.overhead, one.reduction) == (0.98, 0.1, 0.75)
    assert one.slowdown == pytest.approx(0.1)
    assert one.fits and not row("none", 101, 0.0).fits


def test_the_budget_bounds_its_own_kind(row: Make) -> None:
    """With a reserved budget the reserved peak counts."""
    assert not row("ilp", 98, 1.0, budget_kind="reserved").fits


def test_claims_that_hold(row: Make) -> None:
    """A plan at 98 % of the budget that recomputes least: everything holds, and is counted once per planned policy."""
    found = results(
        row("none", 120, 0.0),
        row("full", 50, 4.0),
        row("selective-2", 80, 2.0),
        row("greedy", 98, 1.01),
        row("ilp", 99, 1.0),
    )
    assert [(claim.cases, claim.misses) for claim in found.claims()] == [
        (2, ()),
        (2, ()),
        (2, ()),
        (2, ()),
        (2, ()),
        (1, ()),
    ]


def test_claims_that_do_not_hold(row: Make) -> None:
    """A plan at 90 % of the budget that recomputes more than the ILP and selective-2, nearly all: all but one are missed."""
    found = results(
        row("none", 120, 0.0),
        row("full", 50, 4.0),
        row("selective-2", 80, 2.0),
        row("ilp", 98, 1.0),
        row("greedy", 90, 3.9),
    )
    use, runs, reduction, least, fastest, near = found.claims()
    assert runs.misses == ()
    assert use.misses == ("net C1 greedy (90.0%)",)
    assert reduction.misses == ("net C1 greedy (2.5%)",)
    assert least.misses == ("net C1 greedy (less: selective-2)",)
    assert fastest.misses == ("net C1 greedy (faster: selective-2)",)
    assert near.misses == ("net C1 greedy (3.9 ms, 1.0 ms)",)
    assert str(use) == (
        "peak within the budget and at least 97% of it where no checkpointing exceeds it: holds in 1 of 2 cases; not in "
        "net C1 greedy (90.0%)"
    )


def test_a_plan_above_the_budget_is_a_miss(row: Make) -> None:
    """More than the budget is not a good use of it."""
    assert results(row("none", 120, 0.0), row("ilp", 101, 1.0)).claims()[0].misses == ("net C1 ilp (101.0%)",)


@pytest.mark.parametrize(("peak", "held"), [(96, False), (97, True), (100, True), (101, False)])
def test_limits_of_a_good_use_belong_to_it(row: Make, peak: int, held: bool) -> None:
    """97 % of the budget is enough, and all of it is not too much."""
    use = results(row("none", 120, 0.0), row("ilp", peak, 1.0)).claims()[0]
    assert (use.cases, not use.misses) == (1, held)


def test_a_plan_that_runs_out_of_memory_is_a_miss(row: Make) -> None:
    """Live tensors may fit a budget while the caching allocator runs out of the GPU's memory."""
    assert results(row("ilp", 99, 1.0, fits_gpu=False)).claims()[1].misses == ("net C1 ilp",)


def test_policies_that_do_not_fit_or_are_compiled_are_no_rivals(row: Make) -> None:
    """No checkpointing does not fit, and a compiled step is no eager one: neither is held against the plan. Against a plan of
    a compiled step it is.
    """
    plan, other = row("ilp", 99, 1.0), row("memory-budget-0.5", 60, 0.5, compiled=True)
    found = results(row("none", 120, 0.0), other, plan)
    assert found.claims()[3].misses == found.claims()[4].misses == ()
    compiled = results(row("none", 120, 0.0, compiled=True), other, replace(plan, compiled=True))
    assert compiled.claims()[4].misses == ("net C1 ilp (faster: memory-budget-0.5)",)


def test_nothing_to_test_where_everything_fits(row: Make) -> None:
    """Where no checkpointing fits the budget, its use and the reduction are not tested."""
    found = results(row("none", 90, 0.0), row("ilp", 90, 0.0))
    assert [claim.cases for claim in found.claims()] == [0, 1, 0, 1, 1, 0]
    assert str(found.claims()[0]).endswith("not tested")


def test_a_policy_that_cannot_be_done(row: Make) -> None:
    """Its error is a miss, and stands in the table."""
    failed = PolicyRow(
        model="net", configuration="C1", policy="ilp", budget_bytes=100, budget_kind="active", error="no plan"
    )
    found = results(row("none", 120, 0.0), failed)
    assert found.claims()[0].misses == ("net C1 ilp (no plan)",)
    assert "| net C1 | ilp | no plan |" in found.to_markdown()


def test_csv_reads_back(row: Make) -> None:
    """Every row is a line whose fields are the row's, empty where there is nothing."""
    measured = MeasuredRun(step_ms=12.5, peak_active_bytes=97)
    text = results(row("none", 120, 0.0), row("ilp", 98, 1.0, measured=measured)).to_csv()
    none, ilp = csv.DictReader(io.StringIO(text))
    assert (ilp["policy"], ilp["recompute_ms"], ilp["budget_use"], ilp["overhead"]) == ("ilp", "1.0", "0.98", "0.1")
    assert (ilp["measured_step_ms"], ilp["measured_peak_reserved_bytes"]) == ("12.5", "")
    assert none["measured_step_ms"] == none["gap"] == ""


def test_measured_beside_predicted(row: Make) -> None:
    """The measured slowdown is against the measured step without checkpointing; the peak's error against the measured peak."""
    found = results(
        row("none", 120, 0.0, measured=MeasuredRun(step_ms=20.0, peak_active_bytes=100)),
        row("full", 50, 4.0, measured=MeasuredRun(step_ms=25.0, peak_active_bytes=50)),
        row("ilp", 99, 1.0, measured=MeasuredRun(error="out of memory")),
    )
    _, (none, full, ilp) = found.measured_table()
    assert none[2:9] == ["10.0 ms", "20.0 ms", "0.0%", "0.0%", "120 B", "100 B", "+20.0%"]
    assert full[4:9] == ["40.0%", "25.0%", "50 B", "50 B", "+0.0%"]
    assert ilp[3] == "out of memory"
    assert {len(cells) for cells in (none, full, ilp)} == {len(found.measured_table()[0])}


def case() -> CaseResult:
    """A case study in which 60 % of the memory is gone after the second of three groups."""
    return CaseResult(
        model="net",
        configuration="C1",
        module="layers.1",
        budgets=(
            BudgetChoice("40GB", 8.0, 40, (ModuleChoice("layers.0", 0.9, 4.0), ModuleChoice("layers.1", 0.9, 4.0))),
            BudgetChoice("10GB", 0.0, 0, (), "no plan meets 10 GB"),
        ),
        operators=(OperatorRow(0, "pow", 0.1, 64),),
        curve=((0.0, 0.0), (0.5, 0.04), (0.7, 0.2), (1.0, 1.0)),
        forward_ms=5.0,
        step_ms=100.0,
        alike=4,
    )


def test_the_claim_of_the_trade_off_curve() -> None:
    """60 % is first reached at the group that discards 70 %, for 20 % of 5 ms: 1 % of the step, 4 % in four modules."""
    assert recomputed_at(case().curve, 0.5) == 0.04
    assert case().at_claimed_discard == 0.2
    assert (
        case().claim().endswith("does not hold (20.0%, which is 1.0% of the step; 4.0% if all 4 modules like it do so)")
    )


def test_figures_and_page(row: Make) -> None:
    """Every figure has its values; the page needs no network; pictures are PNGs."""
    found = Results(
        suite="<Tiny>",
        gpu="h100",
        rows=(row("none", 120, 0.0), row("ilp", 99, 1.0)),
        solvers=(("net C1", (SolverTiming("greedy", 0.001, 1.0, 0.02), SolverTiming("ilp", 0.1, 1.0, 0.0))),),
    )
    drawn = figures(found, case())
    assert [f.key for f in drawn] == [
        "peak",
        "recompute",
        "solver_time",
        "decisions",
        "recompute_by_budget",
        "tradeoff",
    ]
    by_key = {f.key: f for f in drawn}
    assert [s.values for s in by_key["recompute"].series] == [(0.0,), (10.0,)]
    assert [s.values for s in by_key["solver_time"].series] == [(1.0,), (100.0,)]
    assert by_key["decisions"].categories == ("layers.0", "layers.1")
    assert by_key["recompute_by_budget"].series[0].values == (8.0, None)
    text = page(found, case(), drawn)
    assert "<h1>&lt;Tiny&gt;</h1>" in text and "Plotly.newPlot" in text
    assert 'script src="http' not in text and "no plan meets 10 GB" in text
    assert all(picture(figure).startswith(b"\x89PNG") for figure in drawn)
