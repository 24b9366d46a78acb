"""The host: what the CPU pays to issue each event of a trace.

One host thread per rank walks the trace in order (Maya's dispatch queue). Each event costs it time::

    Op          view_op_us if it launches nothing, else by who issues it:
                compiled_op_us (generated kernels), backward_op_us (autograd's engine), optimizer_op_us (the
                optimizer's loops), eager_op_us (the model's Python)
                + list_tensor_us for each tensor beyond a plain operator's (foreach optimizers, cat, split)
                + recompute_op_us if it is recomputed: the Python calls of checkpointing's saved-tensor
                  hooks, in the forward and in the recomputation
                + wrapper_us for each tensor subclass that took the call apart (DTensor's dispatch: its sharding
                decision, the local operator, the result's wrapping), views included, and wrapped_tensor_us for each tensor
                beyond a plain operator's
                + gather_us for FSDP2's copy into the buffer of a gathering and gathered_parameter_us for each of its
                parameters (the hooks that gather a group of parameters and release it), reduction_us and
                reduced_parameter_us for the copy into the buffer of a reduction
                + host_gb_us for each GB of its tensors if the host itself works on them (CPU offload: the norm of the
                gradients, the optimizer's step)
    Collective  collective_us, functional_collective_us if it is one of those that return new tensors (tensor
                parallelism's, experts'); + wrapper_us as above
    EventRecord, EventWait, StreamWait, WorkWait, RecordStream   stream_op_us
    HostWait    sync_us, paid after what it waits for has completed
    ModuleEnter, ModuleExit   module_us (nn.Module.__call__ and its hooks; nothing in the backward);
                + checkpoint_us where recomputation begins
    GraphLaunch eager_op_us, and nothing for the events of the graph (CUDA launches a graph in constant time since 12.4:
                NVIDIA's developer blog, "Constant time launch for straight-line CUDA graphs")
    Alloc, Free nothing: the caching allocator is part of the operator's cost

Selective checkpointing runs every operator of its module, views included, through a Python dispatch mode,
once in the forward and once in the recomputation: selective_op_us each. An operator that is saved is kept,
looked up and returned by that mode: saved_op_us on top, which makes saving everything slower for the host
than recomputing everything. The units of a plan run through a mode in the forward only, which writes down what each operator
does (`PLANNED_MODES` times selective_op_us); their recomputation calls operators and nothing else.

A kernel reaches the device `launch_latency_us` after its launch, and the driver holds at most `queue_depth`
unfinished launches per stream: the host blocks on the next one. Index into the code: `host_costs`,
`_selective`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from autosac.errors import SimulationError
from autosac.trace import (
    Collective,
    EventRecord,
    EventWait,
    GraphLaunch,
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
_FUNCTIONAL_PREFIX = "_c10d_functional."
_GATHERING, _REDUCTION = "fsdp.all_gather_copy_in.default", "fsdp.chunk_cat.default"
_BITS = re.compile(r"\d+")
_STREAM_OPS = (EventRecord, EventWait, StreamWait, WorkWait, RecordStream)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """Host time per event, in microseconds. See the module's docstring for what each of them is charged for.

    The costs of Python (views, modules, hooks, dispatch modes, autograd) were measured with PyTorch 2.13 and
    Python 3.11 as thread time on CPU tensors; launches, streams and collectives are typical of CUDA. All are
    stated for a host that issues an eager CUDA operator in 6 us; `scaled` adapts them to one that is faster
    or slower. `wrapper_us` and `functional_collective_us` are those of whole layers under tensor parallelism: nine times as
    much Python as the same layers have without it (`python -m benchmarks.dtensor_host`); a single operator in a loop
    costs half as much. FSDP2's hooks are those of whole models, less 65 us for the events of a gathering
    (`python -m benchmarks.fsdp_host`). `host_gb_us` is that of one core, since torchrun gives each process one thread: fused
    AdamW, norms and clipping go through 19.5 to 22.5 GB of their tensors in a second (`python -m benchmarks.host_work`).
    """

    eager_op_us: float = 6.0
    backward_op_us: float = 5.0
    optimizer_op_us: float = 6.0
    view_op_us: float = 1.4
    compiled_op_us: float = 3.0
    list_tensor_us: float = 0.25
    recompute_op_us: float = 13.0
    checkpoint_us: float = 85.0
    selective_op_us: float = 9.5
    saved_op_us: float = 36.0
    wrapper_us: float = 25.0
    wrapped_tensor_us: float = 3.0
    collective_us: float = 30.0
    functional_collective_us: float = 200.0
    gather_us: float = 270.0
    gathered_parameter_us: float = 18.0
    reduction_us: float = 30.0
    reduced_parameter_us: float = 8.0
    stream_op_us: float = 1.2
    module_us: float = 0.5
    sync_us: float = 6.0
    host_gb_us: float = 50_000.0
    launch_latency_us: float = 2.5
    queue_depth: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or value == float("inf"):
                raise SimulationError(f"host model: {field.name} is {value}; it must be a finite number, 0 or more")
        if self.queue_depth < 1:
            raise SimulationError(f"host model: queue_depth is {self.queue_depth}; it must be at least 1")

    def scaled(self, eager_op_us: float) -> HostModel:
        """The same host, faster or slower, so that an eager operator costs `eager_op_us` (the launch latency
        stays).
        """
        if not self.eager_op_us > 0:
            raise SimulationError("host model: only a host whose eager operators cost time can be scaled")
        ratio = eager_op_us / self.eager_op_us
        kept = ("host_gb_us", "launch_latency_us", "queue_depth")
        return replace(self, **{f.name: getattr(self, f.name) * ratio for f in fields(self) if f.name not in kept})


INSTANT_HOST = HostModel(
    eager_op_us=0,
    backward_op_us=0,
    optimizer_op_us=0,
    view_op_us=0,
    compiled_op_us=0,
    list_tensor_us=0,
    recompute_op_us=0,
    checkpoint_us=0,
    selective_op_us=0,
    saved_op_us=0,
    wrapper_us=0,
    wrapped_tensor_us=0,
    collective_us=0,
    functional_collective_us=0,
    gather_us=0,
    gathered_parameter_us=0,
    reduction_us=0,
    reduced_parameter_us=0,
    stream_op_us=0,
    module_us=0,
    sync_us=0,
    host_gb_us=0,
    launch_latency_us=0,
    queue_depth=1 << 60,
)
"""A host that costs nothing: the step is bound by the device alone."""


PLANNED_MODES = 1.3
"""What the forward of a plan's unit pays for each operator, in selective_op_us (`python -m benchmarks.recording`)."""


def host_costs(trace: Trace, host: HostModel, selective_modules: Collection[str] = ()) -> NDArray[np.float64]:
    """Host milliseconds of every event (a HostWait's are those after its wait).

    `selective_modules` run under selective checkpointing. SimulationError for a name that the trace does not
    have.
    """
    by_phase = {phase: [_operator_us(signature, host, phase) for signature in trace.signatures] for phase in Phase}
    by_type: dict[type, float] = dict.fromkeys(_STREAM_OPS, host.stream_op_us)
    by_type |= {HostWait: host.sync_us}
    communication = [_collective_us(signature, host) for signature in trace.signatures]
    costs_us = np.zeros(len(trace.events))
    recomputing = False
    graph_ends = 0
    for i, event in enumerate(trace.events):
        kind = type(event)
        if kind is GraphLaunch:
            graph_ends = i + 1 + event.events  # type: ignore[union-attr]
            costs_us[i] = host.eager_op_us
        elif i < graph_ends:
            continue
        elif kind is Op:
            phase = event.phase  # type: ignore[union-attr]
            costs_us[i] = by_phase[phase][event.signature]  # type: ignore[union-attr]
            recomputing = phase == Phase.RECOMPUTE
        elif kind is Collective:
            costs_us[i] = communication[event.signature]  # type: ignore[union-attr]
        elif kind is ModuleEnter or kind is ModuleExit:
            phase = event.phase  # type: ignore[union-attr]
            costs_us[i] = 0.0 if phase == Phase.BACKWARD else host.module_us
            if phase == Phase.RECOMPUTE and not recomputing:
                costs_us[i] += host.checkpoint_us
            recomputing = phase == Phase.RECOMPUTE
        elif kind in by_type:
            costs_us[i] = by_type[kind]
    if selective_modules:
        costs_us += _selective(trace, host, selective_modules)
    return costs_us / 1e3


def _operator_us(signature: Signature, host: HostModel, phase: Phase) -> float:
    """Host time of one call of an operator."""
    dispatch_us = host.wrapper_us * signature.wrappers
    if signature.is_view:
        return host.view_op_us + dispatch_us
    if signature.name.startswith(_COMPILED_PREFIXES):
        return host.compiled_op_us
    extra = len(signature.inputs) + len(signature.outputs) - _PLAIN_TENSORS
    by_phase = {Phase.BACKWARD: host.backward_op_us, Phase.OPTIMIZER: host.optimizer_op_us}
    return (
        by_phase.get(phase, host.eager_op_us)
        + listed_us(signature, host) * max(0, extra)
        + (host.recompute_op_us if phase == Phase.RECOMPUTE else 0.0)
        + host.host_gb_us * _on_host_bytes(signature) / 1e9
        + _sharding_us(signature, host)
        + dispatch_us
    )


def _sharding_us(signature: Signature, host: HostModel) -> float:
    """What FSDP2's hooks cost beside their events: with the copy into the buffer of a gathering or a reduction."""
    if signature.name == _GATHERING:
        return host.gather_us + host.gathered_parameter_us * len(signature.inputs)
    if signature.name == _REDUCTION:
        return host.reduction_us + host.reduced_parameter_us * len(signature.inputs)
    return 0.0


def listed_us(signature: Signature, host: HostModel) -> float:
    """Host time of each tensor of a list operator beyond a plain operator's."""
    return host.list_tensor_us + (host.wrapped_tensor_us if signature.wrappers else 0.0)


def _collective_us(signature: Signature, host: HostModel) -> float:
    """Host time of issuing a collective or transfer."""
    functional = signature.name.startswith(_FUNCTIONAL_PREFIX)
    issue_us = host.functional_collective_us if functional else host.collective_us
    return issue_us + host.wrapper_us * signature.wrappers


def _on_host_bytes(signature: Signature) -> float:
    """What an operator goes through of the host's memory: its tensors if all of them are there, else nothing."""
    metas = signature.inputs if signature.mutates else (*signature.inputs, *signature.outputs)
    if any(meta.place != "cpu" for meta in metas):
        return 0.0
    return sum(math.prod(meta.shape) * _item_bytes(meta.dtype) for meta in metas)


def _item_bytes(dtype: str) -> float:
    """A type's name says its bits; a bool has eight."""
    bits = _BITS.search(dtype)
    return int(bits[0]) / 8 if bits else 1.0


def _selective(trace: Trace, host: HostModel, modules: Collection[str]) -> NDArray[np.float64]:
    """Microseconds that selective checkpointing of `modules` adds to each event.

    Saved operators have no event in the recomputation: what they cost there is spread over the unit's
    recomputed operators, or over its forward if there are none.
    """
    index = {name: i for i, name in enumerate(trace.modules)}
    missing = [name for name in modules if name not in index]
    if missing:
        raise SimulationError(f"the trace has no module named {missing[0]!r}")
    units = {index[name] for name in modules}
    unit_of = [_ancestor(trace, i, units) for i in range(len(trace.modules))]
    forward: dict[int, list[int]] = {unit: [] for unit in units}
    again: dict[int, list[int]] = {unit: [] for unit in units}
    for i, event in enumerate(trace.events):
        if type(event) is Op and event.module >= 0 and (unit := unit_of[event.module]) >= 0:
            if event.phase == Phase.FORWARD:
                forward[unit].append(i)
            elif event.phase == Phase.RECOMPUTE:
                again[unit].append(i)
    extra_us = np.zeros(len(trace.events))
    planned = trace.info.checkpointing == "plan"
    for unit in units:
        if planned:
            extra_us[forward[unit]] += PLANNED_MODES * host.selective_op_us
            continue
        extra_us[forward[unit] + again[unit]] += host.selective_op_us
        saved = max(0, len(forward[unit]) - len(again[unit]))
        places = again[unit] or forward[unit]
        if places:
            extra_us[places] += saved * host.saved_op_us / len(places)
    return extra_us


def _ancestor(trace: Trace, module: int, units: Collection[int]) -> int:
    """The unit that `module` is or lies below, or -1."""
    while module >= 0 and module not in units:
        module = trace.module_parents[module]
    return module
