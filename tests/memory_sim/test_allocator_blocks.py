"""Blocks, pools and expandable segments of the allocator, address by address."""

from __future__ import annotations

from autosac.memory_sim.allocator_blocks import Block, ExpandableSegment, Pool


def row(pool: Pool, *sizes: int, stream: int = 0) -> list[Block]:
    """Free neighbours of these sizes from address 1000 on, all in the pool."""
    blocks: list[Block] = []
    address = 1000
    for size in sizes:
        block = Block(pool, stream, address, size)
        block.link(blocks[-1] if blocks else None, None)
        pool.add(block)
        blocks.append(block)
        address += size
    return blocks


def chain(block: Block) -> list[tuple[int, int]]:
    """(address, size) of the blocks from one on, each of which knows the one before it."""
    found = []
    before = block.prev
    current: Block | None = block
    while current is not None:
        assert current.prev is before
        found.append((current.address, current.size))
        before, current = current, current.next
    return found


def test_whole_pages_around_and_within_a_range() -> None:
    """Pages of 100 bytes from 1000 on: 150 bytes at 1050 touch two of them and contain one; 50 contain none."""
    segment = ExpandableSegment(1000, 950, 100)
    assert segment.size == 1000 and ExpandableSegment(0, 1000, 100).size == 1000
    assert segment.enclosing(1050, 150) == (1000, 200)
    assert segment.enclosing(1050, 151) == (1000, 300)
    assert segment.enclosing(1100, 100) == (1100, 100)
    assert segment.enclosed(1050, 150) == (1100, 100)
    assert segment.enclosed(1000, 199) == (1000, 100)
    assert segment.enclosed(1050, 50) == (1100, 0)
    assert segment.enclosed(1010, 50) == (1100, 0)


def test_a_new_block_is_free_and_whole() -> None:
    """It has memory, no neighbours, and neither waits nor is handed out; any of these makes it not free or not whole."""
    pool = Pool(is_small=False)
    block = Block(pool, 3, 1000, 64)
    assert (block.address, block.size, block.stream, block.requested, block.context) == (1000, 64, 3, 0, -1)
    assert block.is_free and block.mapped and not block.is_split and block.used_by is None
    block.waiting = True
    assert not block.is_free
    block.waiting, block.allocated = False, True
    assert not block.is_free
    after = Block(pool, 3, 1064, 64)
    after.link(block, None)
    assert block.is_split and after.is_split and block.next is after and after.prev is block


def test_an_expandable_block_counts_the_unmapped_addresses_behind_it() -> None:
    """64 bytes before 36 without memory: 100; before 36 with memory, or nothing: 64."""
    first, second = row(Pool(is_small=False), 64, 36)
    assert first.expandable_size == 64 and second.expandable_size == 36
    second.mapped = False
    assert first.expandable_size == 100


def test_free_blocks_are_sorted_by_stream_size_and_address() -> None:
    """Whatever the order in which they come."""
    pool = Pool(is_small=True)
    blocks = [Block(pool, s, a, n) for s, a, n in ((1, 10, 5), (0, 90, 7), (0, 50, 7), (0, 70, 3))]
    for block in blocks:
        pool.add(block)
    assert [(b.stream, b.size, b.address) for b in pool.free_blocks()] == [
        (0, 3, 70),
        (0, 7, 50),
        (0, 7, 90),
        (1, 5, 10),
    ]
    pool.remove(blocks[2])
    assert [b.address for b in pool.free_blocks()] == [70, 90, 10] and 50 not in pool.at
    assert pool.free[0] == [(3, 70), (7, 90)]


def test_unmapped_blocks_are_kept_apart_by_address() -> None:
    """They are found by address and are not among the free ones; the age is the pool's count of searches when one came."""
    pool = Pool(is_small=False)
    pool.searches = 4
    free = Block(pool, 0, 30, 5)
    pool.add(free)
    unmapped = [Block(pool, 0, address, 5) for address in (20, 10)]
    for block in unmapped:
        block.mapped = False
        pool.add(block)
    assert pool.unmapped[0] == [10, 20] and pool.free_blocks() == [free] and free.age == 4
    assert {address: b.address for address, b in pool.at.items()} == {10: 10, 20: 20, 30: 30}
    pool.remove(unmapped[1])
    assert pool.unmapped[0] == [20] and 10 not in pool.at and pool.free_blocks() == [free]


def test_merging_with_the_neighbours() -> None:
    """Of three free blocks the middle one takes in the one behind it and then the one before it: one block of all bytes."""
    pool = Pool(is_small=False)
    first, middle, last = row(pool, 10, 20, 30)
    pool.remove(middle)
    pool.merge(middle, middle.next)
    assert chain(first) == [(1000, 10), (1010, 50)] and last.address not in pool.at
    pool.merge(middle, middle.prev)
    assert chain(middle) == [(1000, 60)] and middle.prev is None and middle.next is None
    assert pool.free_blocks() == [] and pool.at == {}


def test_merging_keeps_those_further_away_linked() -> None:
    """In a row of four, the second takes in the third, then the first: the fourth follows it."""
    pool = Pool(is_small=False)
    _, second, _, last = row(pool, 1, 2, 4, 8)
    pool.remove(second)
    pool.merge(second, second.next)
    pool.merge(second, second.prev)
    assert chain(second) == [(1000, 7), (1007, 8)] and last.prev is second


def test_what_is_not_merged() -> None:
    """No neighbour, one that is in use, one that waits for a stream, and one without memory stay as they are."""
    pool = Pool(is_small=False)
    first, second = row(pool, 10, 20)
    pool.remove(first)
    pool.merge(first, first.prev)
    for attribute, value in (("allocated", True), ("waiting", True), ("mapped", False)):
        before = getattr(second, attribute)
        setattr(second, attribute, value)
        pool.merge(first, second)
        setattr(second, attribute, before)
    assert chain(first) == [(1000, 10), (1010, 20)] and pool.free_blocks() == [second]
