"""Times the collectives between the ranks that torchrun started, inside one node.

Every rank calls `measure_collectives`; all get the same table. A transfer's time is the slowest rank's, the median over
repetitions, each begun at a barrier (NCCL: by CUDA events, behind a kernel that waits while the host launches the transfer).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_REPEATS = 7
_WAIT_CYCLES = 1_000_000  # half a millisecond
_SIZES = tuple(2**n for n in range(10, 29, 2))
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def measure_collectives(
    device: torch.device, seconds: float, *, largest_bytes: int = _SIZES[-1]
) -> tuple[dict[tuple[str, int, int], float], dict[str, str]]:
    """(kind, ranks, bytes) -> ms, and why what is missing is missing. The ranks stop together when the time is up."""
    found: dict[tuple[str, int, int], float] = {}
    missing: dict[str, str] = {}
    ranks, end = dist.get_world_size(), time.monotonic() + seconds
    for nbytes in (size for size in _SIZES if size <= largest_bytes):
        for kind in KINDS:
            if kind in missing:
                continue
            if _agreed(time.monotonic() > end, device):
                missing[f"{kind} from {nbytes} bytes"] = "the time ran out"
                return found, missing
            try:
                run = _transfer(kind, max(nbytes // 4 // ranks, 1) * ranks, device)
                run()
            except (RuntimeError, NotImplementedError, ValueError) as e:  # the backend does not have it
                missing[kind] = str(e).splitlines()[0]
                continue
            found[kind, ranks, nbytes] = _time(run, device)
    return found, missing


def _agreed(mine: bool, device: torch.device) -> bool:
    """Whether any rank says so."""
    flag = torch.tensor([float(mine)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _transfer(kind: str, elements: int, device: torch.device) -> Callable[[], Any]:
    """`elements` is the size in nccl-tests' sense, a multiple of the ranks."""
    ranks = dist.get_world_size()
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    other = torch.ones_like(whole)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    return calls[kind]


def _time(run: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_WAIT_CYCLES)
            first.record()
            run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(float(slowest.item()), 1e-6)
