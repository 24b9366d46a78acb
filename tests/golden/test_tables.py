"""Tables of several plans, batch sizes, levers, ranks, draws and differences, pinned as they are printed.

See `test_stored_step` for how to write the expectations anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pinned import check

from autosac.display.terminal import PlainConsole
from autosac.errors import CaptureError
from autosac.jobs.levers import Lever, Pulled
from autosac.planning.closed_loop import Planned
from autosac.plans import Plan, Prediction, Unit
from autosac.plans.diff import compare_plans
from autosac.report import summaries
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Trace
from plans import LLAMA_8B, prediction

FOLDER = Path(__file__).parent
GIB = 2**30


@pytest.fixture(scope="module")
def steps() -> dict[str, Simulation]:
    """Two stored steps."""
    target = Target.of("h100-sxm-80gb", 8)
    return {name: simulation_of(Trace.load(FOLDER / f"{name}.trace"), target) for name in ("observed", "outer")}


def step(step_ms: float, gib: int, more_reserved_gib: int | None = 2) -> Prediction:
    """A step of this time and peak, on a GPU of 80 GiB; without recomputation it would take 900 ms."""
    return prediction(step_ms, gib, more_reserved_gib=more_reserved_gib, fits=gib < 80, recompute_ms=step_ms - 900)


def plan(gib: int, step_ms: float, kept: int = 5) -> Plan:
    """A plan for a budget, with one unit."""
    unit = Unit(fqn="layers.0", discard_fraction=0.5, kept_bytes=kept * GIB, recompute_ms=2.0, decisions=())
    return Plan(
        made_for=replace(LLAMA_8B, budget_bytes=gib * GIB),
        units=(unit,),
        predictions={
            "autosac": step(step_ms, gib - 3),
            "none": step(900.0, 118),
            "full": step(1300.0, 38),
            "mine": step(1000.0, 60, None),
        },
    )


def planned(gib: int, step_ms: float) -> Planned:
    """The plan with a step whose peak it states, and which trains on a million tokens in a second without recomputation."""
    step: Any = SimpleNamespace(
        peak_bytes=lambda kind: (gib - (1 if kind == "reserved" else 3)) * GIB,
        throughput=SimpleNamespace(tokens_per_second=9e8 / step_ms),
    )
    return Planned(plan=plan(gib, step_ms), simulation=step)


def printed(*parts: Any) -> str:
    """As on a terminal of 160 columns."""
    out = summaries.console()
    out.width = 160
    with out.capture() as told:
        for part in parts:
            out.print(part)
    return told.get()


def styled(*parts: Any) -> str:
    """What has a style of its own, in order."""
    out = PlainConsole(width=160, force_terminal=True)
    segments = (segment for part in parts for line in out.render_lines(part) for segment in line)
    own = [(segment.style, segment.text.strip()) for segment in segments]
    return "\n".join(f"{style}: {text}" for style, text in own if style and text.strip("─━│┃┏┓└┘┳┴┡╇┩┼ "))


def test_plans_batches_and_levers() -> None:
    """Budgets that are the peaks of policies say so; the best batch is marked; levers without a plan say why."""
    found = [planned(gib, step_ms) for gib, step_ms in ((40, 1250.0), (60, 1000.0), (120, 910.0))]
    active = [replace(p, plan=replace(p.plan, made_for=replace(p.plan.made_for, budget_kind="active"))) for p in found]
    trials = (
        SimpleNamespace(
            local_batch_size=1, least_bytes=0, unplanned=None, planned=None, tokens_per_second=0, outcome="too slow"
        ),
        SimpleNamespace(
            local_batch_size=2,
            least_bytes=30 * GIB,
            unplanned=SimpleNamespace(peak_bytes=50 * GIB, tokens_per_second=7e5),
            planned=found[0],
            tokens_per_second=720_000,
            outcome="planned",
        ),
        SimpleNamespace(
            local_batch_size=4,
            least_bytes=GIB,
            unplanned=None,
            planned=found[1],
            tokens_per_second=9e5,
            outcome="planned",
        ),
    )
    tables = []
    for whole in (64, 0):
        sizes = SimpleNamespace(global_batch_size=whole, accumulation=lambda size: 8 // size)
        batch: Any = SimpleNamespace(sizes=sizes, planned=found[1], trials=trials)
        tables.append(summaries.batch_table(batch))
    levers = (
        Pulled(
            levers=(Lever(name="fused", kind="optimizer", overrides=("--optimizer.implementation", "fused")),),
            planned=found[1],
        ),
        Pulled(
            levers=(Lever(name="float8", kind="numbers", option="--x", numbers="products in 8 bits"),), planned=found[2]
        ),
        Pulled(
            levers=(Lever(name="allocator", kind="a", allocator="max_split_size_mb:64"),),
            failure="no plan (at a.py:1; --debug); at all",
        ),
    )
    tables += [
        summaries.budgets_table(found),
        summaries.budgets_table(active),
        summaries.lever_table(found[0], levers, "reserved"),
    ]
    check(FOLDER / "tables-plans.txt", printed(*tables))
    check(FOLDER / "styles-plans.txt", styled(*tables))


def test_ranks_modes_and_draws(steps: dict[str, Simulation]) -> None:
    """Figures of stored steps beside each other, a way of checkpointing that fails, and the spread over draws."""
    own, other = steps["observed"], steps["outer"]
    modes = {"full": other, "selective-op": CaptureError("out of luck"), "mine": own}
    spread = [
        SimpleNamespace(name=name, median=scale, p95=2 * scale, least=scale / 2, most=3 * scale)
        for name, scale in (("step_ms", 900.0), ("peak_active_bytes", 3.0 * GIB), ("tokens_per_second", 12345.6))
    ]
    full: Any = SimpleNamespace(
        allocation=SimpleNamespace(verdict=SimpleNamespace(outcome=SimpleNamespace(value="out of memory")))
    )
    tables = [
        summaries.ranks_table([own, other]),
        summaries.mode_table(own, modes),
        summaries.mode_table(other, {}),
        summaries.draws_table(spread, "zipf:1.2", [own, full]),  # type: ignore[arg-type]
        summaries.draws_table(spread[:1], "uniform", [own]),  # type: ignore[arg-type]
    ]
    check(FOLDER / "tables-steps.txt", printed(*tables))
    check(FOLDER / "styles-steps.txt", styled(*tables))


def test_differences() -> None:
    """Of nothing, of the budget alone, and of what modules keep."""
    first = plan(40, 1250.0)
    budget = replace(first, made_for=replace(first.made_for, budget_bytes=50 * GIB))
    parts = [
        summaries.difference_tables(compare_plans(first, other), "a.json", "b.json")
        for other in (first, budget, plan(60, 1000.0, kept=9))
    ]
    check(FOLDER / "tables-differences.txt", printed(*parts))


def test_what_does_not_fit_is_red() -> None:
    """Beside a budget of 40 GiB reserved: its own plan (39 GiB) and full checkpointing (40) keep to it, the others do not (120
    GiB, and 60 without a reserved peak), and 118 GiB do not fit the GPU either.
    """
    shown = styled(summaries.policy_table(plan(40, 1250.0).predictions, 40 * GIB, "reserved")).splitlines()
    cells = [line for line in shown if line.partition(": ")[0] in ("red", "green")]
    assert cells == [
        *("green: 97.5%", "green: fits"),
        *("red: 300.0%", "red: out of memory"),
        *("green: 100.0%", "green: fits"),
        *("red: 150.0%", "green: fits"),
    ]
    assert [line for line in shown if line.startswith("bold: ")][7:] == ["bold: AutoSAC"]  # after seven headings
