"""The network as flows: loads of racks by hand, times on idle links, chances of collisions and of slow GPUs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import SimulationError
from autosac.estimator import AlphaBeta, Cluster, FlowModel, LogSigmoid, load_hardware, price
from autosac.estimator.cluster import default_cluster
from autosac.estimator.log_sigmoid import Curve
from autosac.estimator.nccl import latencies_us
from autosac.estimator.network.chance import largest_normal, most_loaded, straggling
from autosac.trace import Op, Phase, Signature, TensorMeta
from traces import trace_of

H100 = load_hardware("h100-sxm-80gb")
FULL = Curve(
    latency_us=0.0, hop_us=0.0, share=1.0, steepness=5.0, midpoint=-50.0
)  # all of the bandwidth, at every size
MODEL = FlowModel(H100, network=FULL)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv", "barrier")


def _cluster(**changes: Any) -> Cluster:
    fields: dict[str, Any] = {"nodes": 8, "gpus_per_node": 8, "intra_gbps": 450.0, "inter_gbps": 400.0} | changes
    return Cluster(name="c", intra_latency_us=0.6, inter_latency_us=4.0, **fields)


def test_a_ring_on_an_idle_fabric_takes_the_alpha_beta_time() -> None:
    """15/16 of 4 GB at 400 GB/s, and the latencies of NCCL's Simple protocol: 14 steps inside nodes, one between."""
    start, near, far = latencies_us("ring", "Simple")
    place = _cluster().place(range(16))
    expected = 15 / 16 * 4e9 / 4e5 + start + 14 * near + far
    assert MODEL.estimate("all_gather", 4 * 10**9, place).ms * 1e3 == pytest.approx(expected, rel=1e-9)
    bare = AlphaBeta(H100, efficiency=1.0, start_us=0.0).estimate("all_gather", 4 * 10**9, place)
    assert expected == pytest.approx(bare.ms * 1e3, rel=0.02)


def test_inside_a_node_the_fitted_curves_serve() -> None:
    """Nothing is shared there: the time is theirs, and a large gather takes nearly all of the port that it can get."""
    place = _cluster().place(range(8))
    flow, fitted = (
        FlowModel(H100).estimate("all_gather", 2**30, place),
        LogSigmoid(H100).estimate("all_gather", 2**30, place),
    )
    assert (flow.ms, flow.source) == (fitted.ms, fitted.source)
    assert flow.use is not None and 0.7 < flow.use.port < 1 and flow.use.adapter == flow.use.uplink == 0


def test_a_ring_over_whole_racks_hardly_uses_the_uplinks() -> None:
    """Four nodes of a rack leave it over one of their rings' edges: with 4-fold oversubscription that just fits. A group
    with one node in each rack loads its part of the uplinks four times as much as its adapters.
    """
    racks = _cluster(nodes=16, nodes_per_rack=4, oversubscription=4.0)
    whole, single = racks.place(range(64)), racks.place([n * 32 + g for n in range(4) for g in range(8)])
    assert whole.fabric is not None and single.fabric is not None
    assert (whole.fabric.ring_uplinks, single.fabric.ring_uplinks) == (1.0, 4.0)
    idle = _cluster(nodes=16).place(range(64))
    assert MODEL.estimate("all_gather", 2**30, whole).ms == MODEL.estimate("all_gather", 2**30, idle).ms
    slow = MODEL.estimate("all_gather", 2**34, single)
    plain = MODEL.estimate("all_gather", 2**34, _cluster().place([n * 8 + g for n in range(4) for g in range(8)]))
    assert slow.ms == pytest.approx(4 * plain.ms, rel=0.01)
    assert slow.use is not None and slow.use.uplink == pytest.approx(1, rel=0.01)


def test_an_all_to_all_pays_for_what_leaves_its_rack() -> None:
    """Two racks of two nodes: 24 of 32 parts leave a GPU's node, 16 its rack, over a quarter of the bandwidth."""
    place = _cluster(nodes=4, nodes_per_rack=2, oversubscription=4.0).place(range(32))
    assert place.fabric is not None and place.fabric.pair_uplinks == pytest.approx(16 / 24 * 4)


def test_a_small_message_takes_little_of_the_links() -> None:
    """A message that waits for latencies leaves the adapter to others; a large one takes it."""
    place = _cluster().place(range(0, 64, 8))
    small, large = (MODEL.estimate("all_gather", size, place).use for size in (2**12, 2**32))
    assert small is not None and large is not None
    assert small.adapter < 0.02 and large.adapter > 0.99


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**34),
    st.lists(st.integers(0, 127), min_size=2, max_size=40, unique=True),
    st.sampled_from([0, 2, 4]),
    st.sampled_from([1.0, 2.0, 5.0]),
    st.sampled_from([0, 3, 16]),
)
def test_every_time_is_positive_and_every_share_possible(
    kind: str, size: int, ranks: list[int], rack: int, above: float, paths: int
) -> None:
    """For any group in any fabric: a finite positive time, shares from 0 to 1, and oversubscription never helps."""
    ranks = sorted(ranks)[: 2 if kind in ("send", "recv") else None]
    cluster = _cluster(nodes=16, nodes_per_rack=rack, oversubscription=above, uplinks_per_leaf=paths if rack else 0)
    answer = FlowModel(H100).estimate(kind, size, cluster.place(ranks))
    assert 0 < answer.ms < math.inf and answer.use is not None
    assert all(0 <= share <= 1 for share in answer.use[:3]) and answer.use.rate > 0
    plain = FlowModel(H100).estimate(kind, size, replace(cluster, nodes_per_rack=0, uplinks_per_leaf=0).place(ranks))
    assert answer.ms >= plain.ms * (1 - 1e-9)


def test_an_unknown_collective_is_refused() -> None:
    """The kind is named."""
    with pytest.raises(SimulationError, match="'gossip'"):
        FlowModel(H100).estimate("gossip", 1, _cluster().place(range(16)))


@pytest.mark.parametrize(("flows", "paths", "leaves"), [(2, 2, 1), (3, 2, 1), (4, 3, 1), (5, 4, 2)])
def test_collisions_are_those_of_all_assignments(flows: int, paths: int, leaves: int) -> None:
    """The distribution of the fullest path is what counting every assignment gives."""
    one = [max(Counter(choice).values()) for choice in itertools.product(range(paths), repeat=flows)]
    found = most_loaded(flows, paths, leaves)
    for most, chance in zip(found.most, found.cumulative, strict=True):
        assert chance == pytest.approx((sum(m <= most for m in one) / len(one)) ** leaves)
    if leaves == 1:
        assert found.mean == pytest.approx(sum(one) / len(one))
    assert found.quantile(1.0) == flows


def test_hashing_slows_a_ring_that_even_spreading_does_not() -> None:
    """Two nodes a rack, each alone in its group's ring: 16 adapters, 32 flows, and 16 uplinks for two flows each."""
    even = _cluster(nodes_per_rack=2).place(range(0, 64, 16))
    hashed = _cluster(nodes_per_rack=2, uplinks_per_leaf=16).place(range(0, 64, 16))
    assert even.fabric is not None and hashed.fabric is not None
    assert even.fabric.ring_uplinks == 1
    assert hashed.fabric.ring_uplinks == pytest.approx(most_loaded(32, 16, 4).mean / 2)
    assert hashed.fabric.ring_uplinks > 2 and 0 < hashed.fabric.ring_std < 0.3


def test_the_slowest_of_many_gpus() -> None:
    """The largest of one normal value is 0 in the mean, of two 1/sqrt(pi); prices are those of single GPUs."""
    assert largest_normal(1) == pytest.approx(0, abs=1e-6)
    assert largest_normal(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert straggling(1) == 1
    assert straggling(2, 0.02) == pytest.approx(1 + 0.02 / math.sqrt(math.pi))
    assert straggling(128, 0.02) == pytest.approx(1 + 0.02 * largest_normal(128))
    assert straggling(128, 0.0) == 1


def test_operators_of_a_large_job_take_as_long_as_on_its_slowest_gpu() -> None:
    """The same product, in a job of one rank and of 128."""
    square = TensorMeta((4096, 4096), (4096, 1), "bfloat16")
    product = Signature("aten.mm.default", (square, square), (square,))
    small, large = (
        trace_of([Op(0, 0, 0, Phase.FORWARD, 0, (0, 1), (2,))], signatures=(product,), world_size=n) for n in (1, 128)
    )
    ratio = price(large, H100).event_ms.sum() / price(small, H100).event_ms.sum()
    assert ratio == pytest.approx(straggling(128))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("gpu", ["l40s", "h100-pcie-80gb", "t4"])
def test_without_nvlink_a_ring_over_nodes_is_no_faster_than_one_nodes(gpu: str, kind: str) -> None:
    """What leaves for the network takes the links that join the GPUs: two nodes of eight pass on as much as one, for all of
    15/16 of the bytes in place of 7/8.
    """
    hardware = load_hardware(gpu)
    model = FlowModel(hardware)
    one, two = (model.estimate(kind, 2**30, default_cluster(hardware, n).place(range(n))) for n in (8, 16))
    assert two.ms == pytest.approx(one.ms * (15 / 16) / (7 / 8), rel=0.01)


def test_links_that_nobody_has_measured() -> None:
    """NVLink of a V100 takes the curve of the next generation; more than eight GPUs on NVLink get what eight do."""
    volta, many = load_hardware("v100-sxm2-16gb"), load_hardware("gb200-186gb")
    estimate = FlowModel(volta).estimate("all_gather", 2**30, default_cluster(volta, 8).place(range(8)))
    assert estimate.source == "log-sigmoid@NVLink3" and 0.6 < 2**30 * 7 / 8 / 150e9 / (estimate.ms / 1e3) < 0.9
    eight, all_of_them = (default_cluster(many, n).place(range(n)) for n in (8, 72))
    inside = LogSigmoid(many)
    assert inside.bandwidth("all_gather", 2**30, eight) == inside.bandwidth("all_gather", 2**30, all_of_them)
