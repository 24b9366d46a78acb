"""The caching allocator: sequences worked out by hand from PyTorch's rules, invariants of random ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import UsageError
from autosac.memory_sim.allocator import CachingAllocator, OutOfMemoryError
from autosac.memory_sim.allocator_blocks import Block
from autosac.memory_sim.allocator_config import AllocatorConfig

KIB, MIB = 1 << 10, 1 << 20


def allocator(config: str = "", device_mib: int | None = None) -> CachingAllocator:
    """An allocator for a device of so many MiB."""
    device_bytes = None if device_mib is None else device_mib * MIB
    return CachingAllocator(AllocatorConfig.parse(config), device_bytes)


def reserved_mib(a: CachingAllocator) -> float:
    """Reserved memory in MiB."""
    return a.reserved_bytes / MIB


@pytest.mark.parametrize(
    ("nbytes", "segment_mib"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (31 * MIB, 32),
    ],
)
def test_segment_sizes(nbytes: int, segment_mib: int) -> None:
    """2 MiB for up to 1 MiB, 20 MiB below 10 MiB, else the next multiple of 2 MiB."""
    a = allocator()
    a.malloc(nbytes)
    assert reserved_mib(a) == segment_mib


def test_small_requests_share_a_segment() -> None:
    """Four times 512 KiB fill 2 MiB; the next byte needs a second segment, and takes 512 bytes of it."""
    a = allocator()
    blocks = [a.malloc(512 * KIB) for _ in range(4)]
    assert reserved_mib(a) == 2
    assert [b.address - blocks[0].address for b in blocks] == [0, 512 * KIB, MIB, 1536 * KIB]
    assert a.malloc(1).size == 512
    assert reserved_mib(a) == 4
    assert a.active_bytes == 2 * MIB + 512


def test_large_block_is_split_only_above_one_mebibyte() -> None:
    """Of a free 20-MiB block, 19 MiB take the whole (1 MiB would remain), 18 MiB leave 2 MiB for others."""
    a = allocator()
    a.free(a.malloc(20 * MIB))
    whole = a.malloc(19 * MIB)
    assert (whole.size, a.active_bytes) == (20 * MIB, 20 * MIB)
    a.free(whole)
    assert a.malloc(18 * MIB).size == 18 * MIB
    assert a.malloc(2 * MIB).size == 2 * MIB
    assert reserved_mib(a) == 20


def test_best_fit_is_the_smallest_then_the_lowest() -> None:
    """Of free blocks of 12, 14 and 12 MiB, a request of 11 MiB takes the first of the two smallest."""
    a = allocator()
    blocks = [a.malloc(size * MIB) for size in (12, 14, 12)]
    addresses = [b.address for b in blocks]
    for block in reversed(blocks):
        a.free(block)
    assert a.malloc(11 * MIB).address == addresses[0]
    assert a.malloc(11 * MIB).address == addresses[2]
    assert a.malloc(11 * MIB).address == addresses[1]


def test_neighbours_merge_when_freed() -> None:
    """Three blocks of 6 MiB in a 20-MiB segment become one again in whatever order they are freed."""
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        a = allocator()
        blocks = [a.malloc(6 * MIB) for _ in range(3)]
        base = blocks[0].address
        for i in order:
            a.free(blocks[i])
        assert (a.malloc(20 * MIB).address, reserved_mib(a)) == (base, 20)
        assert a.large.free_blocks() == []


def test_streams_do_not_share_free_blocks() -> None:
    """A block freed on stream 0 does not serve stream 1, but it does serve stream 0."""
    a = allocator()
    a.free(a.malloc(20 * MIB, stream=0))
    a.malloc(20 * MIB, stream=1)
    assert reserved_mib(a) == 40
    a.malloc(20 * MIB, stream=0)
    assert reserved_mib(a) == 40


def test_record_stream_defers_the_free_to_the_next_allocation() -> None:
    """A block used on another stream stays active when freed; the next allocation finds it free."""
    a = allocator()
    block = a.malloc(20 * MIB)
    a.record_stream(block, 1)
    a.free(block)
    assert (a.allocated_bytes, a.active_bytes) == (0, 20 * MIB)
    assert a.malloc(20 * MIB).address == block.address
    assert (a.active_bytes, reserved_mib(a)) == (20 * MIB, 20)


def test_record_stream_of_the_own_stream_changes_nothing() -> None:
    """Uses on the stream of the allocation need no event."""
    a = allocator()
    block = a.malloc(20 * MIB)
    a.record_stream(block, 0)
    a.free(block)
    assert a.active_bytes == 0


def test_waiting_block_is_not_merged() -> None:
    """While the middle of three blocks waits for a stream, freeing its neighbours leaves two free blocks."""
    a = allocator()
    blocks = [a.malloc(6 * MIB) for _ in range(3)]
    a.record_stream(blocks[1], 1)
    for i in (1, 0, 2):
        a.free(blocks[i])
    assert [b.size // MIB for b in a.large.free_blocks()] == [6, 8]
    a.process_events()
    assert [b.size // MIB for b in a.large.free_blocks()] == [20]


def test_retry_releases_the_cache_before_it_fails() -> None:
    """On 100 MiB: a cached 60 MiB is released for 80 MiB (a retry); 22 MiB more are 2 MiB too many."""
    a = allocator(device_mib=100)
    a.free(a.malloc(60 * MIB))
    a.malloc(80 * MIB)
    assert (a.retries, reserved_mib(a), a.device_allocs, a.device_frees) == (1, 80, 2, 1)
    with pytest.raises(OutOfMemoryError) as e:
        a.malloc(22 * MIB)
    assert (e.value.short_by_bytes, e.value.requested_bytes) == (2 * MIB, 22 * MIB)


def test_split_segments_are_not_released() -> None:
    """A cached rest of a 20-MiB segment that holds one live block cannot be given back."""
    a = allocator(device_mib=40)
    a.malloc(2 * MIB)
    with pytest.raises(OutOfMemoryError) as e:
        a.malloc(24 * MIB)
    assert e.value.short_by_bytes == 4 * MIB


def test_memory_outside_counts() -> None:
    """Of 100 MiB, 30 MiB held by others leave 70 MiB."""
    a = CachingAllocator(AllocatorConfig(), 100 * MIB, 30 * MIB)
    a.malloc(70 * MIB)
    with pytest.raises(OutOfMemoryError):
        a.malloc(1)


def test_memory_fraction() -> None:
    """per_process_memory_fraction:0.5 of 100 MiB allows 50 MiB."""
    a = allocator("per_process_memory_fraction:0.5", device_mib=100)
    a.malloc(50 * MIB)
    with pytest.raises(OutOfMemoryError) as e:
        a.malloc(10 * MIB)
    assert e.value.short_by_bytes == 10 * MIB


def test_max_split_size() -> None:
    """A block of 130 MiB serves neither 50 nor 110 MiB (20 MiB less), but 111 MiB, and is not split."""
    a = allocator("max_split_size_mb:100")
    big = a.malloc(130 * MIB)
    a.free(big)
    a.malloc(50 * MIB)
    assert reserved_mib(a) == 180
    a.malloc(110 * MIB)
    assert reserved_mib(a) == 290
    near = a.malloc(111 * MIB)
    assert (near.address, near.size, reserved_mib(a)) == (big.address, 130 * MIB, 290)


def test_oversize_blocks_are_released_first() -> None:
    """A cached oversize block of 150 MiB makes room for 120 MiB, and the 50 MiB stay cached: no retry."""
    a = allocator("max_split_size_mb:100", device_mib=300)
    small, oversize = a.malloc(50 * MIB), a.malloc(150 * MIB)
    a.free(small)
    a.free(oversize)
    a.malloc(120 * MIB)
    assert (a.retries, a.device_frees, reserved_mib(a)) == (0, 1, 170)


def test_oversize_blocks_may_not_suffice() -> None:
    """For 200 MiB, releasing the oversize 150 MiB is too little: all that is cached goes, in a retry."""
    a = allocator("max_split_size_mb:100", device_mib=240)
    small, oversize = a.malloc(50 * MIB), a.malloc(150 * MIB)
    a.free(small)
    a.free(oversize)
    a.malloc(200 * MIB)
    assert (a.retries, a.device_frees, reserved_mib(a)) == (1, 2, 200)


def test_garbage_collection_releases_the_oldest() -> None:
    """With 136 of 200 MiB reserved and a threshold of half, the older 40 MiB go.

    Ages at the fourth search are 2 (freed after the second) and 1; those at least as old as the mean, 1.5, go
    until 36 MiB are reclaimed. Then 60 MiB are new: 136 - 40 + 60.
    """
    a = allocator("garbage_collection_threshold:0.5", device_mib=200)
    old, young = a.malloc(40 * MIB), a.malloc(50 * MIB)
    a.free(old)
    a.malloc(46 * MIB)
    a.free(young)
    a.malloc(60 * MIB)
    assert (a.device_frees, reserved_mib(a)) == (1, 156)
    assert [b.size // MIB for b in a.large.free_blocks()] == [50]


def test_expandable_segment_grows_in_place() -> None:
    """25 MiB map two pages of 20 MiB; 20 MiB more need one more page: 45 of 60 MiB, one after the other."""
    a = allocator("expandable_segments:True")
    first = a.malloc(25 * MIB)
    assert reserved_mib(a) == 40
    second = a.malloc(20 * MIB)
    assert (second.address - first.address, reserved_mib(a)) == (25 * MIB, 60)
    a.free(first)
    third = a.malloc(26 * MIB)
    assert (third.address - first.address, reserved_mib(a)) == (45 * MIB, 80)


def test_expandable_segments_split_to_512_bytes() -> None:
    """With expandable segments a large block is split even if less than 1 MiB remains."""
    a = allocator("expandable_segments:True")
    a.free(a.malloc(20 * MIB))
    assert a.malloc(19 * MIB + 512 * KIB).size == 19 * MIB + 512 * KIB


def test_expandable_pages_are_unmapped_on_retry() -> None:
    """On 80 MiB, the 40 of 60 cached MiB without a live block are unmapped for another stream.

    Then 16 MiB lack one page: 15 MiB are free in the page that stayed, but 1 MiB more needs 20 MiB.
    """
    a = allocator("expandable_segments:True", device_mib=80)
    live, cached = a.malloc(5 * MIB), a.malloc(50 * MIB)
    a.free(cached)
    a.malloc(60 * MIB, stream=1)
    assert (a.retries, reserved_mib(a)) == (1, 80)
    assert live.allocated
    with pytest.raises(OutOfMemoryError) as e:
        a.malloc(16 * MIB)
    assert e.value.short_by_bytes == 20 * MIB


def test_small_expandable_pages() -> None:
    """Small requests map pages of 2 MiB."""
    a = allocator("expandable_segments:True")
    a.malloc(MIB)
    assert reserved_mib(a) == 2
    a.malloc(MIB)
    a.malloc(1)
    assert reserved_mib(a) == 4


def test_roundup_power2_divisions() -> None:
    """With 4 divisions, 1200 MiB lie between 1024 and 1280 MiB; sizes with 0 divisions go to 512 bytes."""
    config = AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert config.round_size(1200 * MIB) == 1280 * MIB
    assert config.round_size(1024 * MIB) == 1024 * MIB
    assert config.round_size(513 * MIB) == 768 * MIB
    assert config.round_size(300 * MIB + 1) == 300 * MIB + 512
    assert config.round_size(2049 * MIB) == 2304 * MIB
    assert AllocatorConfig.parse("roundup_power2_divisions:4").round_size(1200) == 1536
    assert AllocatorConfig.parse("roundup_power2_divisions:4").round_size(3000 * KIB) == 3072 * KIB
    upto = AllocatorConfig.parse("roundup_power2_divisions:[64:8]").roundup_power2_divisions
    assert upto == (8,) * 7 + (0,) * 9


def test_parse_of_everything() -> None:
    """All settings that change device memory arrive, with whitespace and a trailing comma."""
    config = AllocatorConfig.parse(
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,backend:native,"
        "max_non_split_rounding_mb:64,large_segment_size_mb:32,per_process_memory_fraction:0.9,"
        "pinned_use_background_threads:True,"
    )
    assert config == AllocatorConfig(
        expandable_segments=True,
        max_split_bytes=128 * MIB,
        garbage_collection_threshold=0.8,
        max_non_split_rounding_bytes=64 * MIB,
        large_segment_bytes=32 * MIB,
        memory_fraction=0.9,
    )
    assert AllocatorConfig.parse("") == AllocatorConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:10", "max_split_size_mb must be at least 20"),
        ("max_split_size_mb:abc", "max_split_size_mb must be a whole number of at most nine digits, not 'abc'"),
        ("max_split_size_mb", "max_split_size_mb has no value"),
        ("large_segment_size_mb:200,max_split_size_mb:100", "max_split_size_mb must be at least 200"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be above 10"),
        ("expandable_segments:true", "expandable_segments must be True or False, not 'true'"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold must be between 0 and 1"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold must be between 0 and 1"),
        ("garbage_collection_threshold:x", "garbage_collection_threshold must be a number"),
        ("per_process_memory_fraction:0", "per_process_memory_fraction must be between 0 and 1"),
        ("roundup_power2_divisions:3", "3 divisions is not a power of two"),
        ("roundup_power2_divisions:[300:1]", "the boundary 300 is not a power of two"),
        ("roundup_power2_divisions:[256:1,512:2", "is not closed"),
        ("roundup_power2_divisions:[256]", "'256' is not of the form"),
        ("backend:cudaMallocAsync", "backend 'cudaMallocAsync' is not modelled"),
        ("foo:1", "unknown option 'foo'; known are backend, "),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    """What PyTorch refuses is refused, saying what is wrong."""
    with pytest.raises(UsageError, match=r"^PYTORCH_CUDA_ALLOC_CONF: ") as e:
        AllocatorConfig.parse(text)
    assert message in str(e.value)


CONFIGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "garbage_collection_threshold:0.3,roundup_power2_divisions:4",
)


def actions() -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Sequences of (what, size, stream): what is 0 to 5 for an allocation, else the free of a live block."""
    sizes = st.one_of(st.integers(1, 3000), st.integers(1, 3 * MIB), st.integers(MIB, 90 * MIB))
    return st.lists(st.tuples(st.integers(0, 9), sizes, st.integers(0, 1)), max_size=60)


def play(a: CachingAllocator, sequence: list[tuple[int, int, int]]) -> tuple[list[Block], list[int]]:
    """Play a sequence, checking the invariants after each action; the live blocks and all addresses given."""
    live: list[Block] = []
    addresses = []
    for what, size, stream in sequence:
        if what < 6 or not live:
            try:
                live.append(a.malloc(size, stream))
            except OutOfMemoryError:
                continue
            addresses.append(live[-1].address)
            if what == 0:
                a.record_stream(live[-1], 1 - stream)
        else:
            a.free(live.pop(size % len(live)))
        check(a, live)
    return live, addresses


def check(a: CachingAllocator, live: list[Block]) -> None:
    """No two blocks overlap, everything reserved is accounted for, and nothing is counted twice."""
    waiting = a.pending
    free = [*a.small.free_blocks(), *a.large.free_blocks()]
    ranges = sorted((b.address, b.address + b.size) for b in [*live, *waiting, *free])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert sum(b.size for b in live) == a.allocated_bytes
    assert sum(b.size for b in [*live, *waiting]) == a.active_bytes
    assert sum(end - begin for begin, end in ranges) == a.reserved_bytes
    assert all(b.size >= b.requested for b in live)
    assert not any(b.next and b.next.is_free and b.next.mapped for b in free), "free neighbours have merged"


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(CONFIGS), st.sampled_from([None, 200]), actions())
def test_invariants(config: str, device_mib: int | None, sequence: list[tuple[int, int, int]]) -> None:
    """No overlap, exact accounts, the same addresses again, and nothing left at the end."""
    a = allocator(config, device_mib)
    live, addresses = play(a, sequence)
    assert play(allocator(config, device_mib), sequence)[1] == addresses
    if device_mib is not None:
        assert a.reserved_bytes <= device_mib * MIB
    for block in live:
        a.free(block)
    a.empty_cache()
    assert (a.active_bytes, a.allocated_bytes, a.reserved_bytes) == (0, 0, 0)


@settings(deadline=None, max_examples=30)
@given(actions())
def test_capacity_just_enough_fits(sequence: list[tuple[int, int, int]]) -> None:
    """A device as large as the reserved peak of an endless one serves a sequence alike, without a retry."""
    endless = allocator()
    peak, addresses = 0, []
    live: list[Block] = []
    for what, size, stream in sequence:
        if what < 6 or not live:
            live.append(endless.malloc(size, stream))
            addresses.append(live[-1].address)
        else:
            endless.free(live.pop(size % len(live)))
        peak = max(peak, endless.reserved_bytes)
    exact = CachingAllocator(AllocatorConfig(), max(peak, 1))
    plain = [(max(what, 1) if what < 6 else what, size, stream) for what, size, stream in sequence]
    assert play(exact, plain)[1] == addresses
    assert exact.retries == 0
