"""Whether two ranks of a script do the same: steps that are written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from autosac.scripts.alike import has_shorter_parts, operators, planned_ranks, stands_for, train_alike
from autosac.trace import (
    Collective,
    Event,
    EventRecord,
    EventWait,
    Group,
    HostWait,
    Label,
    Op,
    Phase,
    Signature,
    TensorMeta,
    Trace,
)
from traces import TraceBuilder

WORLD = Group("world", 0, ((8, 1),))


def rank(
    *,
    group: Group = WORLD,
    peer: int = -1,
    kind: str = "all_reduce",
    offset: int = 0,
    dim: int = 0,
    number: int = 0,
    operator: str = "aten.sub.Tensor",
    extra: bool = False,
) -> Trace:
    """A product, a part of a buffer, and a transfer."""
    builder = TraceBuilder()
    held = builder.alloc(64)
    if extra:
        builder.op("aten.relu.default", (held,), (held,))
    builder.op("aten.mm.default", (held,), (held,))
    places = (("dim", dim), ("start", offset), ("end", offset + 2))
    builder.op(Signature("aten.slice.Tensor", (), (), places), (held,), (held,))
    builder.op(Signature("aten.select.int", (), (), (("dim", dim), ("index", offset))), (held,), (held,))
    builder.op(Signature(operator, (), (), (("other", number), ("alpha", 1))), (held,), (held,))
    builder.op("c10d.allreduce_.default")
    last = builder.events.pop()
    assert isinstance(last, Op)
    builder.add(
        Collective(kind, 64, 0, 0, False, -1, peer, -1, last.signature, 0, Phase.BACKWARD, -1, (held,), (held,))
    )
    return replace(builder.build(), groups=(group,))


def test_a_rank_is_like_itself() -> None:
    """Which rank a message goes to, which part of a buffer is its own, and what is subtracted, does not count."""
    assert stands_for(rank(), rank())
    assert stands_for(rank(kind="send", peer=3), rank(kind="send", peer=5))
    assert stands_for(rank(offset=0), rank(offset=6))
    assert stands_for(rank(number=0), rank(number=8000))  # where the part of a vocabulary begins


def test_groups_count_by_their_distances() -> None:
    """Listed ranks by how far each is from the first, structured ones by sizes and strides."""
    listed = [Group("g", 0, (), ranks) for ranks in ((0, 3, 5), (1, 4, 6), (1, 4, 7))]
    assert stands_for(rank(group=listed[0]), rank(group=listed[1]))
    assert not stands_for(rank(group=listed[0]), rank(group=listed[2]))
    rows = [Group("g", offset, ((4, stride),)) for offset, stride in ((0, 1), (4, 1), (0, 2))]
    assert stands_for(rank(group=rows[0]), rank(group=rows[1]))
    assert not stands_for(rank(group=rows[0]), rank(group=rows[2]))


@pytest.mark.parametrize(
    "changes", [{"kind": "all_gather"}, {"extra": True}, {"dim": 1}, {"operator": "aten.add.Tensor"}]
)
def test_what_is_done_counts(changes: dict[str, object]) -> None:
    """Another transfer, an operator more, other arguments, and those of the script's own operators."""
    assert not stands_for(rank(operator="mine.shift.default", number=1), rank(operator="mine.shift.default"))
    assert not stands_for(rank(), rank(**changes))  # type: ignore[arg-type]


def test_operators_are_counted_whatever_their_numbers_are() -> None:
    """Adam's factors and rates change in each step; other sizes, flags and operators are other kinds."""
    size = (TensorMeta((4,), (1,), "float32", "device"),)
    adam = [Signature("aten._foreach_div_.ScalarList", size, (), (("scalars", (n, n)),)) for n in (0.5, 0.25)]
    fused = [Signature("aten._fused_adamw_.default", size, (), (("lr", n), ("amsgrad", False))) for n in (0.5, 0.25)]
    others = [fused[0]._replace(arguments=(("lr", 0.5), ("amsgrad", True))), fused[0]._replace(inputs=())]
    signatures = [*adam, *fused, *others]
    events = [Op(number, 0, -1, Phase.OPTIMIZER, -1, (), ()) for number in (0, 1, 1, 2, 3, 4, 5)]
    kinds: dict[Signature, int] = {}
    assert operators(events, signatures, kinds) == Counter({0: 3, 1: 2, 2: 1, 3: 1})
    assert operators(events[4:], signatures, kinds) == Counter({1: 1, 2: 1, 3: 1})


def test_signatures_count_by_their_content() -> None:
    """Not by their numbers, which differ if one of the ranks has called something else in between."""
    one = rank()
    other = replace(
        one,
        signatures=one.signatures[::-1],
        events=tuple(
            event._replace(signature=len(one.signatures) - 1 - event.signature)
            if isinstance(event, Op | Collective)
            else event
            for event in one.events
        ),
    )
    assert stands_for(one, other) and one.events != other.events


def test_the_order_of_changes_in_place_does_not_count() -> None:
    """Two gradients that are zeroed one after the other; each before or after a product does."""
    zeroes = [
        Signature("aten.zero_.default", (TensorMeta(shape, (1,), "float32", "device"),), (), mutates=(0,))
        for shape in ((4,), (8,))
    ]

    def zeroing(*order: int) -> Trace:
        builder = TraceBuilder()
        held = builder.alloc(64)
        builder.signatures += zeroes
        for number in order:
            builder.op("aten.mm.default" if number < 0 else zeroes[number], (held,), () if number < 0 else (held,))
        return builder.build()

    assert stands_for(zeroing(0, 1), zeroing(1, 0)) and not stands_for(zeroing(0, 1), zeroing(0, 0))
    assert not stands_for(zeroing(0, -1, 1), zeroing(1, -1, 0))


ITEM = HostWait(0, -1, "item")


def waiting(*events: Event, first: int = 0) -> Trace:
    """`rank`, and then these events; `first`: behind how many events of the rank."""
    trace = rank()
    return replace(trace, events=(*trace.events[:first], *events, *trace.events[first:]))


def test_a_rank_whose_host_waits_stands_for_one_that_does_not() -> None:
    """The other way round it would promise too short a step; with waits in different places neither stands for the other."""
    logs, silent, early = waiting(ITEM, first=3), rank(), waiting(ITEM, first=1)
    assert stands_for(logs, silent) and not stands_for(silent, logs)
    assert not stands_for(logs, early) and not stands_for(early, logs)
    assert stands_for(waiting(ITEM, ITEM, first=1), early) and not stands_for(early, waiting(ITEM, ITEM, first=1))
    assert not stands_for(early, waiting(HostWait(-1, -1, "device"), first=1))


def test_events_count_for_the_streams_that_wait() -> None:
    """One that is recorded for the host alone is the host's business, and shifts the numbers of others; what a host waits for
    is told by where it was recorded.
    """
    streams = waiting(EventRecord(0, 0), EventWait(0, 1))
    timed = waiting(EventRecord(0, 0), EventRecord(1, 0), EventWait(1, 1))
    assert stands_for(timed, streams) and not stands_for(streams, timed)
    assert not stands_for(waiting(EventRecord(0, 0), EventWait(0, 2)), streams)
    assert not stands_for(waiting(EventRecord(0, 0), EventRecord(1, 2), EventWait(1, 1), EventWait(0, 2)), streams)
    old, new = (
        waiting(EventRecord(0, 0), *rank().events, EventRecord(1, 0), HostWait(-1, event, "event")) for event in (0, 1)
    )
    assert not stands_for(old, new)


def test_ranks_that_share_a_plan() -> None:
    """One that stands for others is planned for; sends, modules of other names and other work keep a plan of their own."""
    assert planned_ranks([rank(), rank(), rank()]) == (0,)
    assert planned_ranks([rank(), waiting(ITEM), rank()]) == (1,)
    assert planned_ranks([waiting(ITEM, first=3), waiting(ITEM, first=1)]) == (0, 1)
    assert planned_ranks([rank(), rank(extra=True), waiting(ITEM)]) == (1, 2)
    assert planned_ranks([rank(kind="send", peer=3), rank(kind="send", peer=5)]) == (0, 1)
    assert planned_ranks([rank(), replace(rank(), modules=tuple(f"stage.{n}" for n in rank().modules))]) == (0, 1)


def trained(
    *, loss: str = "", before: bool = False, gradient_bytes: int = 64, name: str = "aten.mul.Tensor", width: int = 4
) -> Trace:
    """A gradient from a parameter, an all-reduce, an update.

    `loss`: it is "read", which nothing depends on, or "sent". `before`: something was evaluated before the step.
    """
    builder = TraceBuilder()
    builder.in_prologue = True
    if before:
        builder.free(builder.alloc(4096))
    parameter = builder.alloc(64, Label.PARAMETER)
    builder.in_prologue = False
    transfers = []
    if loss:
        value = builder.alloc(4)
        builder.op(Signature("aten.t.default", (), (), is_view=True), (parameter,), (parameter,))
        builder.op("aten.sum.default", (parameter,), (value,))
        transfers += [value] if loss == "sent" else []
        builder.free(value)
    gradient = builder.alloc(gradient_bytes)
    builder.op(name, (parameter,), (gradient,))
    for sent in (*transfers, gradient):
        builder.op("c10d.allreduce_.default")
        last = builder.events.pop()
        assert isinstance(last, Op)
        phase = Phase.BACKWARD
        builder.add(
            Collective("all_reduce", 64, 0, 0, False, -1, -1, -1, last.signature, 0, phase, -1, (sent,), (sent,))
        )
    builder.op(Signature("aten.sub_.Tensor", (), (), mutates=(0,)), (parameter, gradient))
    return replace(builder.build(parameter_shapes={"weight": (width, width)}), groups=(WORLD,))


@pytest.mark.parametrize("changes", [{}, {"loss": "read"}, {"before": True}, {"loss": "read", "before": True}])
def test_what_only_one_rank_reads_or_did_before_does_not_count(changes: dict[str, Any]) -> None:
    """Rank 0 prints its loss or evaluates: it trains like the others, which does not make it alike."""
    assert train_alike(trained(**changes), trained()) and train_alike(trained(), trained(**changes))
    assert stands_for(trained(**changes), trained()) is (changes == {})


@pytest.mark.parametrize(
    "changes", [{"loss": "sent"}, {"gradient_bytes": 128}, {"name": "aten.neg.default"}, {"width": 2}]
)
def test_what_is_trained_or_sent_counts(changes: dict[str, Any]) -> None:
    """A loss that others receive, a gradient of another size or from another operator, other parameters."""
    assert not train_alike(trained(**changes), trained())
    assert not train_alike(trained(), trained(**changes))


def test_a_step_without_training_is_like_no_other() -> None:
    """Nothing is compared where nothing is known to be trained."""
    empty = TraceBuilder().build()
    assert not train_alike(empty, empty)


def part(*rows: int, phase: Phase = Phase.OPTIMIZER, operator: str = "aten._foreach_norm.Scalar") -> Trace:
    """A step that reads tensors of so many rows."""
    builder = TraceBuilder()
    builder.phase = phase
    metas = tuple(TensorMeta((count, 64), (64, 1), "float32", "device") for count in rows)
    builder.op(Signature(operator, metas, ()))
    return builder.build()


def test_the_last_part_of_a_parameter_may_be_shorter() -> None:
    """Not longer, not empty, not of another number of parameters, with the same operators, and not what is computed with."""
    full = part(96, 64)
    assert has_shorter_parts(full, part(90, 64)) and has_shorter_parts(full, part(90, 60))
    others = [full, part(0, 64), part(90, 70), part(90), part(90, 64, operator="aten.add.Tensor")]
    assert not any(has_shorter_parts(full, other) for other in others)
    assert not has_shorter_parts(part(96, phase=Phase.FORWARD), part(90, phase=Phase.FORWARD))
