"""The global problem of small steps, worked out event by event."""

from __future__ import annotations

from autosac.memory_sim import simulate_memory
from autosac.planning.build_problem import PlanningProblem, UnitStatistics, build_problem
from autosac.solvers import CurveSegment, GlobalUnit
from autosac.trace import Phase, Trace
from traces import TraceBuilder

CURVE = (CurveSegment(1.0, 0.0),)


def statistics(stored_bytes: int, recompute_ms: float = 3.0) -> UnitStatistics:
    """What the estimator would say of a unit."""
    return UnitStatistics(
        stored_bytes=stored_bytes, discardable_bytes=4096 - stored_bytes, recompute_ms=recompute_ms, segments=CURVE
    )


def problem_of(trace: Trace, *regions: int, allowed: bool = True) -> PlanningProblem:
    """The problem with the trace's regions at these positions as candidates, the n-th of them with n * 512 stored bytes."""
    known = {region: statistics(512 * n) for n, region in enumerate(regions)}
    return build_problem(trace, simulate_memory(trace), known, dict.fromkeys(range(len(trace.modules)), allowed))


def operator(b: TraceBuilder, module: str, phase: Phase, *inputs: int, makes: int = 0) -> int:
    """An operator, which allocates `makes` bytes before it runs; the new storage (-1 for none)."""
    b.module, b.phase = module, phase
    made = b.alloc(makes) if makes else -1
    b.op("aten.mm.default", inputs, (made,) if makes else ())
    return made


def one_layer() -> Trace:
    """A layer whose input dies after its forward, another that no backward reaches; by event what is alive after it.

    0: x, 1024. The layer: 1-3 a temporary, 2048 (3072 alive, then 1024); 4-5 a, 2048 (3072); 6-7 c, 2048 (5120); 8-9 its
    output b, 512 (5632). 10: x goes (4608). 11-12 the other layer's d, 512 (5120), gone at 13 (4608). 14: g, 4096 (8704), and
    15 the backward of a. 16: a goes (6656). 17: the backward of c. 18: c goes (4608). 19, 20: b and g go (4096, 0).
    """
    b = TraceBuilder(("", "layers.0", "layers.1"))
    x = b.alloc(1024)
    first = len(b.events)
    t = operator(b, "layers.0", Phase.FORWARD, x, makes=2048)
    b.free(t)
    calls = [b.call("t", first)]
    a = operator(b, "layers.0", Phase.FORWARD, x, makes=2048)
    calls.append(b.call("a", 4, (a,)))
    c = operator(b, "layers.0", Phase.FORWARD, a, makes=2048)
    calls.append(b.call("c", 6, (c,)))
    out = operator(b, "layers.0", Phase.FORWARD, c, makes=512)
    calls.append(b.call("b", 8, (out,)))
    b.region("layers.0", first, (x,), (out,), calls)
    b.free(x)
    first = len(b.events)
    d = operator(b, "layers.1", Phase.FORWARD, out, makes=512)
    b.free(d)
    b.region("layers.1", first, (out,), ())
    g = operator(b, "layers.0", Phase.BACKWARD, a, makes=4096)
    b.free(a)
    operator(b, "layers.0", Phase.BACKWARD, c)
    b.free(c, out, g)
    return b.build()


def test_bytes_of_a_unit() -> None:
    """Autograd holds a and c, 4096 bytes; checkpointing would have to hold x, 1024; what it keeps is the estimator's."""
    assert problem_of(one_layer(), 0).problem.units == (
        GlobalUnit(
            name="layers.0",
            implicit_bytes=4096,
            boundary_bytes=1024,
            stored_bytes=0,
            discardable_bytes=4096,
            recompute_ms=3.0,
            segments=CURVE,
        ),
    )


def test_points_of_a_unit() -> None:
    """One point for each stretch between the forward's end (10), the backward's begin (15) and its end (19), two before it.

    The forward's memory grew, above the 1024 bytes that it found, to 2048 at events 1 and 2, 0 at 3, 2048 at 4 and 5, 4096 at
    6 and 7, 4608 at 8 and 9. What can be kept of later events is 4096 up to event 3, 2048 for 4 and 5. So it takes at most
    6144, 6144, 4096, then 4096 and 4608. The limit of late events is 1.1 * 4608: the first two are early and take 2048 while
    the unit is held, the others 4608 - 4096 beyond what is implicit, and x. During the backward the unit holds x.
    """
    points = problem_of(one_layer(), 0).problem.points
    assert [(p.base_bytes, p.deltas, p.extras) for p in points] == [
        (5632, (), ()),
        (8704, ((0, 1),), ()),
        (8704, (), ((0, 2048),)),
        (8704, ((0, -1),), ((0, 512 + 1024),)),
        (8704, (), ((0, 1024),)),
        (4096, (), ()),
    ]
    assert [p.label for p in points[2:4]] == ["the recomputation of layers.0"] * 2


def test_regions_without_a_backward_or_statistics_are_no_candidates() -> None:
    """The second layer is used by no backward: with statistics for both, and for it alone, it is left out."""
    both, none = problem_of(one_layer(), 0, 1), problem_of(one_layer(), 1)
    assert [unit.name for unit in both.problem.units] == ["layers.0"] and both.modules == (1,)
    assert none.problem.units == () and [p.base_bytes for p in none.problem.points] == [8704]
    assert problem_of(one_layer()).problem.units == ()


def twice_nested() -> Trace:
    """A model that runs twice, two microbatches; it holds a block twice, the second time with more and no dying input.

    Regions: 0 the model, 1 its block, 2 and 3 the same for the second microbatch.
    """
    b = TraceBuilder(("", "model", "model.inner", "model.inner.block"))
    kept = []
    for sizes in ((512, 1024), (1536, 2048)):
        x = b.alloc(512)
        outer = len(b.events)
        model = operator(b, "model", Phase.FORWARD, x, makes=sizes[0])
        inner = len(b.events)
        block = operator(b, "model.inner.block", Phase.FORWARD, model, makes=sizes[1])
        b.region("model.inner.block", inner, (model,), ())
        b.region("model", outer, (x,), ())
        if sizes[0] == 512:
            b.free(x)
        kept.append((model, block))
    for model, block in kept:
        operator(b, "model.inner.block", Phase.BACKWARD, block)
        operator(b, "model", Phase.BACKWARD, model)
        b.free(block, model)
    return b.build()


def test_executions_share_a_unit() -> None:
    """Of two executions that which saves least counts: the smaller implicit bytes, the larger boundary.

    The model comes before what it holds, though its region ends later; the module between them is no candidate, so the block's
    parent is the model itself.
    """
    found = problem_of(twice_nested(), 0, 1, 2, 3, allowed=False)
    assert [(u.name, u.parent, u.executions, u.allowed) for u in found.problem.units] == [
        ("model", -1, 2, False),
        ("model.inner.block", 0, 2, False),
    ]
    assert [(u.implicit_bytes, u.boundary_bytes) for u in found.problem.units] == [(1536, 512), (1024, 0)]
    assert found.modules == (1, 3)
    assert [[span.region for span in spans] for spans in found.executions] == [[1, 3], [0, 2]]


def test_a_backward_that_ends_the_step() -> None:
    """The last event is the end of what the model made: there is no point behind it."""
    points = problem_of(twice_nested(), 1, 3).problem.points
    # The ends of both forwards (the second is also where the first backward begins), of the first backward (x is held to
    # there) and the begins of the backwards, each with two points for the recomputation.
    assert sum(len(point.deltas) for point in points) == 4 and points[-1].extras == ((0, 512),)


def test_statistics_come_from_the_first_execution() -> None:
    """The block's first region is number 0 of the trace, whose stored bytes are 0; the model's is number 1, with 512."""
    units = problem_of(twice_nested(), 0, 1, 2, 3).problem.units
    assert [unit.stored_bytes for unit in units] == [512, 0]
