"""Traces replayed through the allocator: steps, workspaces, verdicts."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from autosac.errors import UsageError
from autosac.memory_sim import AllocatorConfig, Outcome, WorkspaceModel, replay_allocator, simulate_memory
from autosac.trace import Label, Phase, Signature, TensorMeta

MIB = 1 << 20


def growing_step(builder: Any) -> Any:
    """The first step makes 40 MiB of optimizer state; the recorded one frees its gradient."""
    b = builder()
    b.in_prologue, b.phase = True, Phase.SETUP
    weight = b.alloc(20 * MIB, Label.PARAMETER)
    b.step(0)
    b.phase = Phase.FORWARD
    first = b.alloc(60 * MIB)
    b.free(first)
    b.phase = Phase.OPTIMIZER
    b.alloc(40 * MIB, Label.OPTIMIZER_STATE)
    b.in_prologue, b.phase = False, Phase.FORWARD
    b.module = "layers.0"
    activation = b.alloc(60 * MIB, op="aten.mm.default")
    b.op("aten.mm.default", [weight], [activation])
    b.phase = Phase.BACKWARD
    gradient = b.alloc(20 * MIB, Label.GRADIENT, op="aten.mul.Tensor")
    b.free(activation, gradient)
    return b.build()


def test_reserved_settles(builder: Any) -> None:
    """Setup 20, first step 60, whose block is split for the 40 MiB of states; then 60 new, 20 from the rest.

    Everything that the second replay asks for is cached: reserved stays at 140, active peaks at 140.
    """
    report = replay_allocator(growing_step(builder))
    assert (report.steps, report.settled) == (2, True)
    assert (report.reserved_peak_bytes, report.active_peak_bytes) == (140 * MIB, 140 * MIB)
    assert (report.device_allocs, report.device_frees, report.retries) == (3, 0, 0)
    assert report.verdict.outcome is Outcome.FITS
    assert str(report.verdict) == "fits"
    assert report.fragmentation == 0
    steps = [(s, r // MIB) for s, r in zip(report.sample_step, report.reserved_bytes, strict=True)]
    assert steps[:5] == [(-1, 20), (-1, 80), (-1, 80), (-1, 80), (0, 140)]


def test_series_of_the_last_step(builder: Any) -> None:
    """After each of the five events of the step: 120, 120, 140, 80 and 60 MiB are active, 140 reserved."""
    trace = growing_step(builder)
    report = replay_allocator(trace)
    active = report.in_last_step(report.active_bytes, len(trace.events))
    assert (active // MIB).tolist() == [120, 120, 140, 80, 60]
    assert set(report.in_last_step(report.reserved_bytes, len(trace.events)) // MIB) == {140}


def test_out_of_memory_names_the_operator(builder: Any) -> None:
    """On 130 MiB the forward's 60 MiB do not fit beside the 80 reserved, even after a retry."""
    report = replay_allocator(growing_step(builder), capacity_bytes=130 * MIB)
    verdict = report.verdict
    assert (verdict.outcome, verdict.step, verdict.event) == (Outcome.OUT_OF_MEMORY, 0, 0)
    assert (verdict.op, verdict.module, verdict.phase) == ("aten.mm.default", "layers.0", Phase.FORWARD)
    assert (verdict.requested_bytes, verdict.short_by_bytes) == (60 * MIB, 10 * MIB)
    assert str(verdict) == "out of memory at aten.mm.default in layers.0, short by 10 MiB"


def test_context_and_nccl_count(builder: Any) -> None:
    """150 MiB hold the 140 reserved, but not with 15 MiB of context and NCCL; 155 MiB do."""
    trace = growing_step(builder)
    outside = {"context_bytes": 10 * MIB, "nccl_bytes": 5 * MIB}
    assert replay_allocator(trace, capacity_bytes=150 * MIB).verdict.outcome is Outcome.FITS
    assert replay_allocator(trace, capacity_bytes=150 * MIB, **outside).verdict.outcome is Outcome.OUT_OF_MEMORY
    fits = replay_allocator(trace, capacity_bytes=155 * MIB, **outside)
    assert (fits.verdict.outcome, fits.device_bytes_needed) == (Outcome.FITS, 155 * MIB)


def test_fits_after_retry(builder: Any) -> None:
    """Cached 60 MiB of the prologue must go before the step's 80 MiB fit into 100: slow, and where."""
    b = builder()
    b.in_prologue = True
    b.free(b.alloc(60 * MIB))
    b.in_prologue = False
    b.module = "head"
    b.free(b.alloc(80 * MIB, op="aten.log_softmax.int"))
    report = replay_allocator(b.build(), capacity_bytes=100 * MIB)
    assert report.verdict.outcome is Outcome.FITS_AFTER_RETRY
    assert str(report.verdict) == "fits after the allocator's retry at aten.log_softmax.int in head (slow)"
    assert (report.retries, report.retries_last_step, report.settled) == (1, 0, True)


def test_thrashing_does_not_settle(builder: Any) -> None:
    """Two sizes that never fit together release each other in every step, and all steps are replayed."""
    b = builder()
    for stream in (0, 1):
        b.stream = stream
        b.free(b.alloc(60 * MIB))
    report = replay_allocator(b.build(), capacity_bytes=100 * MIB, steps=4)
    assert (report.steps, report.settled, report.retries, report.retries_last_step) == (4, False, 7, 2)


def test_what_a_step_leaves_is_what_the_next_frees(builder: Any) -> None:
    """Gradients freed in a step and made again in it are those of the step before: no growth."""
    b = builder()
    b.in_prologue, b.phase = True, Phase.BACKWARD
    old = b.alloc(30 * MIB, Label.GRADIENT)
    b.in_prologue = False
    activation = b.alloc(50 * MIB)
    b.alloc(30 * MIB, Label.GRADIENT)
    b.free(old, activation)
    report = replay_allocator(b.build(), steps=5)
    assert (report.steps, report.settled, report.reserved_peak_bytes) == (2, True, 110 * MIB)
    assert report.allocated_bytes[-1] == 30 * MIB


def test_a_variable_that_is_bound_again(builder: Any) -> None:
    """A loss that stays alive is freed when the next step binds it again: two at most, one at the end."""
    b = builder()
    b.alloc(12 * MIB)
    report = replay_allocator(b.build(), steps=5)
    assert report.allocated_bytes[-1] == 12 * MIB
    assert report.active_peak_bytes == 24 * MIB


def test_workspaces_take_device_memory(builder: Any) -> None:
    """The first matmul of the prologue brings 32 MiB, that of the backward's thread another 32 MiB, once."""
    b = builder()
    b.in_prologue = True
    b.step(0)
    first = b.alloc(20 * MIB, op="aten.mm.default")
    b.free(first)
    b.in_prologue = False
    b.op("aten.mm.default", [], [])
    b.phase = Phase.BACKWARD
    b.op("aten.mm.default", [], [])
    model = WorkspaceModel(cublas_bytes=32 * MIB, operator_temporaries=False)
    report = replay_allocator(b.build(), workspaces=model)
    assert report.reserved_peak_bytes == 84 * MIB
    assert report.allocated_bytes[-1] == 64 * MIB
    assert replay_allocator(b.build()).reserved_peak_bytes == 20 * MIB


def test_record_stream_in_a_trace(builder: Any) -> None:
    """A buffer used on another stream is active after its free, until the next allocation takes it over."""
    b = builder()
    buffer = b.alloc(20 * MIB)
    b.record_stream(buffer, 1)
    b.free(buffer)
    b.free(b.alloc(20 * MIB))
    report = replay_allocator(b.build())
    assert (report.active_bytes[1], report.allocated_bytes[1]) == (20 * MIB, 0)
    assert report.reserved_peak_bytes == 20 * MIB


def test_allocated_agrees_with_the_timeline(builder: Any) -> None:
    """Where every block is split exactly, the allocator's allocated bytes are those of the timeline."""
    b = builder()
    blocks = [b.alloc(3000 * (i + 1)) for i in range(20)]
    b.free(*blocks[::3])
    trace = b.build()
    report = replay_allocator(trace, steps=1)
    assert np.array_equal(report.allocated_bytes, simulate_memory(trace).live_bytes)


def test_empty_storages_take_nothing(builder: Any) -> None:
    """A tensor without elements has no block."""
    b = builder()
    b.free(b.alloc(0))
    assert replay_allocator(b.build()).reserved_peak_bytes == 0


def test_bad_arguments(builder: Any) -> None:
    """A device that others fill, and no step at all, are errors for the user."""
    trace = growing_step(builder)
    with pytest.raises(UsageError, match="10 are not PyTorch's"):
        replay_allocator(trace, capacity_bytes=10, context_bytes=10)
    with pytest.raises(UsageError, match="at least one step"):
        replay_allocator(trace, steps=0)


def test_expandable_segments_waste_less(builder: Any) -> None:
    """Growing tensors leave holes in segments of their own, which an expandable segment reuses.

    61, then 62 MiB (each rounded to a multiple of 2): 62 + 62; expandable: 80 MiB, four pages of 20.
    """
    b = builder()
    for size in (59, 61, 63):
        b.free(b.alloc(size * MIB))
    trace = b.build()
    expandable = AllocatorConfig.parse("expandable_segments:True")
    assert replay_allocator(trace).reserved_peak_bytes == (60 + 62 + 64) * MIB
    assert replay_allocator(trace, config=expandable).reserved_peak_bytes == 80 * MIB


def test_out_of_memory_inside_an_operator(builder: Any) -> None:
    """index_put with accumulation sorts its 1 Mi indices in three blocks of 8 MiB, beside a destination of 100 MiB.

    The first two share a segment of 20 MiB, the third needs one more: of 130 MiB 10 are left, 10 short. The operator is named.
    """
    b = builder()
    b.module = "head"
    indices = TensorMeta((2**20,), (1,), "int64")
    data = TensorMeta((25 * 2**20,), (1,), "float32")
    values = TensorMeta((2**20,), (1,), "float32")
    put = Signature("aten.index_put_.default", (data, indices, values), (data,), (("accumulate", True),))
    destination = b.alloc(100 * MIB, op="aten.zeros.default")
    b.phase = Phase.BACKWARD
    event = b.op(put, [destination, -1, -1], [destination])
    b.free(destination)
    model = WorkspaceModel(cublas_bytes=0)
    assert model.op_workspace_blocks(put) == (8 * MIB,) * 3
    verdict = replay_allocator(b.build(), workspaces=model, capacity_bytes=130 * MIB).verdict
    assert (verdict.outcome, verdict.step, verdict.event) == (Outcome.OUT_OF_MEMORY, 0, event)
    assert (verdict.op, verdict.module, verdict.phase) == ("aten.index_put_.default", "head", Phase.BACKWARD)
    assert (verdict.requested_bytes, verdict.short_by_bytes) == (8 * MIB, 10 * MIB)
    fits = replay_allocator(b.build(), workspaces=model, capacity_bytes=140 * MIB)
    assert (fits.verdict.outcome, fits.active_peak_bytes) == (Outcome.FITS, 124 * MIB)


def _sums(b: Any, large_first: bool) -> None:
    """Two sums down 8,192 rows of 2,048: of numbers, which takes 128 MiB meanwhile, and of one number again and again, which
    takes 2.25 MiB and beside which 200 MiB are alive.
    """
    row = TensorMeta((1, 2048), (2048, 1), "float32")
    made = []
    for large in (large_first, not large_first):
        data = TensorMeta((8192, 2048), (2048, 1) if large else (0, 0), "float32")
        held = () if large else (b.alloc(200 * MIB),)
        made.append(b.alloc(8192, op="aten.sum.dim_IntList"))
        if not b.in_prologue:
            b.op(Signature("aten.sum.dim_IntList", (data,), (row,), (("dim", (0,)), ("keepdim", True))), (), made[-1:])
        b.free(*held)
    b.free(*made)


@pytest.mark.parametrize("large_first", [False, True])
def test_calls_of_the_prologue_are_told_apart_by_their_order(builder: Any, large_first: bool) -> None:
    """128 MiB are never taken beside 200. A sum of a step that was not whole, beside which 300 MiB live, takes nothing."""
    b = builder()
    b.in_prologue, b.phase = True, Phase.BACKWARD
    large = b.alloc(300 * MIB)
    b.free(b.alloc(8192, op="aten.sum.dim_IntList"), large)
    _sums(b, large_first)
    b.in_prologue = False
    _sums(b, large_first)
    model = WorkspaceModel(cublas_bytes=0)
    report = replay_allocator(b.build(), workspaces=model)
    prologue = report.sample_step == -1
    assert report.active_bytes[prologue].max() == 300 * MIB + 8192
    after = report.active_bytes[prologue][report.sample_event[prologue] > 3]
    assert sorted({n // MIB for n in after.tolist()}) == [0, 128, 200, 202]


def test_out_of_memory_by_a_workspace_of_the_prologue(builder: Any) -> None:
    """The first product of the prologue asks for 20 MiB and then a workspace of 32: with 50 MiB it is 2 MiB short."""
    b = builder()
    b.in_prologue, b.phase, b.module = True, Phase.FORWARD, "layers.0"
    b.alloc(20 * MIB, op="aten.mm.default")
    b.in_prologue = False
    b.alloc(512)
    model = WorkspaceModel(cublas_bytes=32 * MIB, operator_temporaries=False)
    verdict = replay_allocator(b.build(), workspaces=model, capacity_bytes=50 * MIB).verdict
    assert (verdict.outcome, verdict.step, verdict.event) == (Outcome.OUT_OF_MEMORY, -1, 0)
    assert (verdict.op, verdict.module) == ("aten.mm.default (cuBLAS workspace)", "layers.0")
    assert (verdict.requested_bytes, verdict.short_by_bytes) == (32 * MIB, 2 * MIB)
    assert str(verdict) == "out of memory at aten.mm.default (cuBLAS workspace) in layers.0, short by 2 MiB"


def test_workspaces_of_a_product_that_is_first_used_in_a_recomputation(builder: Any) -> None:
    """A recomputed product runs on autograd's thread: a second workspace, which the backward's product then shares."""
    b = builder()
    b.op("aten.mm.default")
    b.phase = Phase.RECOMPUTE
    b.op("aten.mm.default")
    b.phase = Phase.BACKWARD
    b.op("aten.mm.default")
    model = WorkspaceModel(cublas_bytes=32 * MIB, operator_temporaries=False)
    trace = b.build()
    report = replay_allocator(trace, workspaces=model, steps=1)
    assert (report.allocated_bytes // MIB).tolist() == [32, 64]
    assert (simulate_memory(trace, workspaces=model).live_bytes // MIB).tolist() == [32, 64, 64]


CONFIGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "per_process_memory_fraction:0.9",
)


@pytest.mark.parametrize("seed", range(40))
def test_a_device_that_refuses_nothing_decides_nothing(builder: Any, seed: int) -> None:
    """Of random steps, the report for a device that is not asked for more than it has is that for an unlimited one, as a
    replay on that device confirms field by field; with a byte less than what is asked for it is not given.
    """
    chance = random.Random(seed)
    b = builder()
    b.in_prologue, b.phase = True, Phase.SETUP
    live: list[int] = []
    for part in range(3):
        if part:
            b.in_prologue, b.phase = part == 1, Phase.FORWARD
        if part == 1:
            b.step(0)
        for _ in range(25):
            if live and chance.random() < 0.45:
                b.free(live.pop(chance.randrange(len(live))))
            else:
                nbytes = chance.choice([300, 70_000, 3 * MIB, 9 * MIB, 30 * MIB, 90 * MIB]) + 512 * chance.randrange(99)
                b.stream = chance.choice([0, 0, 1])
                live.append(b.alloc(nbytes))
    trace = b.build()
    config = AllocatorConfig.parse(CONFIGS[seed % len(CONFIGS)])
    unlimited = replay_allocator(trace, config=config)
    outside = 100 * MIB
    least = max(unlimited.asked_bytes + outside, math.ceil(unlimited.asked_bytes / config.memory_fraction), 160 * MIB)
    for capacity in (least, least + MIB, 2 * least):
        derived = unlimited.on_device(capacity, outside - 5, 5)
        assert derived is not None
        replayed = replay_allocator(
            trace, config=config, capacity_bytes=capacity, context_bytes=outside - 5, nccl_bytes=5
        )
        for field in fields(derived):
            assert np.array_equal(getattr(derived, field.name), getattr(replayed, field.name)), field.name
    short = min(unlimited.asked_bytes + outside, math.ceil(unlimited.asked_bytes / config.memory_fraction)) - 1
    assert unlimited.on_device(short, outside) is None
    assert unlimited.on_device(outside, outside) is None
