"""The memory of the simulated device while a script runs: the allocator follows the recorder's log.

It answers `torch.cuda`'s memory queries, and says where the device runs out. It is `memory_sim`'s allocator, with the
operators' own temporaries and cuBLAS's workspaces, of which the first step's order is that of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from autosac.capture.cuda.functions import Count
from autosac.capture.record.recorder import Recorder
from autosac.memory_sim.allocator import CachingAllocator, OutOfMemoryError
from autosac.memory_sim.allocator_blocks import Block
from autosac.memory_sim.workspaces import is_matmul, is_nameless, on_autograd_thread
from autosac.scripts.memory_counts import ALL, MemoryCounts
from autosac.simulation import Target
from autosac.trace import Alloc, EmptyCache, Event, Free, GraphLaunch, Op, RecordStream

_COUNTERS = ("active_bytes", "reserved_bytes")


class ScriptMemory:
    """A `DeviceMemory`. `unlimited`: the device never runs out."""

    def __init__(self, recorder: Recorder, target: Target, *, unlimited: bool = False) -> None:
        self._recorder = recorder
        self._target = target
        self._workspaces = target.workspaces
        self._unlimited = unlimited
        hardware = target.hardware
        self.allocator = CachingAllocator(
            target.allocator, None if unlimited else hardware.usable_bytes, hardware.context_bytes
        )
        self._outside_bytes = hardware.context_bytes
        self._counts = MemoryCounts(self.allocator)
        self._live: dict[int, Block] = {}
        self._held: list[Block] = []  # cuBLAS's workspaces
        self._kept: set[tuple[bool, int]] = set()
        self._streams: set[int] = set()
        self._products: list[Op] = []  # the first ones on side streams that write into memory which is there
        self._operators: list[tuple[bool, tuple[int, ...]]] = []
        self._events: list[Event] = []
        self._position = self._graph_ends = 0
        self._peaks = dict.fromkeys(_COUNTERS, 0)
        self.step_peak_bytes = 0

    def follow(self) -> None:
        """Bring the allocator up to date, also before the next step begins. OutOfMemoryError where the device runs out."""
        events = self._recorder.log.events
        if events is not self._events:
            self._events, self._position, self._graph_ends = events, 0, 0
        settled = self._recorder.storages.settled
        self.allocator.private = self._recorder.graphs.pools
        while self._position < settled:
            event = events[self._position]
            self._position += 1
            self._apply(event)

    def skip(self) -> None:
        """What the log holds now has been followed, though it has changed (the capture of a CUDA graph)."""
        self._position = len(self._recorder.log.events)

    def _apply(self, event: Event) -> None:
        kind = type(event)
        if kind is Alloc:
            storage = self._recorder.storages.storages[event.storage]  # type: ignore[union-attr]
            if storage.nbytes:
                self._live[event.storage] = self._malloc(storage.nbytes, storage.stream)  # type: ignore[union-attr]
            if is_matmul(storage.op):
                self._keep_workspace(on_autograd_thread(storage.phase), storage.stream)
        elif kind is Free:
            block = self._live.pop(event.storage, None)  # type: ignore[union-attr]
            if block is not None:
                self._free(block)
        elif kind is RecordStream:
            if event.storage in self._live:  # type: ignore[union-attr]
                self.allocator.record_stream(self._live[event.storage], event.stream)  # type: ignore[union-attr]
        elif kind is GraphLaunch:
            self._graph_ends = self._position + event.events  # type: ignore[union-attr]
        elif kind is Op and (self._position > self._graph_ends or not is_nameless(event)):
            self._run(event)  # type: ignore[arg-type]
        elif kind is EmptyCache:
            self.allocator.empty_cache()

    def _run(self, event: Op) -> None:
        """What the operator itself allocates; compiled products write into memory that is there."""
        stream = self._recorder.graphs.memory_of(event.stream)
        is_product, temporaries = self._own(event.signature)
        if is_product:
            known = len(self._kept)
            self._keep_workspace(on_autograd_thread(event.phase), stream)
            if stream and len(self._kept) > known:
                self._products.append(event._replace(stream=stream))
        for block in [self._malloc(size, stream) for size in temporaries]:
            self._free(block)

    def _own(self, signature: int) -> tuple[bool, tuple[int, ...]]:
        """Whether an operator fetches a cuBLAS handle, and the sizes of its temporaries."""
        if signature >= len(self._operators):
            index = self._recorder.signatures.distinct.index
            for described in islice(index, len(self._operators), len(index)):
                blocks = tuple(self._workspaces.op_workspace_blocks(described))
                self._operators.append((is_matmul(described.name), blocks))
        return self._operators[signature]

    def _keep_workspace(self, in_backward: bool, stream: int) -> None:
        if self._workspaces.cublas_bytes and (in_backward, stream) not in self._kept:
            self._kept.add((in_backward, stream))
            self._held.append(self._malloc(self._workspaces.cublas_bytes, stream))

    def _malloc(self, nbytes: int, stream: int) -> Block:
        allocator = self.allocator
        block = allocator.malloc(nbytes, stream)
        self._counts.made(block)
        self._streams.add(stream)
        peaks = self._peaks
        for name in _COUNTERS:
            peaks[name] = max(peaks[name], getattr(allocator, name))
        self.step_peak_bytes = max(self.step_peak_bytes, allocator.active_bytes)
        return block

    def _free(self, block: Block) -> None:
        self._counts.freed(block)
        self.allocator.free(block)

    @property
    def places(self) -> int:
        """How many streams have had memory, and pairs of a stream and a thread a workspace: each keeps memory of its own."""
        return len(self._streams) + len(self._kept)

    def remember_products(self) -> None:
        """What comes before the next step shall say that these streams have workspaces: it holds no operators, only memory."""
        for product in self._products:
            self._recorder.storages.note(product, "aten.mm.out")
        self._products.clear()
        self.follow()

    def begin_step(self) -> None:
        """The peak of the step begins anew."""
        self.follow()
        self.step_peak_bytes = self.allocator.active_bytes

    def out_of_memory_message(self, error: OutOfMemoryError) -> str:
        """What PyTorch says (CUDACachingAllocator.cpp)."""
        allocator = self.allocator
        unused_bytes = allocator.reserved_bytes - allocator.allocated_bytes
        return (
            f"CUDA out of memory. Tried to allocate {_size(error.requested_bytes)}. GPU 0 has a total capacity of "
            f"{_size(self._target.hardware.usable_bytes)} of which {_size(self.free_bytes())} is free. Including "
            f"non-PyTorch memory, this process has {_size(allocator.reserved_bytes + self._outside_bytes)} memory in use. "
            f"Of the allocated memory {_size(allocator.allocated_bytes)} is allocated by PyTorch, and {_size(unused_bytes)} "
            "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )

    # ---- DeviceMemory -----------------------------------------------------------------------------------------------

    def statistics(self) -> Mapping[str, Mapping[str, Count]]:
        """See `MemoryCounts`; the peaks of what is active and reserved are those of all allocations."""
        self.follow()
        table = self._counts.table(self._blocks())
        for name, peak in self._peaks.items():
            table[name][ALL] = table[name][ALL]._replace(peak=peak)
        return table

    def _blocks(self) -> tuple[Block, ...]:
        return (*self._live.values(), *self._held)

    def segments(self) -> list[dict[str, Any]]:
        """See `MemoryCounts.segments`."""
        self.follow()
        return self._counts.segments(self._blocks())

    def retries(self) -> int:
        """How often the allocator has released its cache to serve a request."""
        return self.allocator.retries

    def free_bytes(self) -> int:
        """What the device has left."""
        free_bytes = self._target.hardware.usable_bytes - self._outside_bytes - self.allocator.reserved_bytes
        return max(0, free_bytes)

    def reset_peaks(self) -> None:
        """Peaks begin anew at the present values."""
        self.follow()
        self._peaks = {name: getattr(self.allocator, name) for name in _COUNTERS}
        self._counts.reset_peaks()


def _size(nbytes: int) -> str:
    """As PyTorch writes sizes (c10/cuda: format_size)."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    if nbytes <= 2**20:
        return f"{nbytes / 2**10:.2f} KiB"
    if nbytes <= 2**30:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes / 2**30:.2f} GiB"
