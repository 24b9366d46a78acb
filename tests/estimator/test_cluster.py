"""Clusters: presets, files, and what a process group sees of the topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autosac.errors import HardwareError
from autosac.estimator import Cluster, default_cluster, known_clusters, load_cluster, load_hardware


def _cluster(**changes: Any) -> Cluster:
    fields: dict[str, Any] = {"nodes": 4, "gpus_per_node": 8, "nodes_per_rack": 2, "oversubscription": 4.0} | changes
    return Cluster(name="c", intra_gbps=400.0, intra_latency_us=1.0, inter_gbps=200.0, inter_latency_us=5.0, **fields)


def test_presets_load_under_their_own_names() -> None:
    """Every preset that the documentation names is there."""
    wanted = {"dgx-a100", "hgx-h100", "hgx-h200", "hgx-b200", "aws-p4d", "aws-p5", "gcp-a3-mega"}
    assert wanted <= set(known_clusters())
    for name in known_clusters():
        assert load_cluster(name).name == name


@pytest.mark.parametrize(("name", "pair"), [("hgx-a100-4", 100.0), ("hgx-h100-4", 150.0), ("hgx-h200-4", 150.0)])
def test_boards_of_four_have_no_switch(name: str, pair: float) -> None:
    """Two of their GPUs have a third of the links, all four have all."""
    board = load_cluster(name)
    assert [board.place(range(n)).intra_gbps for n in (2, 4)] == pytest.approx([pair, 3 * pair])


def test_default_cluster_holds_the_world() -> None:
    """20 ranks on eight-GPU nodes need three nodes; a GPU without a preset gets generic nodes."""
    assert default_cluster(load_hardware("h100-sxm-80gb"), 20).nodes == 3
    assert default_cluster(load_hardware("rtx-4090"), 1).intra_gbps == 31.0


def test_placement_of_a_group_inside_a_node() -> None:
    """Ranks 0 to 7 share node 0."""
    place = _cluster().place(range(8))
    assert (place.ranks, place.nodes, place.ranks_per_node, place.racks) == (8, 1, 8, 1)


def test_placement_across_nodes_gets_its_share_of_the_network() -> None:
    """One rank of each of two nodes: an eighth of a node's 200 GB/s."""
    place = _cluster().place((3, 11))
    assert (place.nodes, place.ranks_per_node, place.inter_gbps) == (2, 1, 25.0)


def test_placement_across_racks_is_oversubscribed() -> None:
    """All 32 ranks cross racks of two nodes: 200 / 4 GB/s."""
    place = _cluster().place(range(32))
    assert (place.nodes, place.racks, place.inter_gbps) == (4, 2, 50.0)


def test_a_mesh_gives_a_group_its_own_links_only() -> None:
    """Four of eight GPUs that are joined in pairs have three of seven links; a pair has one."""
    mesh = _cluster(intra_links="mesh")
    assert [mesh.place(range(n)).intra_gbps for n in (8, 4, 2)] == pytest.approx([400, 400 * 3 / 7, 400 / 7])
    assert _cluster().place(range(2)).intra_gbps == 400


def test_a_users_cluster_file(tmp_path: Path) -> None:
    """A file may start from a preset."""
    path = tmp_path / "c.toml"
    path.write_text('base = "hgx-h100"\nname = "ours"\ninter_gbps = 100.0\n')
    ours = load_cluster(str(path))
    assert (ours.name, ours.inter_gbps, ours.gpus_per_node) == ("ours", 100.0, 8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("intra_gbps = 0", "intra_gbps must be a number from 0.0001 to 1e\\+07, not 0$"),
        ("inter_gbps = inf", "inter_gbps must be a number from 0.0001 to 1e\\+07, not inf$"),
        ("gpus_per_node = -8", "gpus_per_node must be a whole number from 1 to 4096, not -8$"),
        ("oversubscription = 0.5", "oversubscription must be a number from 1 to 1e\\+07, not 0.5$"),
        ("racks = 3", "racks is not a known key$"),
        ("inter_gpbs = 100.0", "inter_gpbs is not a known key: did you mean inter_gbps\\?$"),
        ('intra_links = "ring"', "intra_links must be switch or mesh, not 'ring'"),
        ("rail_optimized = 1", "rail_optimized must be true or false, not 1"),
        ("uplinks_per_leaf = -1", "uplinks_per_leaf must be a whole number from 0 to 4096, not -1$"),
        ("uplinks_per_leaf = 8", "uplinks_per_leaf needs nodes_per_rack"),
        ("gpu_spread = 0.6", "gpu_spread must be 0 or a number from 0.0001 to 0.5, not 0.6$"),
    ],
)
def test_a_wrong_cluster_file_names_the_key(tmp_path: Path, line: str, message: str) -> None:
    """Zero bandwidth and the like are errors on one line."""
    path = tmp_path / "c.toml"
    path.write_text(f'base = "hgx-h100"\n{line}\n')
    with pytest.raises(HardwareError, match=message):
        load_cluster(str(path))


def test_an_unknown_cluster_lists_the_presets() -> None:
    """The message names the presets."""
    with pytest.raises(HardwareError, match=r"unknown cluster 'moon'.*hgx-h100"):
        load_cluster("moon")


def test_a_world_of_no_ranks_is_refused() -> None:
    """A cluster cannot be sized for zero ranks."""
    with pytest.raises(HardwareError, match="at least 1"):
        _cluster().sized(0)
