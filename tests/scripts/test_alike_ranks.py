"""Whether two ranks of a script do the same: steps that are written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autosac.scripts.alike import alike, train_alike
from autosac.trace import Collective, Group, Label, Op, Phase, Signature, Trace
from traces import TraceBuilder

WORLD = Group("world", 0, ((8, 1),))


def rank(
    *,
    group: Group = WORLD,
    peer: int = -1,
    kind: str = "all_reduce",
    offset: int = 0,
    dim: int = 0,
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
    builder.op("c10d.allreduce_.default")
    last = builder.events.pop()
    assert isinstance(last, Op)
    builder.add(
        Collective(kind, 64, 0, 0, False, -1, peer, -1, last.signature, 0, Phase.BACKWARD, -1, (held,), (held,))
    )
    return replace(builder.build(), groups=(group,))


def test_a_rank_is_like_itself() -> None:
    """Which rank a message goes to, and which part of a buffer is its own, does not count."""
    assert alike(rank(), rank())
    assert alike(rank(kind="send", peer=3), rank(kind="send", peer=5))
    assert alike(rank(offset=0), rank(offset=6))


def test_groups_count_by_their_distances() -> None:
    """Listed ranks by how far each is from the first, structured ones by sizes and strides."""
    listed = [Group("g", 0, (), ranks) for ranks in ((0, 3, 5), (1, 4, 6), (1, 4, 7))]
    assert alike(rank(group=listed[0]), rank(group=listed[1]))
    assert not alike(rank(group=listed[0]), rank(group=listed[2]))
    rows = [Group("g", offset, ((4, stride),)) for offset, stride in ((0, 1), (4, 1), (0, 2))]
    assert alike(rank(group=rows[0]), rank(group=rows[1]))
    assert not alike(rank(group=rows[0]), rank(group=rows[2]))


@pytest.mark.parametrize("changes", [{"kind": "all_gather"}, {"extra": True}, {"dim": 1}])
def test_what_is_done_counts(changes: dict[str, object]) -> None:
    """Another transfer, an operator more, other arguments."""
    assert not alike(rank(), rank(**changes))  # type: ignore[arg-type]


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
    assert alike(one, other) and one.events != other.events


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
    assert alike(trained(**changes), trained()) is (changes == {})


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
