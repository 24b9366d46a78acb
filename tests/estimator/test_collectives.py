"""The alpha-beta model of collectives, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import SimulationError
from autosac.estimator import Cluster, load_hardware
from autosac.estimator.collectives import AlphaBeta

H100 = load_hardware("h100-sxm-80gb")
MODEL = AlphaBeta(H100, efficiency=1.0, start_us=10.0)
CLUSTER = Cluster(
    name="c",
    nodes=4,
    gpus_per_node=8,
    intra_gbps=400.0,
    intra_latency_us=1.0,
    inter_gbps=200.0,
    inter_latency_us=5.0,
)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv", "barrier")


@pytest.mark.parametrize(
    ("kind", "size", "ranks", "microseconds"),
    [
        # 7/8 of 4e8 bytes at 4e5 bytes/us = 875; 7 steps of 1 us; 10 to start
        ("all_gather", 400_000_000, range(8), 875 + 7 + 10),
        ("reduce_scatter", 400_000_000, range(8), 875 + 7 + 10),
        # twice that on a ring; the tree (2 * 1000 + 2 * 7) is slower
        ("all_reduce", 400_000_000, range(8), 2 * 875 + 14 + 10),
        # 16 ranks on two nodes: 15/16 of 4e8 at 2e5 = 1875; 14 steps inside, 1 between
        ("all_gather", 400_000_000, range(16), 1875 + 14 + 5 + 10),
        # one rank a node: an eighth of 200 GB/s
        ("all_gather", 400_000_000, (0, 8), 8000 + 5 + 10),
        # eight bytes: the tree's 2 * (7 + 2 * 5) beats the ring's 2 * (28 + 15)
        ("all_reduce", 8, range(32), 2 * (7 + 2 * 5) + 2 * 8 / 2e5 + 10),
        # each rank sends 1/16 to each; 8 of 16 leave the node over 25 GB/s each: 2e8/2.5e4
        ("all_to_all", 400_000_000, range(16), 8000 + 5 + 10),
        ("all_to_all", 400_000_000, range(8), 875 + 1 + 10),
        ("broadcast", 400_000_000, range(8), 1000 + 7 + 10),
        ("send", 400_000_000, (0, 1), 1000 + 1 + 10),
        ("recv", 400_000_000, (0, 9), 16000 + 5 + 10),
        # one rank: a copy on the device
        ("all_gather", 335_000_000, (0,), 200 + 10),
    ],
)
def test_by_hand(kind: str, size: int, ranks: tuple[int, ...], microseconds: float) -> None:
    """Latency plus size over bandwidth, as the comments say."""
    answer = MODEL.estimate(kind, size, CLUSTER.place(tuple(ranks)))
    assert answer.ms == pytest.approx(microseconds * 1e-3, rel=1e-9)


def test_an_unknown_collective_is_named() -> None:
    """No price is made up for it."""
    with pytest.raises(SimulationError, match="'all_shuffle'"):
        MODEL.estimate("all_shuffle", 1, CLUSTER.place(range(4)))


@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 2**32),
    more=st.integers(0, 2**32),
    ranks=st.integers(2, 32),
)
def test_larger_messages_never_take_less_time(kind: str, size: int, more: int, ranks: int) -> None:
    """Monotone in bytes, and positive."""
    place = CLUSTER.place(range(ranks))
    assert 0 < MODEL.estimate(kind, size, place).ms <= MODEL.estimate(kind, size + more, place).ms
