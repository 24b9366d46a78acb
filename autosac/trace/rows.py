"""The rows of a Trace: what its tables hold, and the events of a step (see `autosac.trace.trace`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, TypeAlias, get_args

from autosac.trace.structure import structure

Scalar: TypeAlias = "bool | int | float | str | tuple[Scalar, ...] | None"


class Phase(IntEnum):
    """What the training step was doing. RECOMPUTE is the forward work that checkpointing repeats in the backward."""

    SETUP = 0
    FORWARD = 1
    BACKWARD = 2
    RECOMPUTE = 3
    OPTIMIZER = 4
    OTHER = 5


class Label(IntEnum):
    """What only capture can know of a storage; memory_sim derives finer categories from it, the phase and lifetime."""

    NONE = 0
    PARAMETER = 1
    BUFFER = 2
    GRADIENT = 3
    OPTIMIZER_STATE = 4
    INPUT = 5
    UNSHARDED_PARAMETER = 6
    COMMUNICATION = 7


class TensorMeta(NamedTuple):
    """Shape (elements), stride (elements), dtype (``"bfloat16"``) and place (``"device"`` or ``"cpu"``) of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    place: str = "device"


class Signature(NamedTuple):
    """One distinct way of calling an operator; everything that its cost can depend on.

    `name` is the overload (``"aten.mm.default"``, ``"triton.<kernel>"``), `inputs` and `outputs` its tensors in order
    (lists flattened), `arguments` its non-tensor arguments by schema name. `is_view`: no device work is launched (views,
    metadata, allocations of uninitialised memory). `is_random`: draws from the device's generator. `mutates`: positions
    in `inputs` that the operator writes to. `wrappers`: tensor subclasses (DTensor and others) whose Python took the call
    apart before this operator ran.
    """

    name: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    arguments: tuple[tuple[str, Scalar], ...] = ()
    is_view: bool = False
    is_random: bool = False
    mutates: tuple[int, ...] = ()
    wrappers: int = 0


class Storage(NamedTuple):
    """One allocation of device memory: `nbytes` asked for on `stream`, by `module` (index) in `phase` at `source`."""

    nbytes: int
    stream: int
    label: Label
    phase: Phase
    module: int
    source: int
    op: str


class Group(NamedTuple):
    """A process group by its structure: ranks are ``offset + sum(i_d * stride_d)``, ``0 <= i_d < size_d``, or `explicit`.

    `dims` is a tuple of (size, stride), slowest first. A group of one rank has no dims.
    """

    name: str
    offset: int
    dims: tuple[tuple[int, int], ...]
    explicit: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        if self.explicit:
            return len(self.explicit)
        size = 1
        for count, _ in self.dims:
            size *= count
        return size

    def ranks(self) -> tuple[int, ...]:
        """All global ranks of the group, in group order."""
        if self.explicit:
            return self.explicit
        steps = [[i * stride for i in range(count)] for count, stride in self.dims]
        return tuple(self.offset + sum(combination) for combination in itertools.product(*steps))

    @staticmethod
    def of(name: str, ranks: Iterable[int]) -> Group:
        """The group of these ranks, by its structure wherever it has one."""
        members = tuple(ranks)
        dims = structure(members)
        if dims is None:
            return Group(name, members[0], (), members)
        return Group(name, members[0], dims)


# ---- events ---------------------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """An operator issued to `stream`. `inputs`/`outputs` are storage ids per signature tensor (-1: not on the device)."""

    signature: int
    stream: int
    module: int
    phase: Phase
    source: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


ALONE = -1
IN_TURN = -2


class Collective(NamedTuple):
    """A collective or point-to-point transfer.

    `kind`: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv, barrier. `nbytes`: what nccl-tests
    calls "size": the gathered output for all_gather, the whole input for reduce_scatter and all_reduce, this rank's send
    buffer for all_to_all, the message otherwise. `stream` is where it was issued: if `asynchronous` it runs on the
    group's own stream after what `stream` holds, and `work` identifies it to a later WorkWait; otherwise it runs on
    `stream`. `peer` is the global rank for send and recv, else -1. `batch` groups transfers that were issued as one
    (batch_isend_irecv). `ALONE`: it belongs to none, and a send or recv by itself runs on a stream that the group has for its
    pair of ranks. `IN_TURN`: so does every one in a group that was connected at once (``init_process_group(device_id=...)``),
    on the stream of the group's collectives.
    """

    kind: str
    nbytes: int
    group: int
    stream: int
    asynchronous: bool
    work: int
    peer: int
    batch: int
    signature: int
    module: int
    phase: Phase
    source: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Alloc(NamedTuple):
    """The storage comes to life."""

    storage: int


class Free(NamedTuple):
    """The last reference to the storage goes (in host order)."""

    storage: int


class RecordStream(NamedTuple):
    """`Tensor.record_stream`: the storage may not be reused before `stream` has passed this point."""

    storage: int
    stream: int


class EventRecord(NamedTuple):
    """The event is complete when `stream` has done what it holds now."""

    event: int
    stream: int


class EventWait(NamedTuple):
    """`stream` waits for the event's last record."""

    event: int
    stream: int


class StreamWait(NamedTuple):
    """`stream` waits for all that `other` holds now."""

    stream: int
    other: int


class WorkWait(NamedTuple):
    """`stream` waits for the collective with this `work` id (Work.wait, wait_tensor); the host goes on."""

    work: int
    stream: int


class HostWait(NamedTuple):
    """The host waits: for a stream (`stream` >= 0), an event (`event` >= 0), or the whole device (both -1).

    `reason`: "item" (a device-to-host read), "stream", "event", "device".
    """

    stream: int
    event: int
    reason: str


class ModuleEnter(NamedTuple):
    """The module's forward (or backward, or recomputation) begins on the host."""

    module: int
    phase: Phase


class ModuleExit(NamedTuple):
    """It ends."""

    module: int
    phase: Phase


class StepBegin(NamedTuple):
    """A training step begins (only in the prologue; the recorded step is `events` itself)."""

    step: int


class GraphLaunch(NamedTuple):
    """The next `events` events are the nodes of a CUDA graph, which the host launches at once."""

    events: int


class EmptyCache(NamedTuple):
    """The caching allocator returns to the device what is cached, but for the pools of CUDA graphs."""


Event: TypeAlias = (
    Op
    | Collective
    | Alloc
    | Free
    | RecordStream
    | EventRecord
    | EventWait
    | StreamWait
    | WorkWait
    | HostWait
    | ModuleEnter
    | ModuleExit
    | StepBegin
    | GraphLaunch
    | EmptyCache
)
EVENT_TYPES: tuple[type, ...] = get_args(Event)


UNSHARD = "fsdp.unshard"
GRAPH_POOL = "graph pool"  # how the names of streams begin that stand for the memory of CUDA graphs

# ---- regions --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One operator as a selective-checkpoint policy sees it (above tensor subclasses, autograd already passed).

    It covers `events[first:last]`. `op` with `occurrence` (how many calls of the same overload came before in this
    region; negative for views and Triton kernels, about which nothing is decided) is the key of a decision; `outputs` is
    its fingerprint. `created` are the storages that it allocated and that outlived it; `reads` and `writes` are existing
    storages (device) that it read or mutated; `results` hold its `outputs`, one for each (-1: not on the device).
    """

    op: str
    occurrence: int
    outputs: tuple[TensorMeta, ...]
    first: int
    last: int
    is_view: bool
    is_random: bool
    must_save: bool
    created: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[int, ...]


class Region(NamedTuple):
    """One forward execution of a module that may be checkpointed: `events[first:last]`, its `calls` in order.

    `inputs` and `outputs` are the storages that enter and leave it as arguments and results. A recomputation is one, too; a
    call UNSHARD of it is FSDP's work to gather again what a module inside has let go of (its index is the `occurrence`).
    """

    module: int
    first: int
    last: int
    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
