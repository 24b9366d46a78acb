"""PyTorch's CUDA caching allocator, decision by decision (``c10/cuda/CUDACachingAllocator.cpp``; names in
brackets are its).

A request is rounded, served by the best-fitting free block of its stream and pool [`get_free_block`], which
is split if enough remains [`should_split`]; otherwise by new memory [`alloc_block`], and if CUDA has none by
returning cached blocks first: oversize ones [`release_available_cached_blocks`], then all
[`release_cached_blocks`], the slow retry that precedes an out-of-memory error.

Where the original depends on the device's timing or on CUDA's choice of addresses, this does the following:

- *events*: a freed block that other streams have used (`record_stream`) becomes free when its events are next
  queried, by the next allocation: the streams are taken to have passed by then. Until then it is active but
  not allocated.
- *addresses*: every segment gets the next unused addresses; they only break ties between free blocks of one
  size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TypeAlias

from autosac.memory_sim.allocator_blocks import Block, ExpandableSegment, Pool
from autosac.memory_sim.allocator_config import (
    BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorConfig,
)

ADDRESS_SPACE_BYTES = 1 << 42
"""An expandable segment's range of addresses where the device's size is not known."""


LogEntry: TypeAlias = "tuple[str, int, int, int, int]"
"""Action, address, bytes, stream, context."""


class OutOfMemoryError(Exception):
    """A request that cannot be served: `short_by_bytes` more of free device memory would have done."""

    def __init__(self, requested_bytes: int, short_by_bytes: int) -> None:
        """Sizes in bytes."""
        super().__init__(f"out of memory: {requested_bytes} bytes requested, {short_by_bytes} too many")
        self.requested_bytes = requested_bytes
        self.short_by_bytes = short_by_bytes


class CachingAllocator:
    """The allocator of one device.

    `device_bytes` is the memory of the device and `outside_bytes` what others hold of it (CUDA context, NCCL); without
    `device_bytes` memory never ends. Statistics, as PyTorch counts them: `allocated_bytes`, `active_bytes` (with what waits
    for events), `reserved_bytes`, `device_allocs` (cudaMalloc or mapping), `device_frees`, `retries` (after releasing all that
    was cached); and `asked_bytes`, the most that would have been reserved, had the device given all that it was asked for.
    Memory of the streams in `private`, pools of CUDA graphs, is never returned. `log`, if set to a list, receives what
    PyTorch's memory history would hold, with the `context` (any number of the caller's) in which each block was allocated.
    """

    def __init__(
        self, config: AllocatorConfig | None = None, device_bytes: int | None = None, outside_bytes: int = 0
    ) -> None:
        """An empty allocator."""
        self.config = config or AllocatorConfig()
        self.device_bytes = device_bytes
        self.limit_bytes = None if device_bytes is None else device_bytes - outside_bytes
        self.allowed_bytes = None if device_bytes is None else int(self.config.memory_fraction * device_bytes)
        self.small, self.large = Pool(is_small=True), Pool(is_small=False)
        self.pending: list[Block] = []
        self.next_address = 1 << 32
        self.allocated_bytes = self.active_bytes = self.reserved_bytes = 0
        self.device_allocs = self.device_frees = self.retries = 0
        self.log: list[LogEntry] | None = None
        self.context = -1
        self.private: frozenset[int] = frozenset()
        self._collects = self.config.garbage_collection_threshold > 0 and device_bytes is not None
        self.asked_bytes = 0
        self._needed_bytes = 0
        self._sizes: dict[int, int] = {}

    # ---- the interface -------------------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """A block for `nbytes` (above 0). OutOfMemoryError if even the retry does not get one."""
        if self.pending:
            self.process_events()
        size = self._sizes.get(nbytes) or self._sizes.setdefault(nbytes, self.config.round_size(nbytes))
        pool = self.small if size <= SMALL_BYTES else self.large
        block = self._cached(pool, stream, size) or self._new(pool, stream, size)
        if self._should_split(block, size):
            block = self._split(block, size)
        block.allocated = True
        block.requested = nbytes
        block.context = self.context
        self.allocated_bytes += block.size
        self.active_bytes += block.size
        if self.log is not None:
            self.log.append(("alloc", block.address, nbytes, stream, self.context))
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """The block is used on another stream, too."""
        if stream != block.stream:
            if block.used_by is None:
                block.used_by = set()
            block.used_by.add(stream)

    def free(self, block: Block) -> None:
        """The block's last reference goes."""
        block.allocated = False
        self.allocated_bytes -= block.size
        if self.log is not None:
            self._note("free_requested", block)
        if block.used_by:
            block.used_by = None
            block.waiting = True
            self.pending.append(block)
        else:
            self._free(block)

    def process_events(self) -> None:
        """Blocks that waited for other streams become free."""
        pending, self.pending = self.pending, []
        for block in pending:
            block.waiting = False
            self._free(block)

    def empty_cache(self) -> None:
        """Return to the device what no live block holds [`release_cached_blocks`]."""
        self.process_events()
        for pool in (self.large, self.small):
            unmap = []
            for block in pool.free_blocks():
                if block.stream in self.private:
                    continue
                if block.segment is not None:
                    unmap.append(block)
                elif not block.is_split:
                    self._release(block)
            for block in unmap:
                self._unmap(block)

    # ---- cached blocks -------------------------------------------------------------------------------------

    def _cached(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The best fit among free blocks, taken out of the pool [`get_free_block`]."""
        if self._collects:
            pool.searches += 1
        row = pool.free[stream]
        i = bisect_left(row, (size,))
        if i == len(row):
            return None
        block = pool.at[row[i][1]]
        if block.segment is not None:
            while i + 1 < len(row) and pool.at[row[i + 1][1]].expandable_size < block.expandable_size:
                i += 1
                block = pool.at[row[i][1]]
        split_from = self.config.max_split_bytes
        if split_from is not None:
            if size < split_from <= block.size:
                return None
            if size >= split_from and block.size >= size + self.config.max_non_split_rounding_bytes:
                return None
        del row[i]
        del pool.at[block.address]
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small or self.config.expandable_segments:
            return remaining >= BLOCK_BYTES
        split_from = self.config.max_split_bytes
        return remaining > SMALL_BYTES and (split_from is None or size < split_from)

    def _split(self, block: Block, size: int) -> Block:
        """The first `size` bytes as a block; the rest of `block` goes back to the pool."""
        front = Block(block.pool, block.stream, block.address, size, block.segment)
        front.link(block.prev, block)
        block.address += size
        block.size -= size
        block.pool.add(block)
        return front

    def _free(self, block: Block) -> None:
        """Merge with free neighbours and put into the pool [`free_block`]."""
        self.active_bytes -= block.size
        if self.log is not None:
            self._note("free_completed", block)
        pool = block.pool
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        pool.add(block)

    def _note(self, action: str, block: Block) -> None:
        assert self.log is not None
        self.log.append((action, block.address, block.requested, block.stream, block.context))

    def segments(self, live: Iterable[Block]) -> list[list[Block]]:
        """All blocks, given the `live` ones, as contiguous runs of memory by address [`snapshot`]."""
        found = {block.address: block for block in (*live, *self.pending)}
        for pool in (self.small, self.large):
            found |= pool.at
        runs: list[list[Block]] = []
        for _, block in sorted(found.items()):
            if not block.mapped:
                continue
            if block.prev is not None and block.prev.mapped:
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs

    # ---- memory from the device ----------------------------------------------------------------------------

    def _new(self, pool: Pool, stream: int, size: int) -> Block:
        """New memory, if need be after releasing cached blocks [`malloc`]."""
        if self._collects:
            self._collect_garbage()
        block = self._from_device(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._from_device(pool, stream, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_device(pool, stream, size)
        if block is None:
            raise OutOfMemoryError(size, self._shortage(self._needed_bytes))
        return block

    def _shortage(self, nbytes: int) -> int:
        """By how much `nbytes` more exceed the device, or its allowed part; at most 0 if they do not."""
        if self.limit_bytes is None or self.allowed_bytes is None:
            return 0
        return self.reserved_bytes + nbytes - min(self.limit_bytes, self.allowed_bytes)

    def _from_device(self, pool: Pool, stream: int, size: int) -> Block | None:
        """A segment of its own, or a part of an expandable one [`alloc_block`]."""
        nbytes = self._needed_bytes = self.config.segment_size(size)
        self.asked_bytes = max(self.asked_bytes, self.reserved_bytes + nbytes)
        if self.config.expandable_segments:
            candidate = self._expandable(pool, stream, size)
            if self.allowed_bytes is not None and self.reserved_bytes + nbytes > self.allowed_bytes:
                assert candidate.segment is not None
                missing = size - candidate.size * candidate.mapped
                self._needed_bytes = max(nbytes, candidate.segment.enclosing(candidate.segment.base, missing)[1])
                return None
            return self._expand(candidate, size)
        if self._shortage(nbytes) > 0:
            return None
        block = Block(pool, stream, self._addresses(nbytes), nbytes)
        self._reserve("segment_alloc", block.address, nbytes, stream)
        return block

    def _addresses(self, nbytes: int) -> int:
        address = self.next_address
        self.next_address += -(-nbytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        return address

    def _reserve(self, action: str, address: int, nbytes: int, stream: int) -> None:
        self.reserved_bytes += nbytes
        self.device_allocs += 1
        if self.log is not None:
            self.log.append((action, address, nbytes, stream, self.context))

    def _unreserve(self, action: str, address: int, nbytes: int, stream: int) -> None:
        self.reserved_bytes -= nbytes
        self.device_frees += 1
        if self.log is not None:
            self.log.append((action, address, nbytes, stream, self.context))

    def _release(self, block: Block) -> None:
        """Give a whole segment back to CUDA [`release_block`]."""
        block.pool.remove(block)
        self._unreserve("segment_free", block.address, block.size, block.stream)

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Release enough blocks above max_split_size [`release_available_cached_blocks`]."""
        split_from = self.config.max_split_bytes
        if split_from is None or self.config.expandable_segments:
            return False
        wanted = max(size, split_from)
        row = pool.free[stream]
        i = bisect_left(row, (wanted,))
        if i < len(row):
            self._release(pool.at[row[i][1]])
            return True
        released = 0
        while released < wanted and row and row[-1][0] >= split_from:
            released += row[-1][0]
            self._release(pool.at[row[-1][1]])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release the longest unused whole segments above the threshold [`garbage_collect_cached_blocks`]."""
        assert self.allowed_bytes is not None
        threshold = int(self.config.garbage_collection_threshold * self.allowed_bytes)
        target = self.reserved_bytes - threshold
        searches = self.large.searches
        candidates = [b for b in self.large.free_blocks() if not b.is_split and b.stream not in self.private]
        reclaimed = 0
        while candidates and reclaimed < target:
            mean_age = sum(searches - b.age for b in candidates) / len(candidates)
            old = [b for b in candidates if searches - b.age >= mean_age]
            candidates = [b for b in candidates if searches - b.age < mean_age]
            for block in old:
                reclaimed += block.size
                self._release(block)

    # ---- expandable segments -------------------------------------------------------------------------------

    def _expand(self, candidate: Block, size: int) -> Block | None:
        """Map pages from the candidate on until the request fits [`try_allocate_expandable_block`]."""
        if not candidate.mapped and not self._map(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            following = candidate.next
            assert following is not None
            if not self._map(following, min(size - candidate.size, following.size)):
                return None
            candidate = following
        candidate.pool.remove(candidate)
        return candidate

    def _expandable(self, pool: Pool, stream: int, size: int) -> Block:
        """The lowest unmapped and free blocks with room, or a new segment [`find_expandable_block`]."""
        for address in pool.unmapped[stream]:
            first = pool.at[address]
            if first.prev is not None and first.prev.is_free:
                first = first.prev
            room = 0
            block: Block | None = first
            while room < size and block is not None and block.is_free:
                room += block.size
                block = block.next
            if room >= size:
                return first
        page = SMALL_SEGMENT_BYTES if pool.is_small else self.config.large_segment_bytes
        space = ADDRESS_SPACE_BYTES
        if self.device_bytes is not None:
            space = self.device_bytes + self.device_bytes // 8
        segment = ExpandableSegment(self._addresses(space + page), max(space, size), page)
        block = Block(pool, stream, segment.base, segment.size, segment)
        block.mapped = False
        pool.add(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Back the first `nbytes` of an unmapped block by whole pages [`map_block`]; False if memory ends."""
        assert block.segment is not None and not block.mapped
        address, mapped = block.segment.enclosing(block.address, nbytes)
        assert address == block.address
        self._needed_bytes = mapped
        self.asked_bytes = max(self.asked_bytes, self.reserved_bytes + mapped)
        if self.limit_bytes is not None and self.reserved_bytes + mapped > self.limit_bytes:
            return False
        pool = block.pool
        pool.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(pool, block.stream, block.address + mapped, block.size - mapped, block.segment)
            rest.mapped = False
            rest.link(block, block.next)
            block.size = mapped
            pool.add(rest)
        self._reserve("segment_map", block.address, mapped, block.stream)
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Return the whole pages of a free block; forget a segment that has none left [`unmap_block`]."""
        assert block.segment is not None
        address, nbytes = block.segment.enclosed(block.address, block.size)
        if nbytes == 0:
            return
        pool = block.pool
        pool.remove(block)
        before, after = address - block.address, block.address + block.size - address - nbytes
        if before:
            head = Block(pool, block.stream, block.address, before, block.segment)
            head.link(block.prev, block)
            pool.add(head)
        if after:
            tail = Block(pool, block.stream, address + nbytes, after, block.segment)
            tail.link(block, block.next)
            pool.add(tail)
        block.address, block.size, block.mapped = address, nbytes, False
        self._unreserve("segment_unmap", address, nbytes, block.stream)
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        if block.is_split:
            pool.add(block)
