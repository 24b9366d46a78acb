"""Steps of a made-up model with any number of layers, as traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from autosac.trace import Alloc, Call, Event, Free, Label, Op, Phase, Region, Signature, Storage, TensorMeta, Trace
from traces import trace_of

STEP = Callable[..., Trace]


def _step(layers: int, *, kinds: int = 1, ops: int = 2, prefetch: int = 0, leading: int = 0, passes: int = 0) -> Trace:
    """Forward, backward in reverse, and an optimizer over all weights at once.

    Layer i is of kind i % `kinds`, or one of its own if i < `leading`, and has a weight and `ops` operators; the layer's
    weight is copied `prefetch` layers before it is used and the copy is freed in the backward. Before the step, `passes`
    microbatches go through the layers, forward and then backward, with nothing else in between.
    """
    meta = TensorMeta((4, 4), (4, 1), "float32")
    kind = [i if i < leading else leading + (i - leading) % kinds for i in range(layers)]
    signatures = _signatures(meta, kind)
    position = {name: i for i, name in enumerate(signatures)}
    storages: list[Storage] = []
    events: list[Event] = []
    regions: list[Region] = []

    def new(nbytes: int, label: Label, phase: Phase, module: int, op: str) -> int:
        storages.append(Storage(nbytes, 0, label, phase, module, 0, op))
        events.append(Alloc(len(storages) - 1))
        return len(storages) - 1

    weights = [new(16 * (kind[i] + 1), Label.PARAMETER, Phase.SETUP, 0, "empty") for i in range(layers)]
    for phase, i in _early(layers, passes):
        events.append(Free(new(64, Label.NONE, phase, 1 + i, f"early{kind[i]}")))
    prologue, events = tuple(events), []
    copies: dict[int, int] = {}
    made: list[list[int]] = []
    last = new(64, Label.INPUT, Phase.OTHER, 0, "copy")
    for i in range(layers):
        for j in range(i, min(i + prefetch, layers - 1) + 1):
            if j not in copies:
                copies[j] = new(32, Label.COMMUNICATION, Phase.FORWARD, 1 + i, "gather")
        first, calls, name = len(events), [], f"aten.op{kind[i]}.default"
        made.append([])
        for n in range(ops):
            begin = len(events)
            out = new(64, Label.NONE, Phase.FORWARD, 1 + i, name)
            events.append(Op(position[name], 0, 1 + i, Phase.FORWARD, 0, (last, copies[i]), (out,)))
            calls.append(
                Call(name, n, (meta,), begin, len(events), False, False, False, (out,), (last, copies[i]), (), (out,))
            )
            made[-1].append(out)
            last = out
        regions.append(Region(1 + i, first, len(events), tuple(calls), (made[-1][0] - 1,), (last,)))
    gradients = []
    for i in reversed(range(layers)):
        gradients.append(new(16 * (kind[i] + 1), Label.GRADIENT, Phase.BACKWARD, 1 + i, "mm"))
        name = f"aten.op{kind[i]}.default"
        events.append(Op(position[name], 0, 1 + i, Phase.BACKWARD, 0, (made[i][0], copies[i]), (gradients[-1],)))
        events.extend(Free(storage) for storage in (*reversed(made[i]), copies[i]))
    norms = new(4 * layers + 4, Label.NONE, Phase.OPTIMIZER, 0, "stack")
    events.append(Op(position["step"], 0, 0, Phase.OPTIMIZER, 0, (*weights, norms), ()))
    events.extend(Free(storage) for storage in (*gradients[::-1], norms))
    return trace_of(
        events,
        prologue=prologue,
        signatures=signatures.values(),
        storages=storages,
        modules=["", *(f"layers.{i}" for i in range(layers)), "output"],
        classes=("Model", *(f"Block{k}" for k in kind), "Linear"),
        regions=regions,
        model="made up",
        flops_per_token=10.0 + 7 * layers,
        fsdp_units=tuple(sorted(f"layers.{i}" for i in range(layers))),
        parameter_shapes={f"layers.{i}.weight": (kind[i] + 1, 4) for i in range(layers)},
    )


def _signatures(meta: TensorMeta, kind: list[int]) -> dict[str, Signature]:
    """One operator for each kind of layer, and one of an optimizer over all layers."""
    many = tuple(TensorMeta((i % 7 + 1,), (1,), "float32") for i in kind)
    found = {
        f"aten.op{k}.default": Signature(f"aten.op{k}.default", (meta, meta), (meta,)) for k in dict.fromkeys(kind)
    }
    found["step"] = Signature("aten._foreach_add_.List", (*many, meta), (), mutates=tuple(range(len(kind))))
    return found


def _early(layers: int, passes: int) -> Iterator[tuple[Phase, int]]:
    """So many passes through the layers, all forwards first."""
    for phase, order in ((Phase.FORWARD, range(layers)), (Phase.BACKWARD, reversed(range(layers)))):
        yield from [(phase, i) for i in order] * passes


@pytest.fixture(scope="session")
def step() -> STEP:
    """A function that makes the step of a number of layers."""
    return _step
