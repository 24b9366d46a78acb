"""Blocks and pools of the caching allocator.

A segment (one cudaMalloc, or one reserved range of virtual addresses) is a doubly linked list of blocks in
address order. The blocks that are free are also in their pool, sorted by (size, address) for each stream, so
that the best fit is one bisection; ranges of expandable segments that have no memory behind them (`mapped` is
false) are sorted by address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict


class ExpandableSegment:
    """Virtual addresses from `base` on, whose pages (`page_bytes` each) get memory as needed."""

    __slots__ = ("base", "page_bytes", "size")

    def __init__(self, base: int, size: int, page_bytes: int) -> None:
        """A range of at least `size` bytes without any memory."""
        self.base = base
        self.page_bytes = page_bytes
        self.size = -(-size // page_bytes) * page_bytes

    def enclosing(self, address: int, nbytes: int) -> tuple[int, int]:
        """The whole pages that contain a range: their address and size."""
        first = (address - self.base) // self.page_bytes
        last = -(-(address + nbytes - self.base) // self.page_bytes)
        return self.base + first * self.page_bytes, (last - first) * self.page_bytes

    def enclosed(self, address: int, nbytes: int) -> tuple[int, int]:
        """The whole pages within a range: their address and size (0 if there are none)."""
        first = -(-(address - self.base) // self.page_bytes)
        last = (address + nbytes - self.base) // self.page_bytes
        return self.base + first * self.page_bytes, max(last - first, 0) * self.page_bytes


class Block:
    """Addresses of one segment. `waiting`: freed, but streams that used it are not done with it."""

    __slots__ = (
        "address",
        "age",
        "allocated",
        "context",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "segment",
        "size",
        "stream",
        "used_by",
        "waiting",
    )

    def __init__(
        self, pool: Pool, stream: int, address: int, size: int, segment: ExpandableSegment | None = None
    ) -> None:
        """A free block on its own."""
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.segment = segment
        self.requested = 0
        self.allocated = False
        self.waiting = False
        self.mapped = True
        self.age = 0
        self.context = -1
        self.used_by: set[int] | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Is it a part of its segment only?"""
        return self.prev is not None or self.next is not None

    @property
    def is_free(self) -> bool:
        """Can it be handed out or merged?"""
        return not (self.allocated or self.waiting)

    @property
    def expandable_size(self) -> int:
        """Its size with the unmapped addresses directly behind it."""
        following = self.next
        return self.size if following is None or following.mapped else self.size + following.size

    def link(self, before: Block | None, after: Block | None) -> None:
        """Put it between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool:
    """Free and unmapped blocks of all streams, for small or for large requests."""

    __slots__ = ("at", "free", "is_small", "searches", "unmapped")

    def __init__(self, is_small: bool) -> None:
        """An empty pool."""
        self.is_small = is_small
        self.free: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.unmapped: defaultdict[int, list[int]] = defaultdict(list)
        self.at: dict[int, Block] = {}
        self.searches = 0

    def add(self, block: Block) -> None:
        """Put a block among the free or the unmapped ones."""
        if block.mapped:
            block.age = self.searches
            insort(self.free[block.stream], (block.size, block.address))
        else:
            insort(self.unmapped[block.stream], block.address)
        self.at[block.address] = block

    def remove(self, block: Block) -> None:
        """Take it out again, with its size and address unchanged since."""
        if block.mapped:
            row = self.free[block.stream]
            del row[bisect_left(row, (block.size, block.address))]
        else:
            addresses = self.unmapped[block.stream]
            del addresses[bisect_left(addresses, block.address)]
        del self.at[block.address]

    def free_blocks(self) -> list[Block]:
        """All free blocks by stream, size and address."""
        return [self.at[address] for stream in sorted(self.free) for _, address in self.free[stream]]

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """Let `block`, which is not in the pool, take in a neighbour that is, if both are free and alike."""
        if neighbour is None or neighbour.allocated or neighbour.waiting or neighbour.mapped != block.mapped:
            return  # written out, for this is asked twice for every block that is freed
        self.remove(neighbour)
        if block.prev is neighbour:
            block.address = neighbour.address
            block.link(neighbour.prev, block.next)
        else:
            block.link(block.prev, neighbour.next)
        block.size += neighbour.size
