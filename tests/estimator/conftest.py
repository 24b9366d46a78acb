"""Hand-made signatures and traces for the estimator's tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from autosac.trace import Collective, Event, Group, Op, Phase, Signature, TensorMeta, Trace
from traces import trace_of


def _meta(shape: Sequence[int], dtype: str = "bfloat16", place: str = "device") -> TensorMeta:
    """A contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorMeta(tuple(shape), tuple(reversed(strides)), dtype, place)


@pytest.fixture(scope="session")
def meta() -> Callable[..., TensorMeta]:
    """Makes the description of a contiguous tensor."""
    return _meta


@pytest.fixture(scope="session")
def mm() -> Callable[..., Signature]:
    """Makes the signature of an `aten.mm` of [m, k] and [k, n]."""

    def make(m: int, n: int, k: int, dtype: str = "bfloat16") -> Signature:
        return Signature("aten.mm.default", (_meta((m, k), dtype), _meta((k, n), dtype)), (_meta((m, n), dtype),))

    return make


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Trace]:
    """Makes a trace that issues these signatures in order, then these collectives on a group of `world`
    ranks.
    """

    def make(
        signatures: Sequence[Signature],
        collectives: Sequence[tuple[str, int]] = (),
        world: int = 1,
        **info: Any,
    ) -> Trace:
        events: list[Event] = [Op(i, 0, 0, Phase.FORWARD, 0, (), ()) for i in range(len(signatures))]
        events += [
            Collective(kind, size, 0, 0, False, -1, -1, -1, 0, 0, Phase.FORWARD, 0, (), ())
            for kind, size in collectives
        ]
        group = Group.of("world", range(world))
        return trace_of(events, signatures=signatures, groups=(group,), world_size=world, **info)

    return make


@pytest.fixture(scope="session")
def operators() -> list[Signature]:
    """300 operators of real steps: `operators.json`."""

    def meta(row: list[Any]) -> TensorMeta:
        shape, stride, dtype, place = row
        return TensorMeta(tuple(shape), tuple(stride), dtype, place)

    rows = json.loads(Path(__file__).with_name("operators.json").read_text())
    return [
        Signature(
            name,
            tuple(map(meta, inputs)),
            tuple(map(meta, outputs)),
            tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in arguments),
            is_view,
            is_random,
            tuple(mutates),
        )
        for name, inputs, outputs, arguments, is_view, is_random, mutates in rows
    ]
