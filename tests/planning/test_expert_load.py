"""Figures over draws, plans over draws on stand-ins for the job, and dynamic shapes, on traces made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.capture.moe_load import MoELoad
from autosac.errors import InfeasibleError, UsageError
from autosac.jobs import expert_load as draws
from autosac.jobs.dynamic_shapes import routers_layer, with_dynamic_shapes
from autosac.jobs.expert_load import at_quantile, plan_over_draws
from autosac.planning.closed_loop import Goal
from autosac.trace import Call, Op, Phase, Region, Signature, TensorMeta, Trace
from traces import trace_of


@pytest.mark.parametrize(("count", "median", "high"), [(1, 0, 0), (2, 0, 1), (5, 2, 4), (20, 9, 18), (100, 49, 94)])
def test_nearest_rank(count: int, median: int, high: int) -> None:
    """The quantile q of 0 ... N - 1 is the ceil(q N)-th smallest, whatever the order."""
    values = list(range(count))[::-1]
    assert (at_quantile(values, 0.5, float), at_quantile(values, 0.95, float)) == (median, high)


class Job:
    """A job whose peak without checkpointing is `plain[draw]`."""

    moe_load = MoELoad.parse("zipf")

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def draw(self, number: int) -> Job:
        return Job(number)

    def progress(self, _: str) -> None:
        pass


class Planned(SimpleNamespace):
    """A plan made on a draw."""

    def save(self, path: Any) -> None:
        path.write_text(str(self.draw))


def stand_ins(monkeypatch: pytest.MonkeyPatch, plain: Sequence[int], under: dict[int, Sequence[int]]) -> list[int]:
    """Peaks without checkpointing by draw, and by draw under the plan made for a draw. Returns the draws planned for."""
    planned_for: list[int] = []

    def simulated(_: Any, count: int, *, plan_file: str | None = None, **__: Any) -> list[Any]:
        peaks = plain if plan_file is None else under[int(Path(plan_file).read_text())]
        return [SimpleNamespace(peak_bytes=lambda _, p=p: p, step_ms=float(p)) for p in peaks[:count]]

    def planned(job: Job, _: Goal) -> tuple[draws.Planned]:
        planned_for.append(job.number)
        simulation: Any = SimpleNamespace(step_ms=60.0)  # of one rank by itself
        return (draws.Planned(plan=Planned(draw=job.number), simulation=simulation),)  # type: ignore[arg-type]

    monkeypatch.setattr(draws, "simulate_draws", simulated)
    monkeypatch.setattr(draws, "plan_titan_job", planned)
    return planned_for


def test_the_plan_is_made_for_an_unlucky_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four draws the worst one is planned for; if another one is above the budget then, the plan is made for that."""
    seen = stand_ins(monkeypatch, [70, 90, 80, 60], {1: [50, 60, 61, 55], 2: [50, 60, 60, 55]})
    found = plan_over_draws(Job(), Goal(budget_bytes=60), 4)  # type: ignore[arg-type]
    assert seen == [1, 2] and "within the budget in 4 of 4" in found.notes[0]
    assert len(found.notes) == 2  # no step is longer than that of one rank by itself


def test_steps_that_wait_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned step takes 60 ms by itself, and 61 in a draw: there it waits for another rank."""
    stand_ins(monkeypatch, [70], {0: [61]})
    found = plan_over_draws(Job(), Goal(budget_bytes=61), 1)  # type: ignore[arg-type]
    assert "wait for the rank whose experts get most tokens" in found.notes[-1]


def test_one_draw_of_twenty_may_be_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 95th percentile of twenty is the second largest: the largest need not fit."""
    plain = list(range(100, 120))
    seen = stand_ins(monkeypatch, plain, {18: [60] * 19 + [99]})
    found = plan_over_draws(Job(), Goal(budget_bytes=60), 20)  # type: ignore[arg-type]
    assert seen == [18] and "within the budget in 19 of 20" in found.notes[0]


def test_draws_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that make each other's draw the worst end with an error that names them; no draws are refused."""
    stand_ins(monkeypatch, [70, 90], {1: [65, 60], 0: [60, 65]})
    with pytest.raises(InfeasibleError, match="draw 0 needs 65 B in draw 1"):
        plan_over_draws(Job(), Goal(budget_bytes=60), 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        plan_over_draws(Job(), Goal(budget_bytes=60), 0)  # type: ignore[arg-type]


# ---- dynamic shapes -----------------------------------------------------------------------------------------------------

MODULES = ("", "layers.0.moe", "layers.1.moe", "output")


def call(op: str, *shape: int, occurrence: int = 0) -> Call:
    """A call that returns one tensor."""
    outputs = (TensorMeta(shape, (1,) * len(shape), "bfloat16"),)
    return Call(op, occurrence, outputs, 0, 0, False, False, False, (), (), (), (-1,) * len(outputs))


def trace(*regions: tuple[int, Sequence[Call]], names: Sequence[str] = ()) -> Trace:
    """A trace of observed regions, with operators of these names in the last MoE module."""
    return trace_of(
        (Op(i, 0, 2, Phase.FORWARD, 0, (), ()) for i in range(len(names))),
        signatures=(Signature(name, (), ()) for name in names),
        modules=MODULES,
        regions=(Region(module, 0, 0, tuple(calls), (), ()) for module, calls in regions),
    )


def shapes(found: Trace) -> list[list[tuple[int, ...]]]:
    """The shapes of each region's calls."""
    return [[c.outputs[0].shape for c in region.calls] for region in found.regions]


def test_dynamic_shapes() -> None:
    """What differs between two loads is open in all modules of the kind, also where it happens to be equal; nothing else."""
    one = trace((1, [call("mm", 8, 4), call("cat", 9)]), (2, [call("mm", 8, 4)]), (3, [call("mm", 8, 4)]))
    other = trace((1, [call("mm", 7, 4), call("cat", 9)]), (2, [call("mm", 8, 4)]), (3, [call("mm", 8, 4)]))
    assert shapes(with_dynamic_shapes(one, other)) == [[(-1, 4), (9,)], [(-1, 4)], [(8, 4)]]
    assert with_dynamic_shapes(one, one) is one


def test_microbatches_have_dynamic_shapes() -> None:
    """Two executions of one module within a capture tell the same; a view, which has no number, is left alone."""
    one = trace(
        (1, [call("mm", 8), call("view", 3, occurrence=-1)]), (1, [call("mm", 6), call("view", 2, occurrence=-1)])
    )
    assert shapes(with_dynamic_shapes(one, one)) == [[(-1,), (3,)], [(-1,), (2,)]]


def test_where_routing_changes_sizes() -> None:
    """The layer of the first histogram, unless sizes are padded to a constant: a grouped product, no exchange."""
    assert routers_layer(trace(names=["aten.mm.default"])) is None
    assert routers_layer(trace(names=["aten.histc.default"])) == 1
    assert routers_layer(trace(names=["aten.histc.default", "aten._grouped_mm.default"])) is None
