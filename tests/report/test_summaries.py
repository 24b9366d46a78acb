"""The figures in the reports, row by row (headings are left to the eye), and what is told in a line."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from autosac.jobs.expert_load import Statistic
from autosac.memory_sim import Outcome, simulate_memory
from autosac.memory_sim.attribution import PeakReport
from autosac.memory_sim.replay import Verdict
from autosac.plans import Binding, Certainty, Decision, Plan, Prediction, Reasons, Unit
from autosac.report.summaries import (
    decision_table,
    draws_table,
    plan_summary,
    policy_table,
    reasons_table,
    unit_table,
)
from autosac.trace import Label, Phase
from plans import LLAMA_8B
from traces import TraceBuilder

GIB, MIB = 2**30, 2**20
MADE_FOR = replace(LLAMA_8B, gpu="h100", budget_bytes=20 * GIB, overrides=("--a=1", "--b"))
PREDICTIONS = {
    "autosac": Prediction(
        step_ms=1000.0, peak_active_bytes=18 * GIB, peak_reserved_bytes=19 * GIB, fits=True, recompute_ms=50.0
    ),
    "none": Prediction(
        step_ms=950.0, peak_active_bytes=30 * GIB, peak_reserved_bytes=None, fits=False, recompute_ms=0.0
    ),
}


def decision(op: str, keep: bool, nbytes: int, ms: float, *, occurrence: int = 0, offload: bool = False) -> Decision:
    """An operator that makes a tensor of 2x3 in bfloat16."""
    msps = nbytes / ms * 1e3 if ms else None
    outputs = (((2, 3), "bfloat16"),)
    return Decision(
        op=op,
        occurrence=occurrence,
        keep=keep,
        outputs=outputs,
        memory_bytes=nbytes,
        runtime_ms=ms,
        msps=msps,
        offload=offload,
    )


DECISIONS = (
    decision("aten.mm.default", True, GIB, 8.0),
    decision("aten.mm.default", False, GIB, 2.0, occurrence=1),
    decision("aten.view.default", False, 0, 0.0),
    decision("c10d.all_gather.default", True, 512 * MIB, 0.0),
)


def unit(fqn: str, decisions: tuple[Decision, ...] = DECISIONS) -> Unit:
    """A unit that discards 40 %."""
    return Unit(fqn=fqn, discard_fraction=0.4, kept_bytes=3 * GIB // 2, recompute_ms=2.0, decisions=decisions)


def plan(*units: Unit) -> Plan:
    """A plan that a MILP made, with a price of 5 ms for a GiB."""
    reasons = Reasons(objective="step", method="milp", ms_per_gib=5.0, binding=(Binding("the loss", 4.0),))
    return Plan(made_for=MADE_FOR, units=units, predictions=PREDICTIONS, reasons=(reasons,))


def lines(what: RenderableType) -> list[str]:
    """The lines on a wide page."""
    out = io.StringIO()
    Console(width=220, file=out).print(what)
    return [line.strip() for line in out.getvalue().splitlines()]


def cells(what: RenderableType) -> list[list[str]]:
    """The rows of a table (not its headings)."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines(what) if line.startswith("│")]


def test_policies_side_by_side() -> None:
    """The share of the budget is that of reserved memory, or of active where that was not simulated."""
    assert cells(policy_table(PREDICTIONS, 20 * GIB, "reserved")) == [
        ["AutoSAC", "1,000.0 ms", "50.0 ms", "18.00 GiB", "19.00 GiB", "95.0%", "fits"],
        ["no checkpointing", "950.0 ms", "0.0 ms", "30.00 GiB", "-", "150.0%", "out of memory"],
    ]
    assert [row[5] for row in cells(policy_table(PREDICTIONS, 20 * GIB, "active"))] == ["90.0%", "150.0%"]
    assert [row[5] for row in cells(policy_table(PREDICTIONS, None, "active"))] == ["", ""]


def test_too_much_is_red() -> None:
    """Exactly the budget is green."""
    for budget_bytes, expected in ((30 * GIB, ["green", "green"]), (30 * GIB - 1, ["green", "red"])):
        shares = policy_table(PREDICTIONS, budget_bytes, "active").columns[5].cells
        assert [share.style for share in shares if isinstance(share, Text)] == expected


def test_equal_modules_are_one_row() -> None:
    """Two equal layers and one that recomputes more: numbers, shares and how many of the operators with a cost are kept."""
    other = unit("layers.2", (replace(DECISIONS[0], keep=False), *DECISIONS[1:]))
    assert cells(unit_table([unit("layers.0"), unit("layers.1"), other])) == [
        ["layers.0-1", "2", "40.0%", "1.50 GiB", "2.0 ms", "2 of 3"],
        ["layers.2", "1", "40.0%", "1.50 GiB", "2.0 ms", "1 of 3"],
    ]


def test_what_is_offloaded_has_a_column() -> None:
    """One GiB waits in host memory."""
    offloaded = unit("layers.0", (replace(DECISIONS[0], offload=True), *DECISIONS[1:]))
    assert cells(unit_table([offloaded])) == [["layers.0", "1", "40.0%", "1.50 GiB", "1.00 GiB", "2.0 ms", "2 of 3"]]


def test_what_memory_is_worth() -> None:
    """5 ms for one GiB are an MSPS of 200 GiB/s; a plan that nothing held back has no price."""
    rows = cells(reasons_table(plan()))
    assert rows[0][1:] == ["milp", "5.0 ms", "the loss (4.0 ms per GiB)"] and rows[1][2] == "MSPS of 200 GiB/s"
    free = replace(plan(), reasons=(Reasons(objective="recompute", method="greedy", ms_per_gib=0.0),))
    assert cells(reasons_table(free))[0][1:] == ["greedy", "-", "nothing"]


def test_operators_of_a_module() -> None:
    """Those with a cost, in order; 1 GiB in 8 ms is an MSPS of 125 GiB/s. The view is not listed."""
    table = decision_table(unit("layers.0"), plan())
    assert [row[:-1] for row in cells(table)] == [
        ["mm #0", "2x3", "1.00 GiB", "8.000 ms", "125.0", "keep"],
        ["mm #1", "2x3", "1.00 GiB", "2.000 ms", "500.0", "recompute"],
        ["c10d.all_gather #0", "2x3", "512.0 MiB", "0.000 ms", "-", "keep"],
    ]
    assert [row[-1] for row in cells(table)] == ["expensive to recompute", "cheap to recompute", "must be kept"]
    assert table.row_count == 3 and "1 operator " in str(table.caption)
    offloaded = unit("layers.0", (replace(DECISIONS[0], offload=True), *DECISIONS))
    assert cells(decision_table(offloaded))[0][-2] == "offload"


def test_outputs_in_a_word() -> None:
    """The shape of the first output; a scalar has none; an operator without outputs leaves the cell empty."""
    scalar = replace(DECISIONS[0], outputs=(((), "float32"), ((4,), "int64")))
    nothing = replace(DECISIONS[0], occurrence=1, outputs=())
    infinite = replace(DECISIONS[0], occurrence=2, msps=float("inf"))
    rows = cells(decision_table(unit("layers.0", (scalar, nothing, infinite))))
    assert [row[1] for row in rows] == ["scalar", "", "2x3"] and rows[2][4] == "-"


def test_the_summary_of_a_plan() -> None:
    """How many modules on how many GPUs; what the job needs; the certainty, unless notes tell it; each note."""
    certain = replace(
        plan(unit("layers.0")),
        certainty=Certainty(confidence=0.95, margin_bytes=GIB, fits=0.975, step_low_ms=990.0, step_high_ms=1010.0),
    )
    told = lines(plan_summary(certain))
    assert told[0].startswith("llama3 8B on 8 x h100: 1 ")
    assert any(line.endswith("--a=1 --b") for line in told)
    assert "0.975" in told[-1] or "97.5" in told[-1]
    assert "990.0 ms to 1,010.0 ms" in told[-1] and told[-1].endswith("0.95")
    noted = lines(plan_summary(certain, ["first", "second"]))
    assert noted[-2:] == ["- first", "- second"] and not any("990.0" in line for line in noted)


def test_figures_over_draws() -> None:
    """Median, 95th percentile, least and most, in the unit that the name ends with."""
    statistics = [
        Statistic(name="peak_active_bytes", median=GIB, p95=2 * GIB, least=GIB // 2, most=3 * GIB),
        Statistic(name="step_ms", median=10.0, p95=12.0, least=9.0, most=1500.0),
        Statistic(name="tokens_per_second", median=1e6, p95=2e6, least=5.0, most=3e6),
    ]
    assert cells(draws_table(statistics, "uniform", [])) == [
        ["peak active", "1.00 GiB", "2.00 GiB", "512.0 MiB", "3.00 GiB"],
        ["step", "10.0 ms", "12.0 ms", "9.0 ms", "1,500.0 ms"],
        ["tokens per second", "1,000,000", "2,000,000", "5", "3,000,000"],
    ]


@pytest.mark.parametrize(("short_by_bytes", "mib"), [(1, 1), (MIB, 1), (MIB + 1, 2), (10 * MIB, 10)])
def test_a_verdict_in_a_line(short_by_bytes: int, mib: int) -> None:
    """What is short is rounded up to whole MiB; what lies in no module lies in the step."""
    verdict = Verdict(outcome=Outcome.OUT_OF_MEMORY, op="aten.mm.default", short_by_bytes=short_by_bytes)
    assert str(verdict) == f"out of memory at aten.mm.default in the step, short by {mib} MiB"


@pytest.fixture
def peak() -> Callable[[int], PeakReport]:
    """The report on the peak of a step: a parameter of 4 KiB, an activation of 2, 1 more in the attention."""
    b = TraceBuilder()
    b.in_prologue, b.phase = True, Phase.SETUP
    b.alloc(4096, Label.PARAMETER)
    b.in_prologue, b.phase, b.module = False, Phase.FORWARD, "layers.0"
    hidden = b.alloc(2048, op="aten.relu.default")
    b.module = "layers.0.attention"
    scores = b.alloc(1024, op="aten.mm.default")
    b.op("aten.mm.default", [hidden], [scores])
    b.free(scores, hidden)
    timeline = simulate_memory(b.build())
    return lambda largest: timeline.peak(largest=largest)


def test_what_a_peak_consists_of(peak: Callable[[int], PeakReport]) -> None:
    """7 KiB: by allocation, largest first, and by module with all below it."""
    report = peak(2)
    assert (report.nbytes, report.event, report.op) == (7168, 1, "aten.mm.default")
    assert [live.nbytes for live in report.largest] == [4096, 2048]
    subtrees = {share.module: share.subtree_bytes for share in report.by_module}
    assert subtrees == {"": 7168, "layers": 3072, "layers.0": 3072, "layers.0.attention": 1024}
