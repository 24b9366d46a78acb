"""What is offloaded, in captured steps: copies, their streams, what waits for them, and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autosac.api import EagerCaptures
from autosac.memory_sim import Category
from autosac.planning.planner import full_plan
from autosac.plans import Plan
from autosac.simulation import Simulation, Target
from autosac.trace import Alloc, EventRecord, EventWait, Free, Op

ROWS, WIDTH, BLOCKS = 65536, 1024, 4
HIDDEN_BYTES = ROWS * 4 * WIDTH * 4


def keeping_the_first_product(plan: Plan, *, offload: bool) -> Plan:
    """The plan that keeps the result of every block's first product."""
    units = []
    for unit in plan.units:
        first = [decision.op for decision in unit.decisions].index("aten.mm.default")
        rows = [replace(d, keep=i == first, offload=offload and i == first) for i, d in enumerate(unit.decisions)]
        units.append(replace(unit, decisions=tuple(rows)))
    return replace(plan, units=tuple(units))


def under(products: Any, offload: bool, pcie_gbps: float = 63.0) -> Simulation:
    """The step with the products kept, on the device or on the host."""
    machine = Target.of("h100-sxm-80gb", 1)
    machine = replace(machine, hardware=replace(machine.hardware, pcie_gbps=pcie_gbps))
    captures = EagerCaptures(products(rows=ROWS, width=WIDTH, blocks=BLOCKS), machine)
    return captures.under(keeping_the_first_product(full_plan(captures.observed()), offload=offload))


@pytest.fixture(scope="module")
def kept(products: Any) -> Simulation:
    """The products stay on the device."""
    return under(products, False)


@pytest.fixture(scope="module")
def offloaded(products: Any) -> Simulation:
    """They wait on the host."""
    return under(products, True)


def copies(simulation: Simulation, places: tuple[str, str]) -> list[tuple[int, Op]]:
    """Copies between these places (to, from), with their positions."""
    trace = simulation.trace
    return [
        (i, op)
        for i, op in trace.operators()
        if trace.signatures[op.signature].name == "aten.copy_.default"
        and tuple(meta.place for meta in trace.signatures[op.signature].inputs) == places
    ]


def test_copies_run_on_streams_of_their_own(kept: Simulation, offloaded: Simulation) -> None:
    """One to the host for each block; none back for the last, whose backward comes before its result has left."""
    out, back = copies(offloaded, ("cpu", "device")), copies(offloaded, ("device", "cpu"))
    assert len(out) == BLOCKS and len(back) == BLOCKS - 1
    streams = {0}, {op.stream for _, op in out}, {op.stream for _, op in back}
    assert [len(stream) for stream in streams] == [1, 1, 1] and len(set.union(*streams)) == 3
    assert not copies(kept, ("cpu", "device")) and not copies(kept, ("device", "cpu"))


def test_the_compute_stream_waits_for_them(offloaded: Simulation) -> None:
    """Before a result's memory is freed for the copy out of it, before it is read for the copy into it."""
    events = offloaded.trace.events

    def waited(copy: int) -> int:
        record = events[copy + 1]
        assert type(record) is EventRecord and record.stream == events[copy].stream
        return events.index(EventWait(record.event, 0), copy)

    for i, op in copies(offloaded, ("cpu", "device"))[:-1]:
        assert waited(i) < events.index(Free(op.inputs[1]), i)
    for i, op in copies(offloaded, ("device", "cpu")):
        reads = [j for j, other in offloaded.trace.operators() if j > i and op.inputs[0] in other.inputs]
        assert waited(i) < min(reads)


def test_memory_falls_by_what_is_on_the_host(kept: Simulation, offloaded: Simulation) -> None:
    """At the peak, in the backward of the last block, its own result and the next one's are on the device, the others' not.

    Host memory counts nowhere, and the step takes as long as before: the copies hide.
    """
    assert kept.peak_active_bytes - offloaded.peak_active_bytes == (BLOCKS - 2) * HIDDEN_BYTES
    assert offloaded.step_ms == pytest.approx(kept.step_ms, rel=1e-3)
    assert offloaded.recompute_ms == kept.recompute_ms
    made = len(kept.trace.storages) + 2 * (BLOCKS - 1)  # two steps
    assert len(offloaded.trace.storages) == made


def test_what_has_come_back_is_an_activation(offloaded: Simulation) -> None:
    """And no gradient, although the backward has made its memory."""
    at, op = copies(offloaded, ("device", "cpu"))[0]
    begun = offloaded.trace.events.index(Alloc(op.inputs[0]))
    categories = offloaded.memory.breakdown_at(at)
    before = offloaded.memory.breakdown_at(begun - 1)
    assert categories[Category.ACTIVATION] - before[Category.ACTIVATION] == HIDDEN_BYTES


def test_slow_copies_show_in_the_step(products: Any, kept: Simulation, offloaded: Simulation) -> None:
    """Over a link at an eighth of the speed a copy takes longer than a forward of a block: the step waits."""
    slow = under(products, True, 8.0)
    assert slow.breakdown.exposed_copy_ms > 100 and slow.step_ms > kept.step_ms + 100
    assert slow.peak_active_bytes == offloaded.peak_active_bytes
