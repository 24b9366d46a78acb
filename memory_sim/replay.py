"""A trace replayed through the caching allocator: reserved memory, fragmentation, and whether the job fits.

The prologue comes first, from the empty allocator on (it holds the first training step, which makes the
optimizer's states), then the recorded step again and again until a step needs nothing of the device any more.
From one step to the next, what the step freed of its predecessor's memory and what it leaves to its successor
(gradients, say) are matched by size, stream and label; a storage that it leaves without such a counterpart
lives until the next step allocates it anew, as a Python variable would.

What PyTorch does not allocate is counted in the verdict, but not part of reserved memory: the CUDA context
with the loaded kernels (`context_bytes`) and NCCL's buffers (`nccl_bytes`).
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import cycle

import numpy as np

from autosac.errors import UsageError
from autosac.memory_sim.allocator import CachingAllocator, OutOfMemoryError
from autosac.memory_sim.allocator_blocks import Block
from autosac.memory_sim.allocator_config import AllocatorConfig
from autosac.memory_sim.attribution import module_name, source_name
from autosac.memory_sim.lifetimes import CUBLAS, IntArray, outputs_after
from autosac.memory_sim.workspaces import WorkspaceModel, is_matmul, on_autograd_thread, replayed
from autosac.trace import GRAPH_POOL, Alloc, EmptyCache, Event, Free, Op, Phase, RecordStream, Storage, Trace


class Outcome(Enum):
    """Does the job fit?"""

    FITS = "fits"
    FITS_AFTER_RETRY = "fits after the allocator's retry"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome; if it is not FITS, the request that failed or first made the allocator release its cache.

    `step`: -1 is the prologue, 0 the first replay of the recorded step. `short_by_bytes`: how much more
    device memory that request needed, once all that is cached had been released (0 unless out of memory).
    """

    outcome: Outcome
    step: int = -1
    event: int = -1
    op: str = ""
    module: str = ""
    phase: Phase = Phase.SETUP
    source: str = ""
    requested_bytes: int = 0
    short_by_bytes: int = 0

    def __str__(self) -> str:
        """One line for people."""
        if self.outcome is Outcome.FITS:
            return str(self.outcome.value)
        where = f"at {self.op} in {self.module or 'the step'}"
        if self.outcome is Outcome.FITS_AFTER_RETRY:
            return f"{self.outcome.value} {where} (slow)"
        return f"{self.outcome.value} {where}, short by {-(-self.short_by_bytes // 2**20)} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReport:
    """What the allocator did.

    The series have one entry per allocation or free, with its `sample_event` (index in the prologue or in the
    trace's events) and `sample_step` (-1: prologue). Allocated are live blocks; active ones also wait for
    other streams; reserved is what CUDA gave.
    `fragmentation` is the part of the reserved peak that was not active then. `settled`: the last replayed
    step took nothing from the device and returned nothing. `asked_bytes`: the most that would have been reserved, had the
    device given all that it was asked for at once. `device_bytes_needed`: reserved peak, context and
    NCCL, as nvidia-smi would show.
    """

    config: AllocatorConfig
    capacity_bytes: int | None
    context_bytes: int
    nccl_bytes: int
    verdict: Verdict
    steps: int
    settled: bool
    reserved_peak_bytes: int
    active_peak_bytes: int
    allocated_peak_bytes: int
    fragmentation: float
    device_allocs: int
    device_frees: int
    retries: int
    retries_last_step: int
    asked_bytes: int = field(repr=False)
    sample_step: IntArray = field(repr=False)
    sample_event: IntArray = field(repr=False)
    reserved_bytes: IntArray = field(repr=False)
    active_bytes: IntArray = field(repr=False)
    allocated_bytes: IntArray = field(repr=False)

    @property
    def device_bytes_needed(self) -> int:
        """Reserved peak with what lies outside of PyTorch."""
        return self.reserved_peak_bytes + self.context_bytes + self.nccl_bytes

    def on_device(self, capacity_bytes: int, context_bytes: int = 0, nccl_bytes: int = 0) -> AllocatorReport | None:
        """The report on the same trace on a device that refuses nothing of it, given that on an unlimited one.

        None where the device might decide: it is asked for more than there is, or memory was returned to it (addresses that
        become free are reused, and how many there are depends on the device).
        """
        assert self.capacity_bytes is None
        config = self.config
        available = min(capacity_bytes - context_bytes - nccl_bytes, int(config.memory_fraction * capacity_bytes))
        decides = self.asked_bytes > available or self.device_frees or config.garbage_collection_threshold > 0
        if decides or capacity_bytes // 8 < config.large_segment_bytes:
            return None
        return replace(self, capacity_bytes=capacity_bytes, context_bytes=context_bytes, nccl_bytes=nccl_bytes)

    def in_last_step(self, series: IntArray, events: int) -> IntArray:
        """A series (of this report) after each of the step's `events` events, in the last replayed step."""
        step = self.sample_step[-1]
        first = int(np.searchsorted(self.sample_step, step))
        last = np.searchsorted(self.sample_event[first:], np.arange(events), side="right") + first - 1
        return series[np.maximum(last, 0)]


def replay_allocator(
    trace: Trace,
    *,
    config: AllocatorConfig | None = None,
    capacity_bytes: int | None = None,
    workspaces: WorkspaceModel | None = None,
    steps: int = 8,
    context_bytes: int = 0,
    nccl_bytes: int = 0,
) -> AllocatorReport:
    """Replay a trace through the caching allocator: the prologue, then the recorded step at most `steps` times.

    `capacity_bytes`: the device's whole memory (None: unlimited). `context_bytes` and `nccl_bytes` of it are not available to
    PyTorch.

    Raises:
        UsageError: nothing is left for PyTorch, or `steps` is below 1.
    """
    outside_bytes = context_bytes + nccl_bytes
    replay = Replay(trace, config or AllocatorConfig(), capacity_bytes, outside_bytes, workspaces)
    replay.play(steps)
    return replay.report(context_bytes, nccl_bytes)


class ReachedError(Exception):
    """The allocator has reserved what `Replay.until_bytes` says."""


# An instruction is (kind, event, key, bytes, stream); keys are storage ids, or those of workspaces.
ALLOC, FREE, RECORD, TEMPORARY, STAY, EMPTY = range(6)
_Instruction = tuple[int, int, int, int, int]


class Replay:
    """One replay under way: live blocks by storage, the samples, the first retry.

    `until_bytes`: stop, by a `ReachedError`, as soon as this much is reserved.
    """

    def __init__(
        self,
        trace: Trace,
        config: AllocatorConfig,
        capacity_bytes: int | None,
        outside_bytes: int,
        workspaces: WorkspaceModel | None,
    ) -> None:
        """A replay that has not begun. UsageError if nothing of the device is left."""
        if capacity_bytes is not None and capacity_bytes <= outside_bytes:
            raise UsageError(f"the device has {capacity_bytes} bytes, of which {outside_bytes} are not PyTorch's")
        self.trace = trace
        self.allocator = CachingAllocator(config, capacity_bytes, outside_bytes)
        self.allocator.private = frozenset(i for i, name in enumerate(trace.streams) if name.startswith(GRAPH_POOL))
        self.workspaces = workspaces
        self.live: dict[int, Block] = {}
        self.stays: dict[tuple[bool, int], int] = {}
        self.temporaries: list[tuple[int, ...]] = [()] * len(trace.signatures)
        if workspaces is not None:
            self.temporaries = [workspaces.op_workspace_blocks(s) for s in trace.signatures]
        self.echoes = self._temporaries_of_prologue()
        self.matmul = [workspaces is not None and is_matmul(s.name) for s in trace.signatures]
        self.samples: list[tuple[int, int, int, int, int]] = []
        self.now: tuple[int, _Instruction] = (-1, (FREE, -1, -1, 0, 0))
        self.first_retry: Verdict | None = None
        self.retries_before = 0
        self.verdict: Verdict | None = None
        self.steps = 0
        self.settled = False
        self.until_bytes = sys.maxsize

    def play(self, steps: int, log: bool = False, history: bool = False) -> None:
        """Replay the prologue, then the step until it settles; `log` keeps the last step's actions, `history` all."""
        if steps < 1:
            raise UsageError(f"at least one step must be replayed, not {steps}")
        allocator = self.allocator
        allocator.log = [] if log or history else None
        try:
            self.run(-1, self.program(self.trace.prologue))
            program = self.program(self.trace.events)
            while self.steps < steps and not self.settled:
                before = (allocator.device_allocs, allocator.device_frees)
                self.retries_before = allocator.retries
                if not history:
                    allocator.log = [] if log else None
                self.steps += 1
                self.run(self.steps - 1, program)
                self.settled = before == (allocator.device_allocs, allocator.device_frees)
        except OutOfMemoryError as e:
            self._sample(self.now[0], self.now[1][1])
            self.verdict = self.at(Outcome.OUT_OF_MEMORY, e.requested_bytes, e.short_by_bytes)

    # ---- from events to instructions -----------------------------------------------------------------------

    def _temporaries_of_prologue(self) -> dict[int, int]:
        """By a storage of the prologue, the signature whose temporaries came with it.

        The prologue has no operators, but the same calls made its storages, with the same temporaries. Calls that agree in
        operator, phase and size of the output may differ in temporaries: they are told apart by their order, from the end
        on, where the prologue's last step ends. What is left of a step that was not whole has none then.
        """
        by_output = {
            event.outputs[0]: event.signature
            for event in self.trace.events
            if type(event) is Op and self.temporaries[event.signature] and event.outputs
        }
        found: dict[int, int] = {}
        calls = self._made(self.trace.events) if by_output else {}
        for made_by, storages in (self._made(self.trace.prologue) if calls else {}).items():
            signatures = [by_output.get(storage, -1) for storage in calls.get(made_by, ())]
            if max(signatures, default=-1) < 0:
                continue
            rest = len(storages) % len(signatures)
            if len({self.temporaries[s] if s >= 0 else () for s in signatures}) == 1:
                signatures, rest = signatures[:1], 0
            found |= {storage: s for storage, s in zip(storages[rest:], cycle(signatures), strict=False) if s >= 0}
        return found

    def _made(self, events: tuple[Event, ...]) -> dict[tuple[str, int, Phase], list[int]]:
        """The storages that are allocated, in their order, by operator, bytes and phase."""
        made: defaultdict[tuple[str, int, Phase], list[int]] = defaultdict(list)
        for event in events:
            if type(event) is Alloc:
                storage = self.trace.storages[event.storage]
                made[storage.op, storage.nbytes, storage.phase].append(event.storage)
        return made

    def program(self, events: tuple[Event, ...]) -> list[_Instruction]:
        """The allocator's part of the events."""
        echoes = self.echoes if events is self.trace.prologue else {}
        program: list[_Instruction] = []
        deferred: dict[int, list[_Instruction]] = {}
        storages, repeated = self.trace.storages, replayed(events)
        for i, event in enumerate(events):
            if type(event) is Alloc:
                storage = storages[event.storage]
                if storage.nbytes:
                    program.append((ALLOC, i, event.storage, storage.nbytes, storage.stream))
                if i in deferred:
                    program += deferred.pop(i)
                if self.workspaces is not None and is_matmul(storage.op):
                    program += self._stay(i, storage.phase, storage.stream)
                if event.storage in echoes:
                    program.append((TEMPORARY, i, echoes[event.storage], 0, storage.stream))
            elif type(event) is Free:
                program.append((FREE, i, event.storage, 0, 0))
            elif type(event) is RecordStream:
                program.append((RECORD, i, event.storage, 0, event.stream))
            elif type(event) is EmptyCache:
                program.append((EMPTY, i, -1, 0, 0))
            elif type(event) is Op and i not in repeated:
                own = self._op(events, i, event)
                behind = outputs_after(events, i) if own else 0
                if behind:
                    deferred[i + behind] = own
                else:
                    program += own
        return program

    def _op(self, events: tuple[Event, ...], i: int, event: Op) -> list[_Instruction]:
        """What the operator itself allocates: the cuBLAS workspace if it is first, then temporaries."""
        own = self._stay(i, event.phase, event.stream) if self.matmul[event.signature] else []
        if self.temporaries[event.signature]:
            own.append((TEMPORARY, i, event.signature, 0, event.stream))
        return own

    def _stay(self, i: int, phase: Phase, stream: int) -> list[_Instruction]:
        assert self.workspaces is not None
        key = (on_autograd_thread(phase), stream)
        if key in self.stays or not self.workspaces.cublas_bytes:
            return []
        self.stays[key] = len(self.trace.storages) + len(self.stays)
        return [(STAY, i, self.stays[key], self.workspaces.cublas_bytes, stream)]

    # ---- running -------------------------------------------------------------------------------------------

    def run(self, step: int, program: Iterable[_Instruction]) -> None:
        """Execute one step."""
        allocator, live, samples = self.allocator, self.live, self.samples
        found = set(live)
        for instruction in program:
            kind, event, key, nbytes, stream = instruction
            if kind == FREE:
                block = live.pop(key, None)
                if block is None:
                    continue
                allocator.free(block)
            elif kind in (ALLOC, STAY):
                if kind == STAY and key in live:
                    continue
                self.now = (step, instruction)
                allocator.context = key
                block = allocator.malloc(nbytes, stream)
                if key in live:
                    self._sample(step, event)
                    allocator.free(live[key])
                live[key] = block
                if allocator.reserved_bytes >= self.until_bytes:
                    raise ReachedError
            elif kind == RECORD:
                if key in live:
                    allocator.record_stream(live[key], stream)
                continue
            elif kind == EMPTY:
                allocator.empty_cache()
            else:
                self.now = (step, instruction)
                allocator.context = -2 - event
                blocks = [allocator.malloc(size, stream) for size in self.temporaries[key]]
                self._sample(step, event)
                if allocator.reserved_bytes >= self.until_bytes:
                    raise ReachedError
                for block in blocks:
                    allocator.free(block)
            if allocator.retries and self.first_retry is None:
                self.first_retry = self.at(Outcome.FITS_AFTER_RETRY)
            samples.append((step, event, allocator.reserved_bytes, allocator.active_bytes, allocator.allocated_bytes))
        if step >= 0:
            self._hand_over(found)

    def _sample(self, step: int, event: int) -> None:
        a = self.allocator
        self.samples.append((step, event, a.reserved_bytes, a.active_bytes, a.allocated_bytes))

    def _hand_over(self, found: set[int]) -> None:
        """Give what the step leaves the names of what it found and freed, so that it can be replayed."""
        left: defaultdict[tuple[int, int, int], deque[int]] = defaultdict(deque)
        for key in self.live:
            if key not in found and key < len(self.trace.storages):
                left[self._kind(key)].append(key)
        for key in sorted(found - self.live.keys()):
            if left[self._kind(key)]:
                self.live[key] = self.live.pop(left[self._kind(key)].popleft())

    def _kind(self, key: int) -> tuple[int, int, int]:
        storage = self.trace.storages[key]
        return storage.nbytes, storage.stream, storage.label

    # ---- results -------------------------------------------------------------------------------------------

    def at(self, outcome: Outcome, requested_bytes: int = 0, short_by_bytes: int = 0) -> Verdict:
        """A verdict on the present instruction."""
        trace = self.trace
        step, (kind, event, key, nbytes, _) = self.now
        events = trace.prologue if step < 0 else trace.events
        here: Event | Storage = trace.storages[key] if kind == ALLOC else events[event]
        if type(here) is Alloc:
            here = trace.storages[here.storage]
        assert isinstance(here, Storage | Op)
        op = here.op if isinstance(here, Storage) else trace.signatures[here.signature].name
        return Verdict(
            outcome=outcome,
            step=step,
            event=event,
            op=f"{op} ({CUBLAS})" if kind == STAY else op,
            module=module_name(trace, here.module),
            phase=here.phase,
            source=source_name(trace, here.source),
            requested_bytes=requested_bytes or nbytes,
            short_by_bytes=short_by_bytes,
        )

    def report(self, context_bytes: int, nccl_bytes: int) -> AllocatorReport:
        """The report on what has been replayed."""
        allocator = self.allocator
        columns = np.array(self.samples or [(-1, -1, 0, 0, 0)], dtype=np.int64).T
        step, event, reserved, active, allocated = columns
        top = int(np.argmax(reserved))
        at_top = active[reserved == reserved[top]].max()
        return AllocatorReport(
            config=allocator.config,
            capacity_bytes=allocator.device_bytes,
            context_bytes=context_bytes,
            nccl_bytes=nccl_bytes,
            verdict=self.verdict or self.first_retry or Verdict(outcome=Outcome.FITS),
            steps=self.steps,
            settled=self.settled,
            reserved_peak_bytes=int(reserved[top]),
            active_peak_bytes=int(active.max()),
            allocated_peak_bytes=int(allocated.max()),
            fragmentation=1 - int(at_top) / int(reserved[top]) if reserved[top] else 0.0,
            device_allocs=allocator.device_allocs,
            device_frees=allocator.device_frees,
            retries=allocator.retries,
            retries_last_step=allocator.retries - self.retries_before,
            asked_bytes=allocator.asked_bytes,
            sample_step=step,
            sample_event=event,
            reserved_bytes=reserved,
            active_bytes=active,
            allocated_bytes=allocated,
        )
