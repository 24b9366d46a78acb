"""Makespans of one rank that a person can work out by hand (host free, no interference, one step)."""

from __future__ import annotations

import numpy as np
import pytest

from autosac.trace import EventRecord, Group


def test_one_stream_is_a_queue(job, run):
    """2 + 3 + 4 ms on one stream take 9 ms, one after the other."""
    timeline = run(job().op(2).op(3).op(4))
    assert timeline.makespan_ms == 9
    assert timeline.ranks[0].start_ms.tolist() == [0, 2, 5]
    assert timeline.ranks[0].end_ms.tolist() == [2, 5, 9]


def test_two_streams_with_events(job, run):
    """Compute 2, then a 5-ms gather that waits for it; compute 4 meanwhile, then 1 more after the gather: 2 +
    5 + 1.
    """
    timeline = run(
        job()
        .op(2)
        .record(1, 0)
        .wait(1, 1)
        .collective(5, stream=1, asynchronous=False)
        .record(2, 1)
        .op(4)
        .wait(2, 0)
        .op(1)
    )
    assert timeline.makespan_ms == 8
    assert timeline.ranks[0].start_ms[[0, 3, 5, 7]].tolist() == [0, 2, 2, 7]


def test_an_event_counts_from_its_last_record_before_the_wait(job, run):
    """The event is recorded after 1 ms, waited for, and recorded again after 10 ms: the gather starts at 1,
    not at 11.
    """
    timeline = run(job().op(1).record(1, 0).wait(1, 1).op(10).record(1, 0).collective(2, stream=1, asynchronous=False))
    assert timeline.ranks[0].start_ms[5] == 1
    assert timeline.makespan_ms == 11


def test_an_event_of_an_idle_stream_makes_nobody_wait(job, run):
    """An event recorded on a stream that holds nothing is complete at once."""
    assert run(job().op(3).record(1, 1).wait(1, 2).op(4, stream=2, kind="h2d")).makespan_ms == 4


def test_an_event_holds_what_its_stream_waited_for_then(job, run):
    """The event is recorded on an empty stream before that stream has to wait for 9 ms: it makes nobody wait."""
    step = job().op(9).record(1, 1).wait_stream(1, 0).wait(1, 3).op(2, stream=3, kind="h2d")
    assert run(step).ranks[0].start_ms[4] == 0


def test_waits_are_transitive_through_a_stream_without_kernels(job, run):
    """Gather waits for compute (3), scatter for gather, which is empty: scatter starts at 3."""
    timeline = run(job().op(3).wait_stream(1, 0).wait_stream(2, 1).collective(1, stream=2, asynchronous=False))
    assert timeline.makespan_ms == 4


def test_stream_wait_covers_what_the_other_stream_holds_now(job, run):
    """Scatter waits for the 3 ms that compute holds, not for the 10 ms that follow."""
    timeline = run(job().op(3).wait_stream(2, 0).op(10).collective(1, stream=2, asynchronous=False))
    assert timeline.ranks[0].start_ms[3] == 3
    assert timeline.makespan_ms == 13


def test_a_collective_shared_by_two_streams(job, run):
    """One 4-ms gather from 1 to 5; two streams wait for it: the copy (2 ms) from 5, and compute, busy until
    7, from 7.
    """
    timeline = run(
        job().op(1).collective(4, work=7).op(6).wait_work(7, 0).wait_work(7, 3).op(2, stream=3, kind="h2d").op(3)
    )
    start, end = timeline.ranks[0].start_ms, timeline.ranks[0].end_ms
    assert (start[1], end[1]) == (1, 5)
    assert (start[5], end[5]) == (5, 7)
    assert start[6] == 7
    assert timeline.makespan_ms == 10


def test_an_asynchronous_collective_lets_its_stream_go_on(job, run):
    """1, then 5 ms of gather beside 2 ms of compute: 6. The synchronous one holds the stream: 8."""
    assert run(job().op(1).collective(5).op(2)).makespan_ms == 6
    assert run(job().op(1).collective(5, asynchronous=False).op(2)).makespan_ms == 8


def test_collectives_of_one_group_queue_on_its_stream(job, run):
    """Two asynchronous gathers of a group, 5 ms each, run one after the other."""
    timeline = run(job().collective(5).collective(5))
    assert timeline.ranks[0].start_ms.tolist() == [0, 5]
    assert timeline.ranks[0].stream_names[-1] == "group dp"


def test_the_groups_queue_does_not_hold_the_issuing_stream(job, run):
    """After two gathers of 5 ms that it only issued, the stream's own 2 ms still start at 0."""
    timeline = run(job().collective(5).collective(5).op(2))
    assert timeline.ranks[0].start_ms.tolist() == [0, 5, 0]


def test_transfers_over_the_same_links_share_them(job, run):
    """4 and 2 ms at half speed each: the short one ends at 4, the long one has 2 ms left and ends at 6."""
    groups = (Group.of("dp", range(2)), Group.of("ep", range(2)))
    timeline = run(job(groups=groups).collective(4).collective(2, group=1))
    assert timeline.ranks[0].end_ms.tolist() == [6, 4]


def test_links_inside_and_between_nodes_are_separate(job, run):
    """A group inside the node and one between nodes of 2 GPUs do not disturb each other."""
    groups = (Group.of("tp", range(2)), Group.of("dp", (0, 2)))
    timeline = run(job(groups=groups).collective(4).collective(2, group=1), gpus_per_node=2)
    assert timeline.ranks[0].end_ms.tolist() == [4, 2]


def test_send_and_recv_use_opposite_directions(job, run):
    """A send and a recv of one batch take 3 ms together; two sends share the way out and take 6."""
    both = job().collective(3, kind="send", peer=1, batch=5).collective(3, kind="recv", peer=1, batch=5)
    assert run(both).makespan_ms == 3
    two = job().collective(3, kind="send", peer=1, batch=5).collective(3, kind="send", peer=1, batch=5)
    assert run(two).makespan_ms == 6


def test_kernels_share_the_compute_engine_side_streams_first(job, run):
    """Three 2-ms kernels become ready at 1 on streams 0, 1, 2 behind a 1-ms one: the side streams go first,
    in order.
    """
    timeline = run(job().op(1).record(1, 0).op(2).wait(1, 1).op(2, stream=1).wait(1, 2).op(2, stream=2))
    assert timeline.ranks[0].start_ms[[2, 4, 6]].tolist() == [5, 1, 3]
    assert timeline.makespan_ms == 7


def test_a_running_kernel_is_not_preempted(job, run):
    """The copy-in becomes ready at 2, when compute has just begun 5 ms of work at 1: it starts at 6."""
    timeline = run(job().op(1).op(5).collective(2, stream=2, asynchronous=False).wait_stream(1, 2).op(1, stream=1))
    assert timeline.ranks[0].start_ms[4] == 6


def test_copies_have_engines_of_their_own(job, run):
    """Compute, host-to-device and device-to-host copies of 3 ms on three streams run side by side; two H2D
    copies do not.
    """
    side = job().op(3).op(3, stream=1, kind="h2d").op(3, stream=2, kind="d2h")
    assert run(side).makespan_ms == 3
    assert run(side.op(3, stream=3, kind="h2d")).makespan_ms == 6


def test_views_and_cpu_operators_launch_nothing(job, run):
    """A view and an operator on CPU tensors have no time on the device."""
    timeline = run(job().op(0, kind="view").op(0, kind="cpu").op(2))
    assert np.isnan(timeline.ranks[0].start_ms[:2]).all()
    assert timeline.ranks[0].stream.tolist() == [-1, -1, 0]
    assert timeline.makespan_ms == 2


def test_an_event_of_the_step_before_is_complete(job, run):
    """Waiting for an event that is recorded later in the step, or in the prologue, does not wait in the first
    step.
    """
    assert run(job().wait(1, 0).op(2).record(1, 0)).makespan_ms == 2
    earlier = job().wait(9, 0).op(2)
    earlier.prologue.append(EventRecord(9, 1))
    assert run(earlier).makespan_ms == 2


def test_two_steps_wait_for_each_other_through_events(job, run):
    """Gather 3 waits for the event that compute recorded in the step before; compute 2 waits for gather: 5 ms
    a step.
    """
    step = job().wait(1, 1).collective(3, stream=1, asynchronous=False).wait_stream(0, 1).op(2).record(1, 0)
    timeline = run(step, steps=3)
    assert timeline.step_end_ms == (5, 10, 15)
    assert timeline.makespan_ms == 5
    assert timeline.ranks[0].start_ms[[1, 3]].tolist() == [0, 3]


def test_steps_overlap_where_nothing_forbids_it(job, run):
    """Compute 4 and an unrelated copy of 1 ms: a step takes 4, and the second copy runs 3 ms before the first
    step ends.
    """
    timeline = run(job().op(4).op(1, stream=1, kind="h2d"), steps=2)
    assert timeline.makespan_ms == 4
    assert timeline.ranks[0].start_ms.tolist() == [0, -3]


@pytest.mark.parametrize("steps", [1, 2])
def test_stream_busy_times(job, run, steps):
    """Each stream's busy time is the sum of its kernels."""
    timeline = run(job().op(4).op(1, stream=1, kind="h2d").collective(2), steps=steps)
    assert timeline.ranks[0].stream_busy_ms() == {
        "compute": 4,
        "gather": 1,
        "scatter": 0,
        "copies": 0,
        "group dp": 2,
    }
