"""Where a step's time goes, its critical path, and its throughput; by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.runtime_sim import INSTANT_HOST, ConstantOverlap
from autosac.trace import Group, Parallelism, Phase


def parts(breakdown):
    """The five parts that add up to the step."""
    return (
        breakdown.compute_ms
        + breakdown.exposed_communication_ms
        + breakdown.exposed_copy_ms
        + breakdown.bubble_ms
        + breakdown.host_bound_ms
    )


def test_every_part(job, run):
    """0.5 launch; copy to 1.5; gather 1.5 to 5.5 beside compute 1.5 to 3.5 (2 hidden, 2 exposed); 1 of
    optimizer: 6.5.
    """
    step = (
        job()
        .op(1, stream=3, kind="h2d")
        .wait_stream(0, 3)
        .collective(4, work=1, module=3)
        .op(2, module=2)
        .wait_work(1)
        .op(1, phase=Phase.OPTIMIZER)
    )
    timeline = run(step, host=replace(INSTANT_HOST, eager_op_us=500.0))
    b = timeline.breakdown()
    assert timeline.makespan_ms == b.step_ms == 6.5
    assert (b.compute_ms, b.communication_ms, b.exposed_communication_ms) == (3, 4, 2)
    assert (b.exposed_copy_ms, b.bubble_ms, b.host_bound_ms) == (1, 0, 0.5)
    assert (b.optimizer_ms, b.recompute_ms, b.hidden_recompute_ms) == (1, 0, 0)
    assert parts(b) == b.step_ms


def test_modules_are_subtrees(job, run):
    """a.b's 2 ms count for a.b, a and the root; c's 3-ms gather, 1 of them exposed, for c and the root."""
    step = job().collective(3, work=1, module=3).op(2, module=2).wait_work(1).op(4, module=1)
    modules = {m.name: m for m in run(step).breakdown().modules}
    assert [modules[name].compute_ms for name in ("a.b", "a", "c", "")] == [2, 6, 0, 6]
    assert [modules[name].communication_ms for name in ("a.b", "a", "c", "")] == [0, 0, 3, 3]
    assert modules["c"].exposed_communication_ms == modules[""].exposed_communication_ms == 1


def test_collectives_at_the_same_time_share_it(job, run):
    """Gathers of 4 ms (c) and 2 ms (a.b) on links that they share, beside 3 ms of computation: bytes move for 6 ms, both for 4
    of them; each collective gets 2 of those, and of the 3 exposed ms both share the first, c alone has the others.
    """
    groups = tuple(Group.of(name, range(2)) for name in ("dp", "tp"))
    step = (
        job(groups=groups).collective(4, stream=1, work=1, module=3).collective(2, stream=2, work=2, group=1, module=2)
    )
    b = run(step.op(3, module=1).wait_work(1).wait_work(2)).breakdown()
    modules = {m.name: m for m in b.modules}
    assert (b.communication_ms, b.exposed_communication_ms) == (6, 3)
    assert [modules[name].communication_ms for name in ("a.b", "c", "")] == [2, 4, 6]
    assert [modules[name].exposed_communication_ms for name in ("a.b", "c", "")] == [0.5, 2.5, 3]


@given(
    st.lists(st.tuples(st.sampled_from("gdc"), st.integers(1, 9), st.integers(0, 3), st.integers(0, 1)), max_size=12)
)
def test_modules_add_up_to_the_step(job, run, parts):
    """Whatever runs beside what: the root has the computation and the communication of the step's summary."""
    groups = tuple(Group.of(name, range(2)) for name in ("dp", "tp"))
    step = job(groups=groups).op(1)
    for i, (what, ms, module, group) in enumerate(parts):
        if what == "c":
            step.op(ms, module=module)
        else:
            step.collective(ms, stream=1 + group, work=i, group=group, module=module)
            if what == "d":
                step.wait_work(i)
    b = run(step, overlap=ConstantOverlap()).breakdown()
    root = b.modules[0]
    assert root.compute_ms == pytest.approx(b.compute_ms)
    assert root.communication_ms == pytest.approx(b.communication_ms)
    assert root.exposed_communication_ms == pytest.approx(b.exposed_communication_ms)


def test_when_the_step_has_come_to_each_event(job, run):
    """Kernels of 2 and 3 ms, a gather of 4 ms between them: what is issued between the kernels comes when the first has ended,
    the second kernel when it starts, and nothing after the end of the step.
    """
    step = job().enter(1).op(2, module=1).collective(4, work=1).wait_work(1).op(3).exit(1)
    timeline = run(step)
    assert timeline.ranks[0].reached_ms(timeline.makespan_ms).tolist() == [0, 0, 2, 2, 6, 9]
    assert timeline.ranks[0].reached_ms(3.0).tolist() == [0, 0, 2, 2, 3, 3]


def test_recomputation_in_the_open(job, run):
    """3 ms recomputed on the only stream cost 3 ms: nothing is hidden."""
    b = run(job().op(4).op(3, phase=Phase.RECOMPUTE, module=1).op(5, phase=Phase.BACKWARD)).breakdown()
    assert (b.step_ms, b.recompute_ms, b.hidden_recompute_ms) == (12, 3, 0)
    assert {m.name: m.recompute_ms for m in b.modules} == {"": 3, "a": 3, "a.b": 0, "c": 0}


def test_recomputation_behind_communication_is_hidden(job, run):
    """3 ms recomputed beside a 2-ms gather that the backward needs: without it the step is 1 ms shorter, so 2
    are hidden.
    """
    step = job().op(4).collective(2, work=1).op(3, phase=Phase.RECOMPUTE).wait_work(1)
    b = run(step.op(5, phase=Phase.BACKWARD)).breakdown()
    assert (b.step_ms, b.recompute_ms, b.hidden_recompute_ms) == (12, 3, 2)


def test_recomputation_that_costs_the_host_is_not_hidden(job, run):
    """Launch-bound: 0.5 ms a launch for 0.125-ms kernels. Recomputing one costs 0.5 ms, more than its kernel:
    none hidden.
    """
    step = job().op(0.125).op(0.125, phase=Phase.RECOMPUTE).op(0.125, phase=Phase.BACKWARD)
    b = run(step, host=replace(INSTANT_HOST, eager_op_us=500.0, backward_op_us=500.0)).breakdown()
    assert (b.step_ms, b.recompute_ms, b.hidden_recompute_ms) == (1.625, 0.125, 0)


def test_a_recomputed_collective_counts(job, run):
    """A gather that is recomputed costs what it costs on the wire."""
    step = job().op(4).collective(2, asynchronous=False, phase=Phase.RECOMPUTE).op(1)
    b = run(step).breakdown()
    assert (b.recompute_ms, b.hidden_recompute_ms) == (2, 0)


def test_a_rank_that_is_done_waits_in_a_bubble(job, run):
    """Rank 0 is done at 2, rank 1 at 5: 3 ms of bubble on rank 0."""
    timeline = run(job(rank=0).op(2), job(rank=1).op(5))
    assert (timeline.breakdown(0).bubble_ms, timeline.breakdown(0).host_bound_ms) == (3, 0)


def test_interference_is_visible(job, run):
    """Off and on: a step computes for 4 ms, or 4 + 3 * 0.19 / 1.19 with a 3-ms gather beside it."""
    step = job().collective(3).op(4)
    model = ConstantOverlap(communication_intra=1.0)
    free, disturbed = run(step).breakdown(), run(step, overlap=model).breakdown()
    assert (free.compute_ms, free.interference_ms) == (4, 0)
    assert disturbed.interference_ms == pytest.approx(3 * 0.19 / 1.19)
    assert disturbed.compute_ms == pytest.approx(4 + disturbed.interference_ms)


def test_the_numbers_are_plain(job, run):
    """Every field of a breakdown is a Python number, so it can be written as JSON."""
    b = run(job().op(1).collective(1)).breakdown()
    for field in fields(b):
        assert type(getattr(b, field.name)) in (int, float, tuple), field.name


# ---- critical path ----


def path(timeline):
    """(event, begin, end, reason) of each segment."""
    return [(s.event, s.start_ms, s.end_ms, s.reason) for s in timeline.critical_path()]


def test_path_through_two_streams(job, run):
    """Compute 2, the gather that waits for it 5, compute that waits for the gather 1; the 4 ms beside are not
    on it.
    """
    step = job().op(2).collective(5, work=1).op(4).wait_work(1).op(1)
    assert path(run(step)) == [
        (0, 0, 2, "launch"),
        (1, 2, 7, "dependency"),
        (4, 7, 8, "dependency"),
    ]


def test_path_through_the_host(job, run):
    """Launch-bound: the host until the last launch at 1.5, then its kernel."""
    step = job().op(0.25).op(0.25).op(0.25)
    timeline = run(step, host=replace(INSTANT_HOST, eager_op_us=500.0))
    assert path(timeline) == [(2, 0, 1.5, "host"), (2, 1.5, 1.75, "launch")]


def test_path_through_a_wait_of_the_host(job, run):
    """0.5 of host, 4 of kernel, then the host (0.5) after its wait, then 1: 6 ms."""
    timeline = run(job().op(4).sync().op(1), host=replace(INSTANT_HOST, eager_op_us=500.0))
    assert path(timeline) == [
        (0, 0, 0.5, "host"),
        (0, 0.5, 4.5, "launch"),
        (2, 4.5, 5.0, "sync"),
        (2, 5.0, 6.0, "launch"),
    ]


def test_path_through_an_engine(job, run):
    """The copy-in on another stream was ready at 2 and had the engine at 6, behind compute."""
    step = job().op(1).op(5).collective(2, stream=2, asynchronous=False).wait_stream(1, 2).op(1, stream=1)
    assert path(run(step)) == [(0, 0, 1, "launch"), (1, 1, 6, "stream"), (4, 6, 7, "engine")]


def test_path_through_a_peer(job, run):
    """Rank 0's gather waited for rank 1, which computed for 4 ms."""
    timeline = run(*(job(rank=r).op(ms).collective(2, work=1).wait_work(1).op(1) for r, ms in enumerate((1, 4))))
    assert [s.rank for s in timeline.critical_path()] == [1, 0, 0]
    assert path(timeline) == [(0, 0, 4, "launch"), (1, 4, 6, "peer"), (3, 6, 7, "dependency")]


def test_path_of_a_host_that_ends_last(job, run):
    """The host goes on for 2 ms of views after the device is done: the path ends on it."""
    step = job().op(1).sync().op(0, kind="view")
    timeline = run(step, host=replace(INSTANT_HOST, view_op_us=2000.0))
    assert path(timeline) == [(0, 0, 1, "launch"), (-1, 1, 3, "sync")]


# ---- throughput ----


def test_throughput_as_torchtitan_counts_it(job, run):
    """8192 tokens over tp 2 and pp 2 in 4 ms: 512,000 tokens/s per GPU; 1e9 FLOPs each: 512 TFLOP/s, half of
    the peak.
    """
    degrees = Parallelism(dp_shard=8, tp=2, pp=2)
    step = job(tokens_per_step=8192, flops_per_token=1e9, parallelism=degrees).op(4)
    throughput = run(step).throughput(1024e12)
    assert throughput.tokens_per_second == 512_000
    assert throughput.tflops == 512
    assert throughput.mfu == 0.5


def test_throughput_without_known_flops(job, run):
    """8 tokens in 4 ms, of unknown work: tokens per second, and no FLOPs."""
    throughput = run(job(tokens_per_step=8).op(4)).throughput(1e12)
    assert (throughput.tokens_per_second, throughput.tflops, throughput.mfu) == (2000, 0, 0)
