"""What lies idle when memory is reserved, worked out block by block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autosac.memory_sim import Cause, WorkspaceModel, idle_memory, replay_allocator
from autosac.memory_sim.idle import IdleMemory, Remnant, cut_out
from autosac.planning.idle_notes import fitting_hint, idle_notes, reserved_notes
from autosac.planning.planner import Goal
from autosac.report.idle_tables import remedy
from autosac.simulation import TITAN_ALLOCATOR, Target, simulation_of
from autosac.trace import Collective, Phase, Signature, TensorMeta, Trace

MIB = 1 << 20


def idle_of(trace: Trace) -> IdleMemory:
    """Under the allocator's default settings."""
    report = replay_allocator(trace)
    return idle_memory(trace, report.reserved_peak_bytes, report.active_peak_bytes)


def holey_step(builder: Any) -> Any:
    """A hole of 40 MiB between two tensors that live, 20 MiB cached for another stream, then a request of 60 MiB."""
    b = builder()
    b.stream = 2
    gathered = b.alloc(20 * MIB, op="aten.empty.memory_format")
    b.free(gathered)
    b.stream, b.module = 0, "layers.0"
    block = b.alloc(100 * MIB, op="aten.mm.default")
    b.free(block)
    before = b.alloc(30 * MIB, op="aten.add.Tensor")
    middle = b.alloc(40 * MIB, op="aten.silu.default")
    behind = b.alloc(30 * MIB, op="aten.mul.Tensor")
    b.free(middle)
    b.phase = Phase.BACKWARD
    last = b.alloc(60 * MIB, op="aten.bmm.default")
    b.free(last, before, behind)
    return b


def test_holes_and_other_streams(builder: Any) -> None:
    """180 MiB are reserved by the request for 60: the hole of 40 is too small for it, the 20 are another stream's."""
    b = holey_step(builder)
    idle = idle_of(b.build())
    assert (idle.reserved_bytes, idle.active_bytes, idle.active_peak_bytes) == (180 * MIB, 120 * MIB, 120 * MIB)
    assert idle.idle_bytes == idle.reserved_bytes - idle.active_bytes == 60 * MIB
    assert (idle.request.op, idle.request.module, idle.request.requested_bytes) == (
        "aten.bmm.default",
        "layers.0",
        60 * MIB,
    )
    hole, other = idle.parts
    assert (hole.cause, hole.stream, hole.nbytes, hole.blocks) == (Cause.HOLE, "compute", 40 * MIB, 1)
    assert [(r.nbytes, r.op, r.module) for r in hole.remnants] == [(40 * MIB, "aten.silu.default", "layers.0")]
    assert (other.cause, other.nbytes) == (Cause.OTHER_STREAM, 20 * MIB)
    assert [r.op for r in other.remnants] == ["aten.empty.memory_format"]
    assert idle_notes(idle) == [
        "60.0 MiB of the reserved memory is free but cannot be used: 40.0 MiB in pieces too small for the request, "
        "20.0 MiB cached for another stream"
    ]


def test_small_segments_are_not_what_decides(builder: Any) -> None:
    """The last 2 MiB that the step reserves are for a number, when all else is free: the 60 MiB before them are told of."""
    b = holey_step(builder)
    b.free(b.alloc(512, op="aten.sum.default"))
    trace = b.build()
    assert replay_allocator(trace).reserved_peak_bytes == 182 * MIB
    idle = idle_of(trace)
    assert (idle.reserved_bytes, idle.active_bytes, idle.idle_bytes) == (180 * MIB, 120 * MIB, 60 * MIB)
    assert idle.request.op == "aten.bmm.default"


def test_a_stream_is_named_by_its_collectives(builder: Any) -> None:
    """Who reads of a pool has to know whose it is, and what would give it back."""
    b = holey_step(builder)
    for kind in ("reduce_scatter", "all_gather"):
        b.add(Collective(kind, 4 * MIB, 0, 2, False, -1, -1, -1, 0, 0, Phase.FORWARD, -1, (0,), (-1,)))
    found = idle_of(b.build())
    assert found.parts[1].stream == "reduce_scatter and all_gather"
    assert "FSDP units" in remedy(found.parts[1]) and "equal modules" in remedy(found.parts[0])


def test_an_operators_temporaries_are_named(builder: Any) -> None:
    """The backward of attention (the second event) has 40 MiB of its own for its queries' gradient, in float32: 4 sequences of
    2,560 queries in 16 heads of 64 numbers. A request of 60 MiB finds them free, and of no use.
    """
    shape, strides = (4, 16, 2560, 64), (16 * 2560 * 64, 64, 16 * 64, 1)
    tensors = (TensorMeta(shape, strides, "bfloat16"),) * 5
    b = builder()
    b.phase, b.module = Phase.BACKWARD, "layers.0.attention"
    saved = b.alloc(20 * MIB)
    b.op(Signature("aten._scaled_dot_product_flash_attention_backward.default", tensors, ()))
    b.free(b.alloc(60 * MIB), saved)
    trace, workspaces = b.build(), WorkspaceModel.for_gpu((9, 0), 132)
    report = replay_allocator(trace, workspaces=workspaces)
    idle = idle_memory(trace, report.reserved_peak_bytes, report.active_peak_bytes, workspaces=workspaces)
    (remnant,) = (r for part in idle.parts for r in part.remnants if r.nbytes >= MIB)
    assert remnant == Remnant(
        nbytes=40 * MIB,
        op="aten._scaled_dot_product_flash_attention_backward.default (temporary)",
        module="layers.0.attention",
        phase=Phase.BACKWARD,
    )


def test_small_tensors_have_a_pool_of_their_own(builder: Any) -> None:
    """A freed KiB leaves a segment of 2 MiB that no large request can use; 512 B of 513 are rounding."""
    b = builder()
    kib = b.alloc(1024)
    b.free(kib)
    b.free(b.alloc(4 * MIB + 1))
    idle = idle_of(b.build())
    assert [(part.cause, part.is_small, part.nbytes) for part in idle.parts if part.is_small] == [
        (Cause.OTHER_POOL, True, 2 * MIB)
    ]
    assert idle.rounding_bytes == 511
    assert "nothing" in remedy(next(part for part in idle.parts if part.is_small))


def test_later_tensors_hide_earlier_ones(builder: Any) -> None:
    """Each byte belongs to the last tensor that held it: of the first 50 MiB, 30 were held by another one since."""
    b = builder()
    first = b.alloc(50 * MIB, op="aten.first.default")
    b.free(first)
    second = b.alloc(30 * MIB, op="aten.second.default")
    b.free(second)
    b.free(b.alloc(80 * MIB, op="aten.third.default"))
    (part,) = idle_of(b.build()).parts
    assert [(r.nbytes // MIB, r.op) for r in part.remnants] == [(30, "aten.second.default"), (20, "aten.first.default")]


def test_memory_that_is_used_at_another_moment_is_not_idle(builder: Any) -> None:
    """One stream's 100 MiB are free when another needs 30 (or 2): 130 MiB are reserved, and 100 are active at most."""
    notes = {}
    for mib in (30, 2):
        b = builder()
        b.free(b.alloc(100 * MIB))
        b.stream = 2
        b.free(b.alloc(mib * MIB))
        notes[mib] = idle_notes(idle_of(b.build()))
    assert notes[30] == [
        "30.0 MiB more is reserved than is ever active: when the last of it was reserved, free memory could not be used, "
        "100.0 MiB cached for another stream"
    ]
    (note,) = notes[2]
    assert note.startswith("20.0 MiB more")  # a segment for requests of up to 10 MiB has 20


def test_nothing_idle_is_not_worth_a_line(builder: Any) -> None:
    """Where everything that is reserved is used there are no parts, and no note."""
    b = builder()
    b.free(b.alloc(40 * MIB))
    idle = idle_of(b.build())
    assert idle.parts == () and idle_notes(idle) == []


def test_cutting_ranges() -> None:
    """What a freed tensor takes of ranges that nobody has claimed yet, and what is left."""
    assert cut_out([(0, 10), (20, 30)], 5, 25) == (10, [(0, 5), (25, 30)])
    assert cut_out([(0, 10)], 2, 4) == (2, [(0, 2), (4, 10)])
    assert cut_out([(0, 10)], 10, 20) == (0, [(0, 10)])


def test_expandable_segments_are_named_where_they_would_help(builder: Any) -> None:
    """Two freed tensors of 30 MiB are no room for one of 60: 120 MiB are reserved. Expandable segments join them. Where they
    are on already, or another stream's memory is what cannot be used, nothing is said of them.
    """
    b = builder()
    b.free(b.alloc(30 * MIB), b.alloc(30 * MIB))
    b.free(b.alloc(60 * MIB))
    trace = b.build()
    off, on = (simulation_of(trace, Target.of("h100-sxm-80gb", 1, allocator=text)) for text in ("", TITAN_ALLOCATOR))
    assert (off.peak_reserved_bytes, on.peak_reserved_bytes) == (120 * MIB, 60 * MIB)
    idle, better = reserved_notes(off)
    assert idle.startswith("60.0 MiB")
    assert better == (
        "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True the same plan would reserve 60.0 MiB; set that and plan again"
    )
    assert reserved_notes(on) == []
    enough, less = (Goal(budget_bytes=mib * MIB) for mib in (60, 59))
    assert fitting_hint(off, enough) == (
        "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it would fit: 60.0 MiB would be reserved",
    )
    assert fitting_hint(off, less) == fitting_hint(on, enough) == ()
    assert fitting_hint(off, replace(enough, budget_kind="active")) == ()
    b = builder()
    b.free(b.alloc(100 * MIB))
    b.stream = 2
    b.free(b.alloc(30 * MIB))
    (idle,) = reserved_notes(simulation_of(b.build(), Target.of("h100-sxm-80gb", 1, allocator="")))
    assert "cached for another stream" in idle
