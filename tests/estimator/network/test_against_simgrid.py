"""The engine and the flow model against SimGrid's fluid network, on 20 small topologies (skipped without SimGrid)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autosac.estimator import Cluster, FlowModel, load_hardware
from autosac.estimator.log_sigmoid import Curve
from autosac.runtime_sim.engine import Execution
from autosac.runtime_sim.program import Engine, HostPoint, Leg, Program, Transfer

pytest.importorskip("simgrid")
RUNNER = Path(__file__).parents[2] / "support" / "simgrid_flows.py"
FULL = Curve(latency_us=0.0, hop_us=0.0, share=1.0, steepness=5.0, midpoint=-50.0)
GB = 10**9


def simgrid(networks: list[dict[str, Any]]) -> list[list[float]]:
    """When each flow of each network ends there, in seconds."""
    done = subprocess.run(
        [sys.executable, str(RUNNER)], input=json.dumps(networks), capture_output=True, text=True, check=True
    )
    result: list[list[float]] = json.loads(done.stdout)
    return result


def clusters() -> list[Cluster]:
    """20 clusters of 4 to 32 GPUs, with and without racks, rails and oversubscription."""
    chance = random.Random(7)
    return [
        Cluster(
            name=f"c{i}",
            nodes=chance.choice((2, 4, 8)),
            gpus_per_node=chance.choice((2, 4)),
            intra_gbps=chance.choice((100.0, 400.0)),
            intra_latency_us=0.0,
            inter_gbps=chance.choice((20.0, 50.0, 100.0)),
            inter_latency_us=0.0,
            nodes_per_rack=chance.choice((0, 1, 2)),
            oversubscription=chance.choice((1.0, 2.0, 4.0)),
            rail_optimized=chance.random() < 0.5,
        )
        for i in range(20)
    ]


def links(cluster: Cluster) -> dict[str, float]:
    """Adapters, and uplinks and downlinks of every leaf, in GB/s."""
    adapter = cluster.inter_gbps / cluster.gpus_per_node
    found = {
        f"{way}{n}.{g}": adapter for n in range(cluster.nodes) for g in range(cluster.gpus_per_node) for way in "oi"
    }
    if cluster.nodes_per_rack:
        rails = cluster.gpus_per_node if cluster.rail_optimized else 1
        below = cluster.nodes_per_rack * cluster.gpus_per_node // rails
        racks = cluster.nodes // cluster.nodes_per_rack
        above = below * adapter / cluster.oversubscription
        found |= {f"{way}{r}.{rail}": above for r in range(racks) for rail in range(rails) for way in "ud"}
    return found


def route(cluster: Cluster, source: tuple[int, int], target: tuple[int, int]) -> list[str]:
    """From a GPU's adapter (node, number) to that of another node; rails are kept, as with NCCL's PXN."""
    (a, g), (b, h) = source, target
    g = h if cluster.rail_optimized else g
    path = [f"o{a}.{g}"]
    racks = (a // cluster.nodes_per_rack, b // cluster.nodes_per_rack) if cluster.nodes_per_rack else (0, 0)
    if racks[0] != racks[1]:
        path += [
            f"u{racks[0]}.{g if cluster.rail_optimized else 0}",
            f"d{racks[1]}.{h if cluster.rail_optimized else 0}",
        ]
    return [*path, f"i{b}.{h}"]


def program_of(network: dict[str, Any]) -> Program:
    """The network's flows as transfers of one rank each, which start with delays."""
    names = {name: i for i, name in enumerate(network["links"])}
    program = Program(ranks=list(range(len(network["flows"]))))
    for i, flow in enumerate(network["flows"]):
        limit = min(network["links"][name] for name in flow["links"])
        program.rank.append(i)
        program.stream.append(0)
        program.event.append(0)
        program.step.append(0)
        program.engine.append(Engine.COMMUNICATION)
        program.ms.append(0.0)
        program.dependencies.append(())
        program.slowdowns.append((1.0, 1.0))
        program.legs[i] = [Leg(0, i)]
        uses = {names[name]: 1 / network["links"][name] for name in flow["links"]}
        ms = flow["gb"] / limit * 1e3
        program.transfers.append(
            Transfer(
                members=(i,), ms=ms, uses=uses, limit=limit, ranks=tuple(range(len(network["flows"]))), slowdown=1.0,
                inter_node=True, label="", missing=(),
            )
        )  # fmt: skip
        program.points.append([HostPoint(flow["start"] * 1e3, i, (), 0.0, 0)])
        program.stream_names.append(["s"])
    return program


def test_the_engine_shares_links_as_simgrid_does() -> None:
    """Random messages over every topology, which begin at different times, end when they do in SimGrid."""
    chance = random.Random(11)
    networks = []
    for cluster in clusters():
        gpus = [(n, g) for n in range(cluster.nodes) for g in range(cluster.gpus_per_node)]
        flows: list[dict[str, Any]] = []
        while len(flows) < 12:
            source, target = chance.sample(gpus, 2)
            if source[0] != target[0]:
                size, start = chance.choice((1, 2, 5)), chance.choice((0.0, 0.05, 0.2))
                flows.append({"links": route(cluster, source, target), "gb": size, "start": start})
        networks.append({"links": links(cluster), "flows": flows})
    for network, expected in zip(networks, simgrid(networks), strict=True):
        execution = Execution(program_of(network), 0.0, 1024)
        assert execution.run()
        assert [ms / 1e3 for ms in execution.transfer_end] == pytest.approx(expected, rel=1e-5)


def test_collectives_take_as_long_as_their_messages_in_simgrid() -> None:
    """Rings and all-to-alls of all groups at once, so large that latencies do not count: their fair part is what they get."""
    model = FlowModel(load_hardware("h100-sxm-80gb"), network=FULL)
    networks, predicted = [], []
    for i, cluster in enumerate(clusters()):
        ranks = range(cluster.world_size) if i % 2 else range(0, cluster.world_size, cluster.gpus_per_node)
        place = cluster.place(ranks)
        size, kind = 1000 * GB, "all_gather" if i % 3 else "all_to_all"
        networks.append({"links": links(cluster), "flows": list(_messages(cluster, kind, size, len(ranks)))})
        predicted.append(model.estimate(kind, size, place).ms / 1e3)
    for cluster, expected, seconds in zip(clusters(), simgrid(networks), predicted, strict=True):
        assert seconds == pytest.approx(max(expected), rel=1e-3), cluster


def _messages(cluster: Cluster, kind: str, size: int, ranks: int) -> list[dict[str, Any]]:
    """What leaves nodes, for all sibling groups: a ring through each adapter, or a message for each pair of ranks."""
    numbers = range(cluster.gpus_per_node)
    nodes, inside = cluster.nodes, ranks // cluster.nodes
    if kind == "all_gather":
        part = (ranks - 1) / ranks * size / inside / GB
        ends = [((n, g), ((n + 1) % nodes, g), part) for n in range(nodes) for g in numbers]
    else:
        mates = [(g, h) for g in numbers for h in numbers if inside > 1 or g == h]
        ends = [
            ((a, g), (b, h), size / ranks / GB) for a in range(nodes) for b in range(nodes) for g, h in mates if a != b
        ]
    return [{"links": route(cluster, source, target), "gb": gb, "start": 0.0} for source, target, gb in ends]
