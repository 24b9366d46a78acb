"""What the state of memory adds to an operator on a CPU: pages that must be mapped first, and data that left the cache.

An operator that is timed alone finds its operands in the cache and writes to memory that its process already has. In a
training step neither is certain, and both can be read from the trace.

**Page faults** (`fresh_bytes`). PyTorch takes CPU memory from malloc. glibc's main heap ends in a *top* chunk; a request is
served from free chunks (best fit), else from the top, else the heap grows; a request of at least T bytes that neither holds
is mapped by itself and unmapped when it is freed. T starts at 128 KiB; the free of a mapped chunk of up to 32 MiB raises T
to its size. When the top exceeds 2 T, what is above the last used chunk goes back to the kernel: of the tensors' part of
the heap a half, since a small object that is still in use may lie at any height. Memory that is new, or was given back,
costs a fault for each page when it is first touched: `fault_ns_per_byte`, zeroing included.

**Cache misses** (`reuse_extra_ms`). An operand whose last use lies D bytes of other data back (its LRU stack distance)
is read at the rate at which a buffer of D bytes is read again and again, r(D) ns a byte, measured by calibration. When the
operator was timed, its operands were as far away as its own tensors are large, W. It pays ``bytes * max(0, r(D) - r(W))``.

Both are settled by going through the step twice; the second pass is the steady state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import MinLen
from numpy.typing import NDArray

from autosac.estimator.work import tensor_bytes
from autosac.files.schema import STRICT, Within
from autosac.trace import Alloc, Free, Op, Trace

_ALIGN, _OVERHEAD = 16, 80  # a chunk's header, and what posix_memalign(64) takes on top
_PAGE = 4096
_FIRST_THRESHOLD, _LARGEST_THRESHOLD = 128 * 1024, 32 * 2**20
_TOP_PAD, _TRIM_LEAST = 128 * 1024, 64 * 1024
_RELEASED = 0.5  # small objects that outlive the tensors lie anywhere in the heap and hold back what is below them


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Measured costs of memory on one CPU.

    `fault_ns_per_byte`: first touch of memory that the kernel has to provide. `reuse_bytes` (ascending) and
    `read_ns_per_byte`: r(D) of the module's docstring.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    fault_ns_per_byte: Annotated[float, Within(0, 1e30)]
    reuse_bytes: Annotated[tuple[Annotated[float, Within(1e-30, 1e30)], ...], MinLen(1)]
    read_ns_per_byte: tuple[Annotated[float, Within(0, 1e30)], ...]

    def __post_init__(self) -> None:
        if len(self.reuse_bytes) != len(self.read_ns_per_byte):
            raise ValueError("reuse_bytes and read_ns_per_byte do not fit together")

    def read_ns(self, distance_bytes: float) -> float:
        """r(D), interpolated in the logarithm of D."""
        x = np.log(np.maximum(self.reuse_bytes, 1.0))
        return float(np.interp(np.log(max(distance_bytes, 1.0)), x, self.read_ns_per_byte))


class Heap:
    """glibc's main heap, as far as page faults depend on it. `malloc` returns (address, fresh bytes)."""

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []  # free chunks: (size, address), ascending
        self._free_at: dict[int, int] = {}  # free chunks: address -> size
        self._free_end: dict[int, int] = {}  # free chunks: end -> address
        self._used: dict[int, int] = {}  # chunks in use: address -> size (mapped ones at negative addresses)
        self._top = self._end = self._resident = 0
        self._threshold = _FIRST_THRESHOLD
        self._trim = _FIRST_THRESHOLD
        self._mapped = 0

    def malloc(self, nbytes: int) -> tuple[int, int]:
        """Allocate; the address names the chunk for `free`. Fresh bytes are those whose pages are not mapped yet."""
        size = -(-(nbytes + _OVERHEAD) // _ALIGN) * _ALIGN
        position = bisect_left(self._sizes, (size, -1))
        if position < len(self._sizes):
            found, address = self._sizes[position]
            self._take(found, address)
            if found - size >= 32:
                self._give(address + size, found - size)
                found = size
            self._used[address] = found
            return address, 0
        if self._end - self._top < size:
            if size >= self._threshold:
                size = -(-(size + _ALIGN) // _PAGE) * _PAGE
                self._mapped += 1
                self._used[-self._mapped] = size
                return -self._mapped, size
            self._end += -(-(size + _TOP_PAD - (self._end - self._top)) // _PAGE) * _PAGE
        address = self._top
        self._top += size
        fresh = max(0, self._top - max(self._resident, address))
        self._resident = max(self._resident, self._top)
        self._used[address] = size
        return address, fresh

    def free(self, address: int) -> None:
        """Free a chunk."""
        size = self._used.pop(address)
        if address < 0:
            if self._threshold < size <= _LARGEST_THRESHOLD:
                self._threshold, self._trim = size, 2 * size
            return
        before = self._free_end.get(address)
        if before is not None:
            self._take(address - before, before)
            size, address = size + address - before, before
        after = self._free_at.get(address + size)
        if after is not None:
            self._take(after, address + size)
            size += after
        if address + size == self._top:
            self._top = address
            size += self._end - self._top
        else:
            self._give(address, size)
        if size >= _TRIM_LEAST and self._end - self._top >= self._trim:
            kept = self._top + int((self._end - self._top) * (1 - _RELEASED))
            self._end = max(kept, self._top + _TOP_PAD)
            self._resident = min(self._resident, self._end)

    def _take(self, size: int, address: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, address))]
        del self._free_at[address], self._free_end[address + size]

    def _give(self, address: int, size: int) -> None:
        insort(self._sizes, (size, address))
        self._free_at[address] = size
        self._free_end[address + size] = address


def fresh_bytes(trace: Trace) -> NDArray[np.float64]:
    """For every operator event of a steady step, the bytes of new pages that it is the first to touch."""
    heap = Heap()
    addresses: dict[int, int] = {}
    fresh = np.zeros(len(trace.events))
    waiting: dict[int, int] = {}
    for event in trace.prologue:
        _replay(event, heap, addresses, trace, waiting)
    for _ in range(2):
        fresh[:] = 0
        waiting.clear()
        for i, event in enumerate(trace.events):
            _replay(event, heap, addresses, trace, waiting)
            if type(event) is Op and not trace.signatures[event.signature].is_view:
                for storage in {*event.inputs, *event.outputs}:
                    fresh[i] += waiting.pop(storage, 0)
        _reset(trace, heap, addresses)
    return fresh


def _replay(event: object, heap: Heap, addresses: dict[int, int], trace: Trace, waiting: dict[int, int]) -> None:
    if type(event) is Alloc:
        nbytes = trace.storages[event.storage].nbytes
        if nbytes > 0 and event.storage not in addresses:
            addresses[event.storage], waiting[event.storage] = heap.malloc(nbytes)
    elif type(event) is Free and event.storage in addresses:
        heap.free(addresses.pop(event.storage))


def _reset(trace: Trace, heap: Heap, addresses: dict[int, int]) -> None:
    """Make the next pass over the step possible: alive are what was alive when it began."""
    residents = set(trace.residents())
    for storage in [s for s in addresses if s not in residents]:
        heap.free(addresses.pop(storage))
    for storage in residents.difference(addresses):
        if trace.storages[storage].nbytes > 0:
            addresses[storage], _ = heap.malloc(trace.storages[storage].nbytes)


def reuse_extra_ms(trace: Trace, memory: HostMemory) -> NDArray[np.float64]:
    """What every operator pays for operands that are no longer in the cache; see the module's docstring."""
    extra = np.zeros(len(trace.events))
    recent: OrderedDict[int, int] = OrderedDict()
    far = memory.reuse_bytes[-1]
    for last in (False, True):
        for i, event in enumerate(trace.events):
            if type(event) is Alloc:
                recent.pop(event.storage, None)
            if type(event) is not Op or trace.signatures[event.signature].is_view:
                continue
            read, written = set(event.inputs) - {-1}, set(event.outputs) - {-1}
            own = float(sum(trace.storages[s].nbytes for s in read | written))
            if last:
                metas = trace.signatures[event.signature].inputs
                limits = {storage: tensor_bytes([meta]) for storage, meta in zip(event.inputs, metas, strict=True)}
                near_ns = memory.read_ns(own)
                for storage in read & recent.keys():
                    distance = _distance(recent, storage, far)
                    slower = max(0.0, memory.read_ns(max(distance, own)) - near_ns)
                    extra[i] += slower * min(recent[storage], limits[storage]) * 1e-6
            for storage in read | written:
                recent[storage] = trace.storages[storage].nbytes
                recent.move_to_end(storage)
    return extra


def _distance(recent: OrderedDict[int, int], storage: int, far: float) -> float:
    """Bytes used since the storage was last used, itself included; not counted beyond `far`."""
    total = 0
    for other in reversed(recent):
        total += recent[other]
        if other == storage or total > far:
            break
    return float(total)


def memory_state_ms(trace: Trace, memory: HostMemory) -> NDArray[np.float64]:
    """Milliseconds that faults and misses add to every event of a steady step."""
    return fresh_bytes(trace) * memory.fault_ns_per_byte * 1e-6 + reuse_extra_ms(trace, memory)
