"""What checkpointing accounts for, on stored steps: recomputations and ends of storages, nothing else. Steps under plans are
derived from no others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autosac.derivation import Deriver, NotDerivableError, UncheckpointedStep
from autosac.planning.planner import Goal, Planner, plan_of
from autosac.plans import Plan
from autosac.simulation import Target, simulation_of
from autosac.trace import Event, Free, Op, Phase, Trace
from traces import TraceBuilder

STORED = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def observed() -> Trace:
    """The stored step without checkpointing."""
    return Trace.load(STORED / "observed.trace")


@pytest.mark.parametrize("name", ["observed", "outer", "inner"])
def test_a_step_under_checkpointing_has_the_rows_of_that_without(observed: Trace, name: str) -> None:
    """Whichever modules recompute."""
    assert UncheckpointedStep(observed).is_in(Trace.load(STORED / f"{name}.trace"))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER])
def test_a_step_without_one_operator_is_another(observed: Trace, phase: Phase) -> None:
    """Of any phase; more operators or others than before are none of checkpointing either."""
    outer = Trace.load(STORED / "outer.trace")
    rows = [i for i, row in enumerate(outer.events) if type(row) is Op and row.phase is phase]
    places = [i for i in rows if not outer.signatures[outer.events[i].signature].is_view]  # type: ignore[union-attr]
    i = places[len(places) // 2]
    without = replace(outer, events=(*outer.events[:i], *outer.events[i + 1 :]))
    twice = replace(outer, events=(*outer.events[:i], outer.events[i], *outer.events[i:]))
    assert not UncheckpointedStep(observed).is_in(without)
    assert not UncheckpointedStep(observed).is_in(twice)


def test_a_step_that_ends_early_is_another(observed: Trace) -> None:
    """The last row that is no storage's end is missing in the one or in the other."""
    outer = Trace.load(STORED / "outer.trace")
    short, shorter = (
        replace(trace, events=trace.events[: max(i for i, row in enumerate(trace.events) if type(row) is not Free)])
        for trace in (observed, outer)
    )
    assert not UncheckpointedStep(observed).is_in(shorter)
    assert not UncheckpointedStep(short).is_in(outer)
    assert UncheckpointedStep(short).is_in(shorter)


def _ending(trace: Trace, label: str, end: int | None) -> Trace:
    """The step in which the storage with this operator ends in row `end`, or never."""
    (storage,) = {i for i, found in enumerate(trace.storages) if found.op == label}
    events = [row for row in trace.events if not (type(row) is Free and row.storage == storage)]
    if end is not None:
        events.insert(end, Free(storage))
    return replace(trace, events=tuple(events))


def test_what_the_forward_does_not_hold_ends_at_the_same_place() -> None:
    """A temporary of the forward, a gradient; not an activation, whose end checkpointing moves."""
    made = TraceBuilder()
    made.step(0)
    made.phase = Phase.FORWARD
    temporary, activation = made.alloc(512, op="temporary"), made.alloc(512, op="activation")
    made.free(temporary)
    made.op("forward", outputs=(activation,))
    made.phase = Phase.BACKWARD
    gradient = made.alloc(512, op="gradient")
    made.op("backward", inputs=(activation,), outputs=(gradient,))
    made.free(activation)
    made.free(gradient)
    made.op("last")
    plain = made.build()
    known, rows = UncheckpointedStep(plain), len(plain.events)
    assert known.is_in(plain) and known.is_in(_ending(plain, "activation", 3))
    assert not known.is_in(_ending(plain, "temporary", rows - 2))
    assert not known.is_in(_ending(plain, "temporary", None))
    assert not known.is_in(_ending(plain, "gradient", None))
    assert not known.is_in(_ending(plain, "gradient", rows - 1)), "after the last operator"


def test_one_step_is_looked_for_in_several(observed: Trace) -> None:
    """Each answer is that of the first one to be asked, whatever else was asked before."""
    outside = UncheckpointedStep(observed)
    outer = Trace.load(STORED / "outer.trace")
    other = replace(outer, events=outer.events[: len(outer.events) // 2])
    assert [outside.is_in(trace) for trace in (other, outer, other, observed)] == [False, True, False, True]


@pytest.fixture(scope="module")
def plan(observed: Trace) -> Plan:
    """The plan in which one of the outermost modules recomputes everything."""
    base = simulation_of(observed, Target.of("h100-sxm-80gb", 8))
    planner = Planner(base, Goal(budget_bytes=2**40))
    unit = next(unit for unit in planner.policies.units if unit.name == "layers.0")
    return plan_of(base, planner.goal, (unit.recompute_all(),))


def derived(observed: Trace, events: tuple[Event, ...], plan: Plan) -> Trace:
    """The step under the plan, by a template with these events."""
    deriver = Deriver(observed)
    deriver.add(replace(Trace.load(STORED / "outer.trace"), events=events))
    return deriver.under(plan)


def test_a_plan_for_one_module_recomputes_it(observed: Trace, plan: Plan) -> None:
    """The stored template serves: the step differs from the observed one in recomputation of that module only."""
    found = derived(observed, Trace.load(STORED / "outer.trace").events, plan)
    again = {found.modules[op.module] for _, op in found.operators() if op.phase is Phase.RECOMPUTE}
    assert again and all(name == "layers.0" or name.startswith("layers.0.") for name in again)
    assert UncheckpointedStep(observed).is_in(found)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("change", ["without", "twice"])
def test_no_step_is_derived_from_a_template_of_another(observed: Trace, plan: Plan, place: str, change: str) -> None:
    """One without the first or the last operator of the optimizer, and one that has it twice."""
    events = Trace.load(STORED / "outer.trace").events
    rows = [i for i, row in enumerate(events) if type(row) is Op and row.phase is Phase.OPTIMIZER]
    i = rows[0] if place == "first" else rows[-1]
    changed = (*events[:i], *((events[i], events[i]) if change == "twice" else ()), *events[i + 1 :])
    with pytest.raises(NotDerivableError, match="depend on checkpointing"):
        derived(observed, changed, plan)


def step(checkpointed: bool, gathers: str = "gather", halves: str = "aten.floor_divide.default") -> Trace:
    """A block whose parameters FSDP gathers before its backward, or in the recomputation of the job's own checkpointing, which
    runs the block's product again and corrects a count before the optimizer's step.
    """
    made = TraceBuilder()

    def operators(phase: Phase, module: str, *names: str) -> None:
        made.phase, made.module = phase, module
        if phase is not Phase.OPTIMIZER and not made.in_prologue:
            made.enter(module)
        for name in names:
            storage = made.alloc(512, op=name)
            if not made.in_prologue:
                made.op(name, outputs=(storage,))
            made.free(storage)
        if phase is not Phase.OPTIMIZER and not made.in_prologue:
            made.leave(module)

    for number in range(2):
        made.in_prologue = number == 0
        if made.in_prologue:
            made.step(number)
        operators(Phase.FORWARD, "layers.0", "aten.mm.default")
        if checkpointed:
            operators(Phase.RECOMPUTE, "layers.0", "aten.mm.default", gathers)
        operators(Phase.BACKWARD, "layers.0", *(() if checkpointed else (gathers,)), "aten.mul.default")
        operators(Phase.OPTIMIZER, "", *((halves,) if checkpointed else ()), "aten.add.default")
    trace = made.build()
    return replace(trace, sources=("model.py",) * len(trace.sources))  # storages are known by their lines, too


def test_own_checkpointing_gathers_in_its_recomputation() -> None:
    """What the plain step gathers in the backward is looked for there, and what corrects a count is none of the step's."""
    assert UncheckpointedStep(step(False)).is_in(step(True))
    assert not UncheckpointedStep(step(False)).is_in(step(True, gathers="other"))
    assert not UncheckpointedStep(step(False)).is_in(step(True, halves="aten.div.Tensor"))
    assert not UncheckpointedStep(step(True)).is_in(step(False))
