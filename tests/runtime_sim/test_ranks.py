"""Several ranks together: rendezvous, point-to-point transfers, pipelines; worked out by hand (host free)."""

from __future__ import annotations

import numpy as np
import pytest

from autosac.errors import SimulationError
from autosac.trace import IN_TURN, Group


def test_a_collective_starts_when_the_last_rank_arrives(job, run):
    """Rank 0 arrives at 1, rank 1 at 4; the 2-ms gather runs on both from 4 to 6; rank 0 waited for 3 ms."""
    timeline = run(*(job(rank=r).op(ms).collective(2, work=1).wait_work(1).op(1) for r, ms in enumerate((1, 4))))
    assert timeline.makespan_ms == 7
    first, second = timeline.ranks
    assert (first.start_ms[1], first.transfer_ms[1], first.end_ms[1]) == (1, 4, 6)
    assert (second.start_ms[1], second.transfer_ms[1], second.end_ms[1]) == (4, 4, 6)
    assert timeline.breakdown(0).bubble_ms == 3
    assert timeline.breakdown(1).bubble_ms == 0


def test_ranks_that_are_not_simulated_are_not_waited_for(job, run):
    """Ranks 0 and 4 stand for two groups of four: each gathers in its own group without the other."""
    groups = {r: (Group.of(f"dp{r}", range(r, r + 4)),) for r in (0, 4)}
    timeline = run(*(job(rank=r, groups=groups[r]).op(r + 1).collective(2) for r in (0, 4)))
    assert [rank.end_ms[1] for rank in timeline.ranks] == [3, 7]


def test_the_slower_price_counts_for_all(job, run):
    """Two ranks price their meeting at 2 and 3 ms: it takes 3 on both."""
    assert run(*(job(rank=r).collective(2 + r) for r in (0, 1))).makespan_ms == 3


def test_collectives_are_matched_in_order(job, run):
    """The first of rank 0 meets the first of rank 1 (at 1), the second the second (at 3 and 4: at 4)."""
    timeline = run(
        job(rank=0).op(1).collective(2).op(2).collective(2),
        job(rank=1).op(1).collective(2).op(3).collective(2),
    )
    assert timeline.ranks[0].transfer_ms[[1, 3]].tolist() == [1, 4]


@pytest.mark.parametrize(("ranks", "leaves"), [((8, 7), True), ((7, 6), False), ((9, 1), True), ((15, 8), False)])
def test_groups_in_descending_order(job, run, ranks, leaves):
    """Written downwards, a group has the same members, and leaves a node of eight if its lowest and highest rank do."""
    down, up = (Group("g", ranks[0], ((2, ranks[1] - ranks[0]),)), Group.of("g", sorted(ranks)))
    timeline = run(
        job(rank=ranks[0], groups=(down,)).op(4).collective(2),
        job(rank=ranks[1], groups=(up,)).op(1).collective(2),
    )
    (transfer,) = timeline.program.transfers
    assert (sorted(transfer.ranks), transfer.missing, transfer.inter_node) == ([0, 1], (), leaves)
    assert [rank.transfer_ms[1] for rank in timeline.ranks] == [4, 4]


def test_send_and_recv_meet(job, run):
    """Rank 0 sends at 3; rank 1 has been waiting since 0 and computes 2 ms after the 1-ms transfer: 6."""
    timeline = run(
        job(rank=0).op(3).collective(1, kind="send", peer=1),
        job(rank=1).collective(1, kind="recv", peer=0, work=1).wait_work(1).op(2),
    )
    assert timeline.makespan_ms == 6
    assert timeline.ranks[1].transfer_ms[0] == 3


def test_a_batch_cannot_deadlock_on_its_order(job, run):
    """Both ranks send before they receive, in one batch each: the transfers are concurrent, 2 ms."""
    ranks = [
        job(rank=r).collective(2, kind="send", peer=1 - r, batch=3).collective(2, kind="recv", peer=1 - r, batch=3)
        for r in (0, 1)
    ]
    timeline = run(*ranks)
    assert timeline.makespan_ms == 2
    assert timeline.ranks[0].end_ms.tolist() == [2, 2]


def both_send_first(job, sends=1):
    """Two ranks that send to each other (2 ms each) before they receive."""
    groups = (Group.of("pp", range(2)),)
    ranks = [job(rank=r, groups=groups) for r in (0, 1)]
    for r, rank in enumerate(ranks):
        for kind in ("send", "recv"):
            for _ in range(sends):
                rank.collective(2, kind=kind, peer=1 - r)
    return ranks


def test_sends_that_fit_the_buffers_wait_for_nobody(job, run):
    """Both ranks send at once, in 2 ms, and then receive what has been sent, in 2 ms more."""
    timeline = run(*both_send_first(job))
    assert timeline.buffered
    assert timeline.makespan_ms == 4
    assert timeline.ranks[0].end_ms.tolist() == [2, 4]


def test_sends_that_do_not_fit_the_buffers_are_deadlocked(job, run):
    """Each message takes a slot of eight: eight in each direction fit, nine are too much, and the error says why."""
    assert run(*both_send_first(job, sends=8)).makespan_ms == 32
    with pytest.raises(SimulationError, match=r"deadlock: .*rank 0 waits .*up to 64 MiB.*batch_isend_irecv"):
        run(*both_send_first(job, sends=9))


def test_sends_wait_for_recvs_where_that_is_no_deadlock(job, run):
    """A lone send takes its link only when its recv is there, as long as that works: the sender ends with the receiver."""
    groups = (Group.of("pp", range(2)),)
    timeline = run(
        job(rank=0, groups=groups).collective(1, kind="send", peer=1),
        job(rank=1, groups=groups).op(5).collective(1, kind="recv", peer=0, asynchronous=False),
    )
    assert not timeline.buffered
    assert timeline.ranks[0].end_ms.tolist() == [6]


def test_transfers_alone_have_a_stream_per_pair(job, run):
    """A recv that waits for rank 2 does not hold up the next send to rank 1."""
    groups = (Group.of("pp", range(3)),)
    timeline = run(
        job(rank=0, groups=groups).collective(1, kind="recv", peer=2).collective(1, kind="send", peer=1),
        job(rank=1, groups=groups).collective(1, kind="recv", peer=0),
        job(rank=2, groups=groups).op(5).collective(1, kind="send", peer=0),
    )
    assert timeline.ranks[0].end_ms.tolist() == [6, 1]


def test_transfers_in_turn(job, run):
    """In a group that was connected at once the send waits behind the recv, on the stream of the group's collectives."""
    groups = (Group.of("pp", range(3)),)
    timeline = run(
        job(rank=0, groups=groups)
        .collective(1, kind="recv", peer=2, batch=IN_TURN)
        .collective(1, kind="send", peer=1, batch=IN_TURN),
        job(rank=1, groups=groups).collective(1, kind="recv", peer=0, batch=IN_TURN),
        job(rank=2, groups=groups).op(5).collective(1, kind="send", peer=0, batch=IN_TURN),
    )
    assert timeline.ranks[0].end_ms.tolist() == [6, 7]


def test_a_peer_that_is_not_simulated_takes_the_price(job, run):
    """One stage of a pipeline alone: its transfers take what they are priced at."""
    assert run(job().collective(2, kind="recv", peer=1, work=1).wait_work(1).op(3)).makespan_ms == 5


def pipeline(job, transfer_ms):
    """1F1B on two stages with three microbatches, forward 1 ms and backward 2 ms, each transfer a batch of
    its own.
    """
    first, second = (job(rank=r, groups=(Group.of("pp", range(2)),)) for r in (0, 1))
    number = 0

    def move(stage, kind):
        nonlocal number
        number += 1
        peer = 1 if stage is first else 0
        stage.collective(transfer_ms, kind=kind, peer=peer, batch=number, work=number)
        return number

    first.op(1)
    move(first, "send")
    first.op(1)
    move(first, "send")
    gradient = move(first, "recv")
    first.wait_work(gradient).op(2).op(1)
    move(first, "send")
    for _ in range(2):
        gradient = move(first, "recv")
        first.wait_work(gradient).op(2)

    activation = move(second, "recv")
    for i in range(3):
        second.wait_work(activation).op(1)
        if i < 2:
            activation = move(second, "recv")
        second.op(2)
        move(second, "send")
    return first, second


def test_1f1b_without_transfer_times(job, run):
    """The textbook value: (microbatches + stages - 1) (forward + backward) = 4 * 3 = 12 ms, each stage busy
    for 9.
    """
    timeline = run(*pipeline(job, 0.0))
    assert timeline.makespan_ms == 12
    assert [timeline.breakdown(r).compute_ms for r in (0, 1)] == [9, 9]
    assert [timeline.breakdown(r).bubble_ms for r in (0, 1)] == [3, 3]


def test_1f1b_with_transfer_times(job, run):
    """With 0.5 ms a transfer, all on one stream per rank, by hand: 14 ms.

    Stage 0 computes at 0 (F0), 1 (F1), 5 (B0), 7 (F2), 9 (B1), 12 (B2); stage 1 at 1.5 (F0), 2.5 (B0), 4.5
    (F1), 5.5 (B1), 8.5 (F2), 9.5 (B2). Activations move at 1, 2.5 (stage 1 posts its recv behind F0), 8;
    gradients at 4.5, 8.5 (behind the third activation on stage 1's stream), 11.5.
    """
    timeline = run(*pipeline(job, 0.5))
    first, second = timeline.ranks
    assert first.start_ms[first.engine == 0].tolist() == [0, 1, 5, 7, 9, 12]
    assert second.start_ms[second.engine == 0].tolist() == [1.5, 2.5, 4.5, 5.5, 8.5, 9.5]
    moved = second.transfer_ms[second.engine == 3]
    assert sorted(moved) == [1, 2.5, 4.5, 8, 8.5, 11.5]
    assert timeline.makespan_ms == 14


def test_hosts_of_different_speed_meet(job, run):
    """Rank 1's host waits for its own 5 ms before it issues the gather: rank 0 gets it at 5 as well."""
    timeline = run(job(rank=0).op(1).collective(1), job(rank=1).op(5).sync().collective(1))
    assert timeline.ranks[0].transfer_ms[1] == 5


def test_equal_ranks_equal_one(job, run):
    """Eight simulated ranks with the same trace take exactly as long as the one that stands for them."""

    def step(rank):
        made = job(rank=rank, groups=(Group.of("dp", range(8)),))
        for i in range(5):
            made.op(1.3).collective(2.1, work=i).op(0.7, stream=1).wait_work(i).op(0.4)
        return made

    alone = run(step(0), steps=2)
    together = run(*(step(rank) for rank in range(8)), steps=2)
    assert together.makespan_ms == alone.makespan_ms
    for rank in together.ranks:
        np.testing.assert_array_equal(rank.start_ms, alone.ranks[0].start_ms)


def test_different_collectives_where_one_is_meant(job, run):
    """Rank 0 gathers where rank 1 reduces: an error that says which ranks and which call."""
    with pytest.raises(SimulationError, match=r"number 0 of group 'dp': rank 1 issues all_reduce where rank 0"):
        run(job(rank=0).collective(1), job(rank=1).collective(1, kind="all_reduce"))


def test_two_traces_of_one_rank(job, run):
    """Two traces that claim the same rank are refused."""
    with pytest.raises(SimulationError, match="same rank"):
        run(job(rank=3).op(1), job(rank=3).op(1))
