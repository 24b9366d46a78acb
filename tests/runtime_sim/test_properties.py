"""Properties of every simulation, checked on random programs against an independent one-pass solution.

Without contention (one stream per engine, one group) a step is the longest path of its dependencies, which a
single pass in issue order finds: `one_pass` does it with a ready time per stream and none of the engine's
code.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.runtime_sim import INSTANT_HOST, ConstantOverlap, HostModel, NoInterference, simulate
from autosac.trace import (
    Collective,
    EventRecord,
    EventWait,
    Group,
    HostWait,
    Op,
    Phase,
    StreamWait,
    WorkWait,
)

HOST = HostModel(
    eager_op_us=300,
    backward_op_us=200,
    optimizer_op_us=300,
    collective_us=400,
    stream_op_us=100,
    sync_us=500,
    queue_depth=3,
    recompute_op_us=0,
)
GROUP_STREAM = 4

durations = st.integers(0, 8).map(float)
streams = st.integers(0, 3)
# Streams 0, 1, 2 have an engine each; the group has one of its own.
kernels = st.tuples(st.just("op"), st.integers(0, 2), durations, st.sampled_from(list(Phase)[1:5]))
gathers = st.tuples(st.just("gather"), st.integers(0, 3), durations, st.just(Phase.FORWARD))
waits = st.one_of(
    st.tuples(st.just("wait_stream"), streams, streams),
    st.tuples(st.just("record"), streams),
    st.tuples(st.just("wait"), streams),
    st.tuples(st.just("work"), streams),
    st.tuples(st.just("sync"), st.integers(-1, 3)),
)
programs = st.lists(st.one_of(kernels, kernels, gathers, waits), min_size=6, max_size=25)
modest = settings(deadline=None, max_examples=120)
KINDS = ("mm", "h2d", "d2h")


def build(job, program, rank=0, contended=False):
    """The trace of a random program. `contended`: every kernel computes, whatever its stream."""
    made = job(rank=rank)
    works = events = 0
    for step in program:
        if step[0] == "op":
            made.op(step[2], stream=step[1], kind="mm" if contended else KINDS[step[1]], phase=step[3])
        elif step[0] == "gather":
            works += 1
            made.collective(step[2], stream=step[1], work=works)
        elif step[0] == "wait_stream":
            made.wait_stream(step[1], step[2])
        elif step[0] == "record":
            events += 1
            made.record(events, step[1])
        elif step[0] == "wait" and events:
            made.wait(events, step[1])
        elif step[0] == "work" and works:
            made.wait_work(works, step[1])
        elif step[0] == "sync":
            made.sync(stream=step[1])
    if not made.events:
        made.record(0, 0)
    return made


def simulated(*jobs, host=INSTANT_HOST, overlap=None, steps=1):
    """The timeline of some jobs."""
    return simulate(
        [j.trace for j in jobs],
        [j.priced for j in jobs],
        host=host,
        overlap=overlap or NoInterference(),
        steps=steps,
    )


def one_pass(job, host_ms, sync_ms):
    """When each event ends (on the device, or on the host if it waits), by ready times per stream, in issue order."""
    ready, event_ms, work_ms, host, ends = [0.0] * 5, {}, {}, 0.0, []
    for event, ms in zip(job.events, job.ms, strict=True):
        kind, end = type(event), float("nan")
        if kind is not HostWait:
            host += host_ms(event)
        if kind is Op:
            end = ready[event.stream] = max(ready[event.stream], host) + ms
        elif kind is Collective:
            end = ready[GROUP_STREAM] = max(ready[GROUP_STREAM], ready[event.stream], host) + ms
            work_ms[event.work] = end
        elif kind is EventRecord:
            event_ms[event.event] = ready[event.stream]
        elif kind is EventWait:
            ready[event.stream] = max(ready[event.stream], event_ms[event.event])
        elif kind is StreamWait:
            ready[event.stream] = max(ready[event.stream], ready[event.other])
        elif kind is WorkWait:
            ready[event.stream] = max(ready[event.stream], work_ms[event.work])
        elif kind is HostWait:
            end = host = max(host, ready[event.stream] if event.stream >= 0 else max(ready)) + sync_ms
        ends.append(end)
    return ends


def ends_of(timeline):
    """The same of a simulation."""
    rank = timeline.ranks[0]
    waits = [type(event) is HostWait for event in rank.trace.events]
    return np.where(waits, rank.host_end_ms, rank.end_ms)


@given(programs)
@modest
def test_equals_the_one_pass_solution(job, program):
    """With a free host every event ends exactly when the one-pass solution says."""
    made = build(job, program)
    np.testing.assert_array_equal(ends_of(simulated(made)), one_pass(made, lambda event: 0.0, 0.0))


@given(programs)
@modest
def test_equals_the_one_pass_solution_with_a_host(job, program):
    """The same with a host that takes time (and a launch queue that is never full)."""
    made = build(job, program)
    host = replace(HOST, queue_depth=100, launch_latency_us=0.0)

    def host_ms(event):
        if type(event) is Op:
            return 0.2 if event.phase == Phase.BACKWARD else 0.3
        return 0.4 if type(event) is Collective else 0.1

    np.testing.assert_allclose(ends_of(simulated(made, host=host)), one_pass(made, host_ms, 0.5))


@given(programs, st.booleans(), st.integers(1, 3))
@modest
def test_between_the_busiest_stream_and_the_sum(job, program, contended, steps):
    """No step is faster than its busiest stream or engine, nor slower than everything one after the other."""
    made = build(job, program, contended=contended)
    timeline = simulated(made, host=HOST, steps=steps)
    total = timeline.step_end_ms[-1]
    rank = timeline.ranks[0]
    busy = [sum(ms for ms, s in zip(made.ms, rank.stream, strict=True) if s == stream) for stream in range(5)]
    engines = [sum(ms for ms, e in zip(made.ms, rank.engine, strict=True) if e == engine) for engine in range(4)]
    host_ms = float(timeline.problem.host_ms[0].sum())
    latency_ms = HOST.launch_latency_us / 1e3 * len(made.events)
    assert total >= max(*busy, *engines, host_ms) * steps - 1e-9
    assert total <= (sum(made.ms) + host_ms + latency_ms) * steps + 1e-9


@given(programs, st.tuples(streams, streams), st.integers(0, 24))
@modest
def test_another_dependency_never_makes_it_faster(job, program, pair, place):
    """A stream's wait for another, inserted anywhere, can only delay (no contention)."""
    more = [*program[:place], ("wait_stream", *pair), *program[place:]]
    assert simulated(build(job, more)).makespan_ms >= simulated(build(job, program)).makespan_ms


@given(programs, st.integers(0, 24))
@modest
def test_longer_kernels_never_make_it_faster(job, program, place):
    """Adding 1 ms to one kernel delays by between 0 and 1 ms (no contention)."""
    made, slower = build(job, program), build(job, program)
    place %= len(made.ms)
    if type(slower.events[place]) not in (Op, Collective):
        return
    slower.ms[place] += 1.0
    assert 0 <= simulated(slower).makespan_ms - simulated(made).makespan_ms <= 1


@given(programs, st.permutations(range(3)))
@modest
def test_the_names_of_streams_do_not_matter(job, program, order):
    """Renumbering the streams (and their engines with them) changes nothing (no contention)."""
    made = build(job, program)
    names = [*order, 3, -1]
    renamed = build(job, program)
    renamed.events = [
        event._replace(
            **{field: names[getattr(event, field)] for field in ("stream", "other") if hasattr(event, field)}
        )
        for event in renamed.events
    ]
    assert simulated(renamed).makespan_ms == simulated(made).makespan_ms


@given(st.lists(st.lists(durations, min_size=1, max_size=6), min_size=2, max_size=3), st.randoms())
@modest
def test_the_order_between_independent_streams_does_not_matter(job, queues, random):
    """However the host interleaves streams that do not know of each other, the step takes as long as the
    longest.
    """
    made = job()
    left = [list(queue) for queue in queues]
    while any(left):
        stream = random.choice([i for i, queue in enumerate(left) if queue])
        made.op(left[stream].pop(0), stream=stream, kind=KINDS[stream])
    assert simulated(made).makespan_ms == max(sum(queue) for queue in queues)


@given(programs, st.booleans())
@modest
def test_repetition_is_exact(job, program, contended):
    """The same input gives the same times, to the bit."""
    first, second = (
        simulated(build(job, program, contended=contended), host=HOST, overlap=ConstantOverlap(), steps=2)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first.ranks[0].start_ms, second.ranks[0].start_ms)
    np.testing.assert_array_equal(first.ranks[0].end_ms, second.ranks[0].end_ms)
    assert first.critical_path() == second.critical_path()


@given(programs, st.booleans(), st.integers(1, 2))
@modest
def test_the_critical_path_has_no_gaps(job, program, contended, steps):
    """Its segments begin at the step's beginning, follow each other, and end at its end."""
    timeline = simulated(build(job, program, contended=contended), host=HOST, overlap=ConstantOverlap(), steps=steps)
    path = timeline.critical_path()
    if timeline.makespan_ms == 0:
        return
    assert path[0].start_ms == pytest.approx(0, abs=1e-9)
    assert path[-1].end_ms == pytest.approx(timeline.makespan_ms)
    for before, after in pairwise(path):
        assert before.end_ms == pytest.approx(after.start_ms, abs=1e-9)


@given(programs, st.booleans(), st.integers(1, 2))
@modest
def test_the_parts_add_up(job, program, contended, steps):
    """Compute, exposed communication and copies, bubbles and host-bound gaps partition the step; none is
    negative.
    """
    timeline = simulated(build(job, program, contended=contended), host=HOST, overlap=ConstantOverlap(), steps=steps)
    b = timeline.breakdown()
    parts = [b.compute_ms, b.exposed_communication_ms, b.exposed_copy_ms, b.bubble_ms, b.host_bound_ms]
    assert sum(parts) == pytest.approx(timeline.makespan_ms)
    assert min(parts) >= -1e-9
    assert 0 <= b.hidden_recompute_ms <= b.recompute_ms


@given(programs)
@modest
def test_interference_only_delays(job, program):
    """Without contention for engines, slowdowns delay a step, at most by their factor."""
    made = build(job, program)
    free, slowed = simulated(made), simulated(made, overlap=ConstantOverlap())
    assert free.makespan_ms - 1e-9 <= slowed.makespan_ms <= 1.19 * free.makespan_ms + 1e-9


@given(programs, st.integers(2, 4))
@modest
def test_equal_ranks_equal_one(job, program, count):
    """Ranks that do the same take as long together as one of them alone."""
    jobs = [build(job, program, rank=rank, contended=True) for rank in range(count)]
    for made in jobs:
        made.groups = (Group.of("dp", range(count)),)
    settings = {"host": HOST, "overlap": ConstantOverlap(), "steps": 2}
    alone, together = simulated(jobs[0], **settings), simulated(*jobs, **settings)
    assert together.makespan_ms == alone.makespan_ms
    np.testing.assert_array_equal(together.ranks[-1].end_ms, alone.ranks[0].end_ms)
