"""The rank for which others wait: who takes its place, and the step of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosac.capture.moe_load import MoELoad
from autosac.jobs.titan import TitanJob
from autosac.jobs.waiting import busiest_beside, fullest
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Alloc, Collective, Event, Free, Group, Label, Op, Phase, Signature, Storage, TensorMeta, Trace
from traces import trace_of

TARGET = Target.of("h100-sxm-80gb", 4)
JOB = TitanJob(config_file="job.toml", target=TARGET, world_size=4, moe_load=MoELoad.parse("zipf"))
COUNTED, PRODUCT = Signature("aten.histc.default", (), ()), "aten.mm.default"


def exchange(group: int = 0, kind: str = "all_to_all") -> Collective:
    """A collective of 1 MiB on the compute stream."""
    return Collective(kind, 2**20, group, 0, False, -1, -1, -1, 0, 0, Phase.FORWARD, 0, (), ())


def step(rows: int, rank: int = 0, events: tuple[Event, ...] | None = None) -> Trace:
    """Tokens are counted and exchanged, `rows` of them go through an expert, and all are exchanged again."""
    x, y = TensorMeta((rows, 4096), (4096, 1), "bfloat16"), TensorMeta((4096, 4096), (4096, 1), "bfloat16")
    operators = (COUNTED, Signature(PRODUCT, (x, y), (x,)))
    count, product = (Op(i, 0, 0, Phase.FORWARD, 0, (), ()) for i in range(2))
    return trace_of(
        events if events is not None else (count, exchange(), product, exchange()),
        signatures=operators,
        groups=(Group.of("experts", (0, 1)), Group.of("others", (0, 2))),
        world_size=4,
        rank=rank,
    )


def simulated(trace: Trace) -> Simulation:
    """On four H100s."""
    return simulation_of(trace, TARGET)


def test_who_is_waited_for() -> None:
    """Another rank of the group that exchanges tokens after they were counted, and nobody where none are exchanged."""
    found = busiest_beside(JOB, step(8))
    assert found == replace(JOB, rank=1, moe_load=replace(JOB.moe_load, busiest=True))
    count = Op(0, 0, 0, Phase.FORWARD, 0, (), ())
    rotated = step(8, events=(exchange(1), count, exchange(1, "all_gather"), exchange(0)))
    assert busiest_beside(JOB, rotated) == found
    assert busiest_beside(JOB, step(8, events=(exchange(0), count))) is None


def test_waiting() -> None:
    """A rank with 8 rows waits for one with 65,536: its step takes as long, its prices and its memory are its own."""
    idle, busy = simulated(step(8)), simulated(step(65536, rank=1))
    together = fullest([idle], [busy])
    assert together.trace is idle.trace and together.peak_active_bytes == idle.peak_active_bytes
    assert together.step_ms == pytest.approx(busy.step_ms) and together.step_ms > 2 * idle.step_ms
    assert together.breakdown.bubble_ms == pytest.approx(busy.step_ms - idle.step_ms, rel=0.05)
    assert fullest([busy], [idle.on(TARGET)]).step_ms == pytest.approx(busy.step_ms)
    assert fullest([idle]) is idle


def holding(*nbytes: int, rank: int) -> Simulation:
    """A rank that holds the first buffers (MiB) together, and then the last one alone."""
    buffers = tuple(Storage(mib * 2**20, 0, Label.NONE, Phase.FORWARD, 0, 0, "") for mib in nbytes)
    first = range(len(nbytes) - 1)
    events = (*map(Alloc, first), *map(Free, first), Alloc(len(first)), Free(len(first)))
    return simulated(trace_of(events, storages=buffers, rank=rank, world_size=4))


def test_the_fullest_stage_is_that_for_which_most_is_reserved() -> None:
    """64 buffers of 40 MiB cannot serve 1,000 MiB: that stage reserves more than one with 2,600 MiB active, and counts."""
    scattered, packed = holding(*(40,) * 64, 1000, rank=0), holding(2600, 2600, rank=1)
    assert (scattered.peak_active_bytes, packed.peak_active_bytes) == (2560 * 2**20, 2600 * 2**20)
    assert (scattered.peak_reserved_bytes, packed.peak_reserved_bytes) == (3560 * 2**20, 2600 * 2**20)
    assert fullest([packed, scattered]).trace is scattered.trace
    # Cached memory is given back before anything runs out of it: of two stages above the GPU's 80 GiB only one does not fit.
    tight = holding(*(40,) * 1400, 30000, rank=0)
    full = holding(85000, 10, rank=1)
    assert tight.fits and not full.fits and tight.peak_reserved_bytes > full.peak_reserved_bytes
    assert fullest([tight, full]).trace is full.trace
