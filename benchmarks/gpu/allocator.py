"""Records what PyTorch's caching allocator does on this device, and replays it through the simulated one.

    python -m benchmarks.gpu.allocator --device cuda --out DIR

Two recordings, each for the settings of `_SETTINGS`: a random sequence of allocations and frees of all pools' sizes, and two
training steps of a small Llama. A recording is `torch.cuda.memory`'s own history: blocks given and taken back, segments
reserved and released. The replay makes the same requests of `autosac.memory_sim`'s allocator; after each, its reserved bytes
are held against the device's. Writes ``allocator.json``: a row for each recording, with its requests as [block, bytes (0:
freed), bytes reserved after it], so that a difference can be studied without the device. With ``--device cpu`` there is no
such allocator, and the rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autosac.memory_sim import AllocatorConfig
from autosac.memory_sim.allocator import CachingAllocator
from autosac.memory_sim.allocator_blocks import Block
from benchmarks.gpu.common import ROOT, write_result

_SETTINGS = ("", "expandable_segments:True")
_MOST_ENTRIES = 200_000
_MIB = 2**20
_LLAMA = {"layers": 4, "dim": 512, "heads": 8, "kv_heads": 4, "ffn_dim": 1536, "vocabulary": 8192}


class Request(NamedTuple):
    """A block that is given (`nbytes` above 0) or taken back (0), and what the device has reserved after it."""

    block: int
    nbytes: int
    reserved_bytes: int


def requests_of(history: Sequence[Mapping[str, Any]]) -> Iterator[Request]:
    """The requests of an allocator's history; blocks are numbered in the order in which they are given."""
    numbers: dict[int, int] = {}
    made = reserved = 0
    for entry in history:
        action, address, nbytes = entry["action"], entry["addr"], entry["size"]
        if action in ("segment_alloc", "segment_map"):
            reserved += nbytes
        elif action in ("segment_free", "segment_unmap"):
            reserved -= nbytes
        elif action == "alloc":
            numbers[address] = made
            made += 1
            yield Request(numbers[address], nbytes, reserved)
        elif action == "free_completed" and address in numbers:
            yield Request(numbers.pop(address), 0, reserved)


def replay(requests: Sequence[Request], settings: str) -> dict[str, Any]:
    """The same requests of the simulated allocator: how many leave it with other reserved bytes, and the two peaks."""
    simulated = CachingAllocator(AllocatorConfig.parse(settings))
    blocks: dict[int, Block] = {}
    differing, first, peak = 0, -1, 0
    for position, request in enumerate(requests):
        if request.nbytes:
            blocks[request.block] = simulated.malloc(request.nbytes)
        else:
            simulated.free(blocks.pop(request.block))
        peak = max(peak, simulated.reserved_bytes)
        if simulated.reserved_bytes != request.reserved_bytes:
            differing += 1
            first = position if first < 0 else first
    measured = max((request.reserved_bytes for request in requests), default=0)
    return {
        "requests": len(requests),
        "differing": differing,
        "first_difference": first,
        "predicted": {"peak_reserved_bytes": peak},
        "measured": {"peak_reserved_bytes": measured},
    }


# ---- the child: a process of its own, so that its allocator is empty -------------------------------------------


def record(name: str) -> list[Request]:
    """The requests of one recording on the current CUDA device."""
    import torch

    work = {"random": _random, "training": _training}[name]
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=_MOST_ENTRIES)
    work()
    torch.cuda.synchronize()
    return list(requests_of(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]))


def _random() -> None:
    import torch

    source = random.Random(0)
    alive: list[torch.Tensor] = []
    for _ in range(2000):
        if alive and source.random() < 0.48:
            alive.pop(source.randrange(len(alive)))
        else:
            nbytes = source.randrange(1, source.choice((4096, _MIB, 8 * _MIB, 40 * _MIB)))
            alive.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))


def _training() -> None:
    import torch

    from autosac.bench.suite import make_step_of

    make_step: Callable[..., Any] = make_step_of(
        ROOT,
        "benchmarks/table_5_5/llama.py:make_step",
        {**_LLAMA, "batch_size": 4, "seq_len": 512, "dtype": "bfloat16"},
    )
    _, step = make_step(torch.device("cuda"))
    for _ in range(2):
        step()


# ---- the parent ------------------------------------------------------------------------------------------------


def row_of(name: str, settings: str, device: str) -> dict[str, Any]:
    """One recording and its replay, or why there is none."""
    row: dict[str, Any] = {"model": f"allocator: {name}", "policy": settings or "default settings", "predicted": {}}
    if device == "cpu":
        return row | {"error": "a CPU has no caching allocator"}
    with tempfile.TemporaryDirectory(prefix="autosac-") as folder:
        file = Path(folder) / "requests.json"
        command = [sys.executable, "-m", "benchmarks.gpu.allocator", "--child", name, "--out", str(file)]
        environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
        if settings:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = settings
        try:
            child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
        except subprocess.TimeoutExpired:
            return row | {"error": "took longer than 120 s"}
        if child.returncode or not file.exists():
            return row | {"error": (child.stderr.strip().splitlines() or ["the run ended early"])[-1][:300]}
        requests = [Request(*numbers) for numbers in json.loads(file.read_text())]
    return row | replay(requests, settings) | {"recorded": [list(request) for request in requests]}


def main() -> None:
    """Record, replay, write after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        arguments.out.write_text(json.dumps(record(arguments.child)))
        return
    rows = []
    for name in ("random", "training"):
        for settings in _SETTINGS:
            rows.append(row_of(name, settings, arguments.device))
            print({key: value for key, value in rows[-1].items() if key != "recorded"}, flush=True)
            write_result(arguments.out / "allocator.json", arguments.device, rows)


if __name__ == "__main__":
    main()
