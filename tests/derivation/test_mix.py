"""The mixture of two hand-made captures, event by event."""

from __future__ import annotations

from dataclasses import replace

from autosac.derivation.mix import Mixer
from autosac.derivation.steps import CapturedSteps
from autosac.trace import (
    Alloc,
    Call,
    Collective,
    Event,
    EventRecord,
    EventWait,
    Free,
    Group,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    Region,
    Signature,
    Storage,
    Trace,
    WorkWait,
)
from traces import trace_of

FORWARD, BACKWARD, RECOMPUTE = Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE
OP = {phase: Op(0, 0, 1, phase, 0, (), (0,)) for phase in (FORWARD, RECOMPUTE)}


def gather(work: int) -> Collective:
    """An all-gather on stream 0."""
    return Collective("all_gather", 64, 0, 0, True, work, -1, -1, 1, 1, FORWARD, 0, (0,), ())


def capture(events: list[Event], phases: tuple[Phase, ...]) -> Trace:
    """A step of one block, with a storage of 512 bytes made in each of the phases."""
    return trace_of(
        events,
        signatures=(Signature("aten.mm.default", (), ()), Signature("c10d._allgather_base_.default", (), ())),
        storages=(Storage(512, 0, Label.NONE, phase, 1, 0, "aten.mm.default") for phase in phases),
        modules=("", "block"),
        groups=(Group.of("dp", (0, 1)),),
        streams=("compute", "gather"),
    )


def observed() -> Trace:
    """The block's result waits for its backward; events are numbered 5, 6 and 4 (nobody waits for that), the collective 4."""
    return capture(
        [
            ModuleEnter(1, FORWARD),
            Alloc(0),
            OP[FORWARD],
            EventRecord(5, 0),
            EventWait(5, 1),
            gather(4),
            EventRecord(4, 0),
            ModuleExit(1, FORWARD),
            EventRecord(6, 1),
            EventWait(6, 0),
            WorkWait(4, 0),
            ModuleEnter(1, BACKWARD),
            Op(0, 0, 1, BACKWARD, 0, (0,), ()),
            Free(0),
            ModuleExit(1, BACKWARD),
        ],
        (FORWARD,),
    )


def recomputing() -> Trace:
    """The result dies in the forward and is made anew; events are numbered 8, 9 and 2, and 7 in between, the collective 6."""
    return capture(
        [
            ModuleEnter(1, FORWARD),
            Alloc(0),
            OP[FORWARD],
            EventRecord(8, 0),
            EventWait(8, 1),
            gather(6),
            EventRecord(2, 0),
            Free(0),
            ModuleExit(1, FORWARD),
            EventRecord(9, 1),
            EventWait(9, 0),
            WorkWait(6, 0),
            ModuleEnter(1, BACKWARD),
            ModuleEnter(1, RECOMPUTE),
            Alloc(1),
            OP[RECOMPUTE]._replace(outputs=(1,)),
            EventRecord(7, 0),
            ModuleExit(1, RECOMPUTE),
            Op(0, 0, 1, BACKWARD, 0, (1,), ()),
            Free(1),
            ModuleExit(1, BACKWARD),
        ],
        (FORWARD, RECOMPUTE),
    )


def test_events_works_and_storages_are_those_of_the_first_capture() -> None:
    """Rows of the block come from the capture that recomputes it, in the numbers of the observed one.

    What only the former has gets the next number (event 10, storage 1).
    """
    found = Mixer(CapturedSteps(observed())).mixed([CapturedSteps(recomputing())], {1: 0})
    assert found.events == (
        ModuleEnter(1, FORWARD),
        Alloc(0),
        OP[FORWARD],
        EventRecord(5, 0),
        EventWait(5, 1),
        gather(4),
        EventRecord(4, 0),
        Free(0),
        ModuleExit(1, FORWARD),
        EventRecord(6, 1),
        EventWait(6, 0),
        WorkWait(4, 0),
        ModuleEnter(1, BACKWARD),
        ModuleEnter(1, RECOMPUTE),
        Alloc(1),
        OP[RECOMPUTE]._replace(outputs=(1,)),
        EventRecord(10, 0),
        ModuleExit(1, RECOMPUTE),
        Op(0, 0, 1, BACKWARD, 0, (1,), ()),
        Free(1),
        ModuleExit(1, BACKWARD),
    )
    assert [type(event) for event in found.events] == [type(event) for event in recomputing().events]
    assert [storage.phase for storage in found.storages] == [FORWARD, RECOMPUTE]


def test_a_mixture_of_nothing_is_the_observed_capture() -> None:
    """Without units, no row comes from a template."""
    found = Mixer(CapturedSteps(observed())).mixed([CapturedSteps(recomputing())], {})
    assert found.events == observed().events and found.storages == observed().storages


def test_the_recomputation_of_the_first_block_is_a_region() -> None:
    """Rows 13 to 17 of both; its product has rows 14 and 15."""
    call = Call("aten.mm.default", 0, (), 14, 16, False, False, False, (1,), (), (), (1,))
    region = Region(1, 13, 18, (call,), (), (1,))
    template = replace(recomputing(), regions=(region,))
    assert Mixer(CapturedSteps(observed())).mixed([CapturedSteps(template)], {1: 0}).regions == (region,)
