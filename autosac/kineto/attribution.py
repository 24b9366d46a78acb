"""Finds the operator behind every kernel.

A kernel names its launch by a correlation id; the launch lies on a host thread, inside of the operators that were running
there. Of these the outermost one counts that PyTorch's dispatcher would show to a capture: composites (`aten::linear`) only
call others, and what runs inside of `aten::addmm` is its own affair. All kernels of one call belong to it; its time is their
sum.

Kernels of an autograd node outside of such operators (custom functions) are told apart by the forward operator that made the
node: both carry its sequence number.

What cannot be attributed is counted by its reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autosac.kineto.reader import HostEvent, Kernel, Launch, Profile
from autosac.kineto.signatures import is_known, is_vocabulary

_NODE = "autograd::engine::evaluate_function: "
_COMPILED = ("triton_", "Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_COLLECTIVE_KERNELS = ("nccl", "rccl", "ncclkernel", "ncclDevKernel", "mscclKernel")

_FEWEST_GAPS = 20
# On AMD's GPUs a kernel's record begins when the one before ends. One that finds its stream idle lacks what the device needs
# to begin: the same kernels took 1.6 to 2.6 us less then (quartiles of 59 kinds in TraceLens's ResNet on an MI300X, 171dd747).
_BEGINS_US, _JOINED_US = 2.0, 0.05


class OperatorCall(NamedTuple):
    """One call of an operator: how it was called, what the device did for it, and what its host thread took.

    `phase`: "forward", "backward" or "optimizer"; `node`: the autograd node that it ran in, "" if none; `begins_us`: what
    the records of its kernels lack of the device time that they take in a full queue.
    """

    op: HostEvent
    phase: str
    node: str
    kernels: tuple[Kernel, ...]
    begins_us: float = 0.0

    @property
    def us(self) -> float:
        """Device time: the sum of its kernels."""
        return sum(kernel.us for kernel in self.kernels)

    @property
    def host_us(self) -> float:
        """From the operator's begin to its end on its host thread; with the profiler's own cost."""
        return self.op.end_us - self.op.begin_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The operators of a trace with their kernels, its collectives (kernel, host event that describes it), and what is left.

    `unknown`: device microseconds by the name of an operator that is not in PyTorch's dispatcher here, or of the node;
    `lost`: (kernels, device microseconds) by the reason why they have no operator. `launch_us`: from launch to start of the
    kernels that found the device idle; `host_gap_us`: how long the device waited in all for kernels that were launched late.
    `queue_gap_us`: what lies between two kernels of a stream although the second had been launched long before; NaN where
    the device's queue was hardly ever full.
    """

    measured: tuple[OperatorCall, ...]
    collectives: tuple[tuple[Kernel, HostEvent | None], ...]
    unknown: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    launch_us: tuple[float, ...] = ()
    host_gap_us: float = 0.0
    queue_gap_us: float = math.nan


class _Frame(NamedTuple):
    event: HostEvent
    leaf: int
    node: str
    phase: str


def attribute(profile: Profile) -> Attribution:
    """Attribute every kernel of one rank."""
    stacks = _stacks_of_launches(profile)
    by_external = {_external(op): op for op in profile.operators}
    created = _creators(profile.operators)
    owners: dict[int, tuple[HostEvent, _Frame]] = {}
    kernels: dict[int, list[Kernel]] = {}
    collectives: list[tuple[Kernel, HostEvent | None]] = []
    unknown: dict[str, float] = {}
    lost: dict[str, tuple[int, float]] = {}
    for kernel in profile.kernels:
        stack = stacks.get(kernel.correlation, ())
        if is_collective(kernel):
            collectives.append((kernel, _description(stack)))
            continue
        leaf = _leaf(stack)
        if leaf is None and not stack and kernel.external in by_external:
            op = by_external[kernel.external]
            leaf = _Frame(op, id(op), "", "forward") if is_vocabulary(op) else None
        if leaf is not None:
            owners[id(leaf.event)] = (leaf.event, leaf)
            kernels.setdefault(id(leaf.event), []).append(kernel)
            continue
        reason = _reason(kernel, stack, profile)
        if reason:
            count, us = lost.get(reason, (0, 0.0))
            lost[reason] = (count + 1, us + kernel.us)
        else:
            name = _unknown_name(stack, created)
            unknown[name] = unknown.get(name, 0.0) + kernel.us
    idle = _found_idle(profile)
    measured = [
        OperatorCall(
            op,
            frame.phase,
            frame.node,
            tuple(kernels[key]),
            _BEGINS_US * len(idle.intersection(k.correlation for k in kernels[key])),
        )
        for key, (op, frame) in owners.items()
    ]
    launch_us, gap_us = _launch_gaps(profile)
    return Attribution(
        measured=tuple(measured),
        collectives=tuple(collectives),
        unknown=dict(sorted(unknown.items(), key=lambda item: -item[1])),
        lost=lost,
        launch_us=launch_us,
        host_gap_us=gap_us,
        queue_gap_us=_queue_gap_us(profile),
    )


def _leaf(stack: tuple[_Frame, ...]) -> _Frame | None:
    """The operator of a launch: see the module's docstring. A composite that launches itself is one on this GPU."""
    outermost = next((frame for frame in stack if frame.leaf == id(frame.event)), None)
    if outermost is None and stack and is_known(stack[-1].event.name):
        return stack[-1]
    return outermost


def is_collective(kernel: Kernel) -> bool:
    """Whether this is a transfer between ranks."""
    return "Collective name" in kernel.args or kernel.name.startswith(_COLLECTIVE_KERNELS)


def _external(op: HostEvent) -> int:
    value = op.args.get("External id", -1)
    return value if isinstance(value, int) else -1


# ---- stacks ----------------------------------------------------------------------------------------------------


def _stacks_of_launches(profile: Profile) -> dict[int, tuple[_Frame, ...]]:
    """The host events around every launch, outermost first, by correlation id."""
    events: dict[int, list[HostEvent]] = {}
    for event in (*profile.operators, *profile.annotations):
        events.setdefault(event.thread, []).append(event)
    launches: dict[int, list[tuple[float, int]]] = {}
    for correlation, launch in profile.launches.items():
        launches.setdefault(launch.thread, []).append((launch.begin_us, correlation))
    found: dict[int, tuple[_Frame, ...]] = {}
    for thread, mine in launches.items():
        nested = sorted(events.get(thread, ()), key=lambda event: (event.begin_us, -event.end_us))
        found.update(_nest(nested, sorted(mine)))
    return found


def _nest(events: list[HostEvent], launches: list[tuple[float, int]]) -> Iterator[tuple[int, tuple[_Frame, ...]]]:
    """Walk one thread in time with the stack of what is running."""
    stack: list[_Frame] = []
    position = 0
    for when, correlation in launches:
        while position < len(events) and events[position].begin_us <= when:
            event = events[position]
            position += 1
            while stack and stack[-1].event.end_us <= event.begin_us:
                stack.pop()
            stack.append(_frame(event, stack[-1] if stack else None))
        while stack and stack[-1].event.end_us < when:
            stack.pop()
        yield correlation, tuple(stack)


def _frame(event: HostEvent, outer: _Frame | None) -> _Frame:
    leaf, node, phase = (outer.leaf, outer.node, outer.phase) if outer else (0, "", "forward")
    if event.name.startswith(_NODE):
        node, phase = event.name.removeprefix(_NODE), "backward"
    elif event.name.startswith("Optimizer.step"):
        phase = "optimizer"
    if not leaf and is_vocabulary(event):
        leaf = id(event)
    return _Frame(event, leaf, node, phase)


def _description(stack: tuple[_Frame, ...]) -> HostEvent | None:
    """What says most of a collective: the process group's own record, else the annotation of its call."""
    named = [frame.event for frame in stack if "Collective name" in frame.event.args]
    return next(
        iter(named or [frame.event for frame in stack if frame.event.name.startswith(("nccl:", "rccl:"))]), None
    )


# ---- what has no operator --------------------------------------------------------------------------------------


def _reason(kernel: Kernel, stack: tuple[_Frame, ...], profile: Profile) -> str:
    """Why a kernel has no operator; "" if it has one that PyTorch does not know."""
    launch: Launch | None = profile.launches.get(kernel.correlation)
    if launch is None:
        return "launched before the trace began, or without a launch event"
    if "GraphLaunch" in launch.name:
        return "replayed from a CUDA graph"
    names = [frame.event.name for frame in stack]
    if any(name.startswith(_COMPILED) for name in names):
        return "fused by torch.compile"
    if not any(isinstance(frame.event.args.get("External id"), int) for frame in stack):
        return "launched outside of any operator"
    return ""


def _creators(operators: tuple[HostEvent, ...]) -> dict[int, HostEvent]:
    """The custom operator that made the autograd node of a sequence number: the last of the forward that began with it.

    PyTorch's own operators inside of a custom one carry its number too.
    """
    found: dict[int, HostEvent] = {}
    for op in operators:
        number = op.args.get("Sequence number")
        if not isinstance(number, int) or number < 0 or op.args.get("Fwd thread id") or op.name.startswith("aten::"):
            continue
        if number not in found or op.begin_us >= found[number].begin_us:
            found[number] = op
    return found


def _unknown_name(stack: tuple[_Frame, ...], created: Mapping[int, HostEvent]) -> str:
    """The innermost operator; for an autograd node also the forward operator that it belongs to."""
    innermost = stack[-1].event
    node = next((frame.event for frame in reversed(stack) if _is_node(frame.event)), None)
    if node is None or not (innermost is node or innermost.name in node.name):
        return innermost.name
    forward = created.get(_sequence(node))
    name = node.name.removeprefix(_NODE)
    return f"{name} (backward of {forward.name})" if forward is not None else name


def _is_node(event: HostEvent) -> bool:
    return event.name.startswith(_NODE)


def _sequence(event: HostEvent) -> int:
    value: Any = event.args.get("Sequence number", -1)
    return value if isinstance(value, int) else -1


# ---- launches --------------------------------------------------------------------------------------------------


def _launch_gaps(profile: Profile) -> tuple[tuple[float, ...], float]:
    """From launch to start, of kernels that were launched onto an idle device, and how long the device waited for them."""
    busy_until = float("-inf")
    latencies: list[float] = []
    waited = 0.0
    for kernel in profile.kernels:
        launch = profile.launches.get(kernel.correlation)
        if launch is not None and launch.begin_us >= busy_until and "Synchronize" not in launch.name:
            latencies.append(kernel.begin_us - launch.begin_us)
            if busy_until > float("-inf"):
                waited += max(0.0, kernel.begin_us - busy_until)
        busy_until = max(busy_until, kernel.end_us)
    return tuple(latency for latency in latencies if latency >= 0), waited


def _queue_gap_us(profile: Profile) -> float:
    """The median gap between two kernels of a stream, where the second was launched before the first began; if there are few,
    NaN, or none where kernels' records join.
    """
    before: dict[int, Kernel] = {}
    gaps: list[float] = []
    for kernel in profile.kernels:
        launch, last = profile.launches.get(kernel.correlation), before.get(kernel.stream)
        before[kernel.stream] = kernel
        if last is None or launch is None or kernel.kind != "kernel" or last.kind != "kernel" or is_collective(kernel):
            continue
        if launch.begin_us < last.begin_us:
            gaps.append(max(0.0, kernel.begin_us - last.end_us))
    if len(gaps) >= _FEWEST_GAPS:
        return statistics.median(gaps)
    return 0.0 if _records_join(profile) else math.nan


def _records_join(profile: Profile) -> bool:
    """Whether the record of a kernel begins when the one before ends: that of ROCm's profiler, whose launches are HIP's."""
    return any(launch.name.startswith("hip") for launch in profile.launches.values())


def _found_idle(profile: Profile) -> frozenset[int]:
    """The launches (correlation ids) of kernels that found their stream idle, where that makes their records shorter."""
    if not _records_join(profile):
        return frozenset()
    ends: dict[int, float] = {}
    found: list[int] = []
    for kernel in profile.kernels:
        if kernel.kind == "kernel" and kernel.begin_us > ends.get(kernel.stream, float("-inf")) + _JOINED_US:
            found.append(kernel.correlation)
        ends[kernel.stream] = kernel.end_us
    return frozenset(found)
