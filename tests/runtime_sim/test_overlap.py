"""Interference between computation and communication on one GPU."""

from __future__ import annotations

import pytest

from autosac.runtime_sim import ConstantOverlap, OverlapModel
from autosac.trace import Group, Signature

HALF = ConstantOverlap(compute_intra=2.0, compute_inter=1.0, communication_intra=1.0, communication_inter=1.0)


def test_compute_is_slowed_while_bytes_move(job, run):
    """A 3-ms gather from 0; a 4-ms kernel does 1.5 ms of work until 3 at half speed, and ends at 5.5."""
    timeline = run(job().collective(3).op(4), overlap=HALF)
    assert timeline.ranks[0].end_ms.tolist() == [3, 5.5]


def test_communication_is_slowed_while_the_gpu_computes(job, run):
    """The reverse: a 2-ms kernel, a 4-ms gather at half speed until 2: 1 + 3 = ends at 5."""
    model = ConstantOverlap(compute_intra=1.0, compute_inter=1.0, communication_intra=2.0, communication_inter=1.0)
    timeline = run(job().collective(4).op(2), overlap=model)
    assert timeline.ranks[0].end_ms.tolist() == [5, 2]


def test_both_at_once(job, run):
    """Both at half speed from 0: the 2-ms kernel ends at 4; the 3-ms gather has done 2 then: 5."""
    model = ConstantOverlap(compute_intra=2.0, compute_inter=1.0, communication_intra=2.0, communication_inter=1.0)
    timeline = run(job().collective(3).op(2), overlap=model)
    assert timeline.ranks[0].end_ms.tolist() == [5, 4]


def test_transfers_between_nodes_have_factors_of_their_own(job, run):
    """The same kernel beside a transfer between nodes is not slowed by a model that slows it inside the node
    only.
    """
    groups = (Group.of("dp", (0, 8)),)
    assert run(job(groups=groups).collective(3).op(4), overlap=HALF).ranks[0].end_ms.tolist() == [3, 4]


def test_waiting_for_peers_does_not_slow(job, run):
    """Rank 0's kernel runs at full speed while its gather waits for rank 1 (until 4), and at half speed from
    then on.
    """
    timeline = run(job(rank=0).collective(2).op(5), job(rank=1).op(4).collective(2), overlap=HALF)
    assert timeline.ranks[0].end_ms.tolist() == [6, 6]


def test_a_transfer_is_as_slow_as_its_slowest_end(job, run):
    """Only rank 1 computes (2 ms) beside the 3-ms gather: it moves at half speed for 2 ms on both, and ends
    at 4.
    """
    model = ConstantOverlap(compute_intra=1.0, compute_inter=1.0, communication_intra=2.0, communication_inter=1.0)
    timeline = run(job(rank=0).collective(3), job(rank=1).collective(3).op(2), overlap=model)
    assert [rank.end_ms[0] for rank in timeline.ranks] == [4, 4]


def test_a_model_of_ones_own(job, run):
    """A subclass that slows matrix products threefold beside a gather and nothing else is obeyed."""

    class MatrixOnly(OverlapModel):
        def compute_slowdown(self, signature: Signature, inter_node: bool) -> float:
            return 3.0 if signature.name.startswith("aten.mm") else 1.0

        def communication_slowdown(self, kind: str, inter_node: bool) -> float:
            return 1.0

    timeline = run(job().collective(6).op(1).op(1, kind="triton"), overlap=MatrixOnly())
    assert timeline.ranks[0].end_ms.tolist() == [6, pytest.approx(3), pytest.approx(4)]
