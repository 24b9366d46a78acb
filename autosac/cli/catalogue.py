"""``autosac gpus`` and ``autosac clusters``: what is known of GPUs and of clusters of them, all or one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autosac.display.tables import Table, fact_grid
from autosac.estimator import Cluster, Hardware, known_clusters, known_hardware, load_cluster, load_hardware
from autosac.quantities import format_bytes

_RATES = (("bfloat16", "bf16"), ("float8", "fp8"), ("tf32", "tf32"), ("float32", "fp32"))


def gpus(arguments: argparse.Namespace) -> None:
    """Run ``autosac gpus``."""
    names = known_hardware() if arguments.name is None else (arguments.name,)
    found = [load_hardware(name) for name in names]
    _show(
        arguments, [asdict(gpu) for gpu in found], gpu_table(found) if arguments.name is None else gpu_facts(found[0])
    )


def clusters(arguments: argparse.Namespace) -> None:
    """Run ``autosac clusters``."""
    names = known_clusters() if arguments.name is None else (arguments.name,)
    found = [load_cluster(name) for name in names]
    shown = cluster_table(found) if arguments.name is None else cluster_facts(found[0])
    _show(arguments, [asdict(cluster) for cluster in found], shown)


def _show(arguments: argparse.Namespace, documents: list[dict[str, Any]], shown: RenderableType) -> None:
    if arguments.json:
        print(json.dumps(documents if arguments.name is None else documents[0], indent=1))
        return
    from autosac.report import summaries as reports

    reports.console().print(shown)


def gpu_table(found: Sequence[Hardware]) -> RenderableType:
    """One row for each GPU."""
    table = Table(title="GPUs")
    table.add_column("name", no_wrap=True)
    for heading in ("memory GiB", "memory GB/s", *(short for _, short in _RATES[:2])):
        table.add_column(heading, justify="right")
    table.add_column("link GB/s")
    table.add_column("source")
    for gpu in found:
        rates = [_rate(gpu, name) for name, _ in _RATES[:2]]
        link = f"{gpu.link} {gpu.link_gbps:g}"
        memory = f"{gpu.usable_bytes / 2**30:.1f}", f"{gpu.mem_bandwidth_gbps:,.0f}"
        table.add_row(gpu.name, *memory, *rates, link, gpu.source)
    notes = (
        "memory: what CUDA reports as total; bf16, fp8: peak TFLOP/s, dense; links: one direction; 1 GB is 10^9 bytes",
        "autosac gpus NAME shows all that is known about one; --gpu also takes the beginning of a name, or a profile file",
    )
    return Group(table, *(Text(f"- {note}") for note in notes))


def gpu_facts(gpu: Hardware) -> RenderableType:
    """All that is known of one GPU that people can use."""
    grid = fact_grid()
    known = (*_RATES, ("float16", "fp16")) if gpu.half == "float16" else _RATES
    rates = ", ".join(f"{short} {_rate(gpu, name)}" for name, short in known if gpu.multiplies(name))
    major, minor = gpu.compute_capability
    models = f"fitted to {gpu.models_of}" if gpu.models_of == gpu.name else f"scaled from {gpu.models_of}"
    rows = {
        "name": gpu.name,
        "description": gpu.description,
        "device name": gpu.device_name,
        "source": gpu.source,
        "memory": f"{format_bytes(gpu.usable_bytes)} as CUDA reports it, {gpu.memory_bytes / 2**30:g} GiB nominal",
        "memory bandwidth": f"{gpu.mem_bandwidth_gbps:,.0f} GB/s",
        "L2 cache": format_bytes(gpu.l2_bytes),
        "peak rates": f"{rates} TFLOP/s (dense)",
        "processors": f"{gpu.sm_count}, up to {gpu.boost_mhz:g} MHz, {gpu.tdp_w:g} W, compute capability {major}.{minor}",
        "link to other GPUs": f"{gpu.link}, {gpu.link_gbps:g} GB/s in one direction",
        "link to the host": f"PCIe, {gpu.pcie_gbps:g} GB/s in one direction",
        "usual cluster": gpu.cluster or "8 GPUs per node, one 200-Gb/s network adapter per two GPUs",
        "cost models": models if gpu.models_of else "roofline",
        "outside of PyTorch": f"{format_bytes(gpu.context_bytes)} (CUDA context)",
        "calibrated": gpu.calibrated,
        "corrected": gpu.corrected,
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(value))
    return grid


def cluster_table(found: Sequence[Cluster]) -> RenderableType:
    """One row for each cluster."""
    table = Table(title="Clusters")
    table.add_column("name", no_wrap=True)
    for heading in ("GPUs per node", "within a node GB/s", "network GB/s"):
        table.add_column(heading, justify="right")
    for heading in ("description", "source"):
        table.add_column(heading)
    for cluster in found:
        table.add_row(
            cluster.name,
            str(cluster.gpus_per_node),
            f"{cluster.intra_gbps:g}",
            f"{cluster.inter_gbps:g}",
            cluster.description,
            cluster.source,
        )
    note = (
        "in one direction; within a node: per GPU, network: per node; a job has as many nodes as its world size needs"
    )
    return Group(table, Text(f"- {note}"))


def cluster_facts(cluster: Cluster) -> RenderableType:
    """All that is known of one cluster."""
    grid = fact_grid()
    racks = f"{cluster.nodes_per_rack} nodes each, {cluster.oversubscription:g}-fold oversubscription between them"
    leaves = "one for each rail of a rack" if cluster.rail_optimized else "one for each rack"
    paths = cluster.uplinks_per_leaf
    leaves += f", {paths} uplinks chosen by hashing" if paths else ", traffic spread evenly over their uplinks"
    rows = {
        "name": cluster.name,
        "description": cluster.description,
        "source": cluster.source,
        "GPUs per node": str(cluster.gpus_per_node),
        "within a node": f"{cluster.intra_gbps:g} GB/s per GPU, {cluster.intra_latency_us:g} us",
        "GPUs connected by": {"switch": "a switch", "mesh": "a link for each pair of GPUs"}[cluster.intra_links],
        "network": f"{cluster.inter_gbps:g} GB/s per node, {cluster.inter_latency_us:g} us",
        "racks": racks if cluster.nodes_per_rack else "",
        "leaf switches": leaves if cluster.nodes_per_rack else "",
        "spread of GPUs' speeds": f"{cluster.gpu_spread:.1%} (standard deviation)",
        "NCCL's buffers": f"{format_bytes(cluster.nccl_buffer_bytes)} per communicator",
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(value))
    return grid


def _rate(gpu: Hardware, arithmetic: str) -> str:
    """In TFLOP/s; a dash for what the GPU has no rate of its own for."""
    rate = dict(gpu.peak_tflops).get(arithmetic)
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:g}"
