"""The host: what the CPU pays to issue each event of a trace.

One host thread per rank walks the trace in order (Maya's dispatch queue). Each event costs it time::

    Op         view_op_us if it launches nothing, else by who issues it:
               compiled_op_us (generated kernels), backward_op_us (autograd's engine), eager_op_us (Python)
               + list_tensor_us for each tensor beyond a plain operator's (foreach optimizers, cat, split)
               + selective_checkpoint_op_us where a selective-checkpoint dispatch mode sees the operator
    Collective collective_us
    EventRecord, EventWait, StreamWait, WorkWait, RecordStream   stream_op_us
    HostWait   sync_us, paid after what it waits for has completed
    ModuleEnter, ModuleExit   module_us (nn.Module.__call__ and its hooks; nothing in the backward)
    Alloc, Free   nothing: the caching allocator is part of the operator's cost

A kernel reaches the device `launch_latency_us` after its launch, and the driver holds at most `queue_depth`
unfinished launches per stream: the host blocks on the next one. Index into the code: `host_costs`,
`selective_operators`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from autosac.errors import SimulationError
from autosac.trace import (
    Collective,
    EventRecord,
    EventWait,
    HostWait,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    RecordStream,
    Signature,
    StreamWait,
    Trace,
    WorkWait,
)

# A call with more tensors than this is one of a list operator (foreach, cat, split): see `list_tensor_us`.
_PLAIN_TENSORS = 6
_COMPILED_PREFIXES = ("triton.", "inductor.")
_STREAM_OPS = (EventRecord, EventWait, StreamWait, WorkWait, RecordStream)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """Host time per event, in microseconds. See the module's docstring for what each of them is charged for.

    The defaults are those of PyTorch 2.x, CPython 3.11 and a current server CPU (about 4 GHz turbo): an eager
    operator in the forward pays Python argument parsing, dispatch, autograd and the launch; in the backward
    there is no Python. `scaled` adapts all of them to a host that is measured or known to be slower.
    """

    eager_op_us: float = 7.0
    backward_op_us: float = 5.0
    view_op_us: float = 1.5
    compiled_op_us: float = 3.5
    list_tensor_us: float = 0.25
    selective_checkpoint_op_us: float = 22.0
    collective_us: float = 25.0
    stream_op_us: float = 1.2
    module_us: float = 1.5
    sync_us: float = 6.0
    launch_latency_us: float = 2.5
    queue_depth: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or value == float("inf"):
                raise SimulationError(
                    f"host model: {field.name} is {value}; it must be a finite number, 0 or more"
                )
        if self.queue_depth < 1:
            raise SimulationError(f"host model: queue_depth is {self.queue_depth}; it must be at least 1")

    def scaled(self, eager_op_us: float) -> HostModel:
        """The same host, faster or slower, so that an eager operator costs `eager_op_us` (the launch latency
        stays).
        """
        if not self.eager_op_us > 0:
            raise SimulationError("host model: only a host whose eager operators cost time can be scaled")
        ratio = eager_op_us / self.eager_op_us
        kept = ("launch_latency_us", "queue_depth")
        return replace(
            self, **{f.name: getattr(self, f.name) * ratio for f in fields(self) if f.name not in kept}
        )


INSTANT_HOST = HostModel(
    eager_op_us=0,
    backward_op_us=0,
    view_op_us=0,
    compiled_op_us=0,
    list_tensor_us=0,
    selective_checkpoint_op_us=0,
    collective_us=0,
    stream_op_us=0,
    module_us=0,
    sync_us=0,
    launch_latency_us=0,
    queue_depth=1 << 60,
)
"""A host that costs nothing: the step is bound by the device alone."""


def _signature_us(signature: Signature, base_us: float, host: HostModel) -> float:
    """Host time of one call of an operator that launches work."""
    if signature.name.startswith(_COMPILED_PREFIXES):
        return host.compiled_op_us
    extra = len(signature.inputs) + len(signature.outputs) - _PLAIN_TENSORS
    return base_us + host.list_tensor_us * max(0, extra)


def host_costs(
    trace: Trace, host: HostModel, selective: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Host milliseconds of every event (a HostWait's are those after its wait).

    `selective` marks the events that a selective-checkpoint dispatch mode sees (see `selective_operators`).
    """
    eager = [
        host.view_op_us if s.is_view else _signature_us(s, host.eager_op_us, host) for s in trace.signatures
    ]
    backward = [
        host.view_op_us if s.is_view else _signature_us(s, host.backward_op_us, host)
        for s in trace.signatures
    ]
    by_type: dict[type, float] = dict.fromkeys(_STREAM_OPS, host.stream_op_us)
    by_type |= {Collective: host.collective_us, HostWait: host.sync_us}
    costs_us = np.zeros(len(trace.events))
    for i, event in enumerate(trace.events):
        kind = type(event)
        if kind is Op:
            table = backward if event.phase == Phase.BACKWARD else eager  # type: ignore[union-attr]
            costs_us[i] = table[event.signature]  # type: ignore[union-attr]
        elif kind is ModuleEnter or kind is ModuleExit:
            costs_us[i] = 0.0 if event.phase == Phase.BACKWARD else host.module_us  # type: ignore[union-attr]
        elif kind in by_type:
            costs_us[i] = by_type[kind]
    if selective is not None:
        if selective.shape != costs_us.shape:
            raise SimulationError(
                f"the mask of selectively checkpointed operators has {selective.size} entries, "
                f"the trace {costs_us.size} events"
            )
        costs_us[selective] += host.selective_checkpoint_op_us
    return costs_us / 1e3


def selective_operators(trace: Trace, modules: Collection[str]) -> NDArray[np.bool_]:
    """Which operators run under a selective-checkpoint dispatch mode when `modules` are selectively
    checkpointed.

    These are the operators of the modules' forward regions, and their recomputed ones. Metadata-only calls
    count as well: the mode's Python code runs for every operator that reaches the dispatcher. Unknown names:
    SimulationError.
    """
    index = {name: i for i, name in enumerate(trace.modules)}
    missing = [name for name in modules if name not in index]
    if missing:
        raise SimulationError(f"the trace has no module named {missing[0]!r}")
    units = {index[name] for name in modules}
    inside = np.zeros(len(trace.modules), dtype=bool)
    for i in range(len(trace.modules)):
        j = i
        while j >= 0 and j not in units:
            j = trace.module_parents[j]
        inside[i] = j >= 0
    mask = np.zeros(len(trace.events), dtype=bool)
    for region in trace.regions:
        if region.module in units:
            mask[region.first : region.last] = True
    for i, event in enumerate(trace.events):
        if type(event) is not Op:
            mask[i] = False
        elif event.phase == Phase.RECOMPUTE and inside[event.module]:
            mask[i] = True
    return mask
