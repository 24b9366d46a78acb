"""Page faults and cache misses of a CPU, worked out by hand; execution in one queue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.estimator.calibration.host_memory import Heap, HostMemory, fresh_bytes, reuse_extra_ms
from autosac.runtime_sim import HostModel, serial_costs
from autosac.trace import Alloc, Event, Free, Label, Op, Phase, Signature, Storage, TensorMeta, Trace
from traces import trace_of

MIB = 2**20


def trace(sizes: Sequence[int], events: Sequence[Event], signatures: Sequence[Signature] = ()) -> Trace:
    """A trace with storages of these sizes; operators have signature 0 by default, a float vector in and one out."""
    meta = TensorMeta((max(sizes, default=1) // 4,), (1,), "float32", "device")
    return trace_of(
        events,
        signatures=tuple(signatures) or (Signature("aten.relu.default", (meta,), (meta,)),),
        storages=(Storage(size, 0, Label.NONE, Phase.FORWARD, 0, 0, "") for size in sizes),
    )


def run(inputs: tuple[int, ...], outputs: tuple[int, ...], signature: int = 0) -> Op:
    """An operator on these storages."""
    return Op(signature, 0, 0, Phase.FORWARD, 0, inputs, outputs)


def test_memory_that_was_used_before_is_not_fresh() -> None:
    """The first chunk touches new pages, the next one of that size in its place does not."""
    heap = Heap()
    first, fresh = heap.malloc(1000)
    heap.malloc(1000)
    assert fresh == 1088  # 1000 and the overhead, rounded to 16
    heap.free(first)
    assert heap.malloc(1000) == (first, 0)


def test_large_requests_are_mapped_until_the_threshold_has_learned() -> None:
    """1 MiB is mapped by itself at first; after it was freed once, it comes from the heap. 64 MiB always are."""
    heap = Heap()
    address, fresh = heap.malloc(MIB)
    assert address < 0 and fresh >= MIB
    heap.free(address)
    assert heap.malloc(MIB)[0] >= 0
    for _ in range(2):
        address, fresh = heap.malloc(64 * MIB)
        assert address < 0 and fresh >= 64 * MIB
        heap.free(address)


@pytest.mark.parametrize(
    ("freed", "asked", "from_heap"),
    [(65520, 132000, True), (65536, 132000, False), (65536, 131072, True), (65536, 131088, False)],
)
def test_the_heap_is_trimmed_to_its_pad(freed: int, asked: int, from_heap: bool) -> None:
    """Chunks (each with 80 bytes of overhead) of 70000, `freed` and 80000 bytes leave at least 132624 on top of the heap.

    Freeing 64 KiB or more cuts that to 128 KiB. What then does not fit there is mapped by itself.
    """
    heap = Heap()
    chunks = [heap.malloc(size - 80)[0] for size in (70000, freed, 80000)]
    heap.free(chunks[1])
    assert (heap.malloc(asked - 80)[0] >= 0) is from_heap


def test_half_of_a_large_top_goes_back_to_the_system() -> None:
    """A heap that knows chunks of 4 MiB (and a page) is trimmed whenever twice that is free on its top: half of it stays. The
    last time 8 MiB and eight pages were free.
    """
    heap = Heap()
    mapped, _ = heap.malloc(4 * MIB)
    heap.free(mapped)  # from now on 4 MiB come from the heap
    chunks = [heap.malloc(4 * MIB - 80)[0] for _ in range(4)]
    for chunk in reversed(chunks):
        heap.free(chunk)
    assert heap.malloc(2 * MIB - 80) == (0, 0)
    assert heap.malloc(4 * MIB - 80) == (2 * MIB, 6 * MIB - (4 * MIB + 4 * 4096))


def test_neighbours_join() -> None:
    """Two freed neighbours serve a request that neither could."""
    heap = Heap()
    a, _ = heap.malloc(1000)
    b, _ = heap.malloc(1000)
    heap.malloc(1000)
    heap.free(a)
    heap.free(b)
    assert heap.malloc(2000) == (a, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), max_size=60))
@settings(deadline=None, max_examples=60)
def test_chunks_never_overlap(actions: list[tuple[bool, int]]) -> None:
    """Whatever is asked for, chunks in use do not overlap and fresh bytes never exceed the chunk."""
    heap, used = Heap(), []
    for keep, nbytes in actions:
        if not keep and used:
            heap.free(used.pop(nbytes % len(used))[0])
            continue
        address, fresh = heap.malloc(nbytes)
        assert 0 <= fresh <= nbytes + 8192
        if address >= 0:
            assert all(address + nbytes <= a or a + n <= address for a, n in used if a >= 0)
        used.append((address, nbytes))


def test_the_first_operator_on_new_pages_pays_for_them() -> None:
    """Memory of 64 MiB is mapped anew in every step and charged to the operator that first touches it."""
    size = 64 * MIB
    fresh = fresh_bytes(trace([size], [Alloc(0), run((), (0,)), run((0,), ()), Free(0)]))
    assert fresh[1] >= size and fresh.sum() == fresh[1]


def test_a_step_without_allocations_has_no_faults() -> None:
    """What was there before the step is resident."""
    assert fresh_bytes(trace([MIB], [run((0,), (0,))])).tolist() == [0.0]


def test_operands_that_left_the_cache_cost_more() -> None:
    """A's second use comes after B of 4 MiB: it pays the difference of the rates, times its bytes."""
    memory = HostMemory(fault_ns_per_byte=0.0, reuse_bytes=(MIB, 8 * MIB), read_ns_per_byte=(0.1, 0.1 + 0.3))
    events = [run((0,), ()), run((1,), ()), run((0,), ())]
    extra = reuse_extra_ms(trace([MIB, 4 * MIB], events), memory)
    per_doubling = 0.1  # ns a byte: three doublings from 1 to 8 MiB
    assert extra[0] == pytest.approx(0.0)  # in the steady state it was the last to be used
    assert extra[2] == pytest.approx(MIB * per_doubling * np.log2(5) * 1e-6)
    assert extra[1] == pytest.approx(4 * MIB * per_doubling * (np.log2(5) - 2) * 1e-6)


def test_host_and_device_are_one_queue() -> None:
    """Every operator takes its own time and what the host paid since the last; the sum is kept."""
    view = Signature("aten.view.default", (), (), is_view=True)
    plain = Signature("aten.relu.default", (), ())
    t = trace([4], [run((), (), 1), run((), (), 0), run((), (), 0), run((), (), 1)], [plain, view])
    times = serial_costs(t, np.array([0.0, 1.0, 2.0, 0.0]), HostModel(eager_op_us=10.0, view_op_us=2.0))
    assert times == pytest.approx([0.0, 1.012, 2.012, 0.0])
