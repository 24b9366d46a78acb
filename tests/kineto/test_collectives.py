"""Collectives of several ranks: sizes, groups, and waiting apart from transfer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.kineto import TransferTimes, attribute, read_profile, transfers

Make = Callable[..., Any]
NOTED = {
    "Collective name": "_allgather_base",
    "In msg nelems": 1024,
    "Out msg nelems": 4096,
    "dtype": "BFloat16",
    "Group size": 4,
    "Process Group Ranks": "[0, 2, 4, 6]",
}


def _found(traces: dict[int, Any], path: Path, world: int) -> tuple[tuple[TransferTimes, ...], tuple[int, float]]:
    kernels = {
        rank: attribute(read_profile(trace.save(path / f"{rank}.json"))).collectives for rank, trace in traces.items()
    }
    return transfers(kernels, world)


def test_waiting_is_split_from_transfer(tmp_path: Path, trace_file: Make) -> None:
    """Three ranks begin at 0, 30 and 90 us and end at 100: the transfer takes 10, and they waited 90, 60 and 0.

    The clock of the last rank is a second ahead.
    """
    traces = {}
    for rank, start, clock in ((0, 0.0, 0.0), (2, 30.0, 0.0), (4, 90.0, 1e6)):
        traces[rank] = trace_file(rank=rank, world_size=8)
        for step in (0.0, 1000.0):
            begin = start + step + clock
            traces[rank].kernel("ncclDevKernel_AllGather_RING_LL", begin - 5, begin, 100 - start, **NOTED)
    found, lost = _found(traces, tmp_path, 8)
    assert len(found) == 1
    assert found[0][:4] == ("all_gather", 8192, (0, 2, 4, 6), 2)
    assert found[0].transfer_us == pytest.approx(10.0)
    assert found[0].waited_us == pytest.approx(50.0)
    assert found[0].traced == 3
    assert lost == (0, 0.0)


def test_one_rank_gives_an_upper_bound(tmp_path: Path, trace_file: Make) -> None:
    """The fastest of equal transfers counts as transfer, what the others took longer as waiting."""
    trace = trace_file(rank=0, world_size=8)
    for i, us in enumerate((50.0, 20.0, 80.0)):
        trace.kernel("ncclDevKernel_AllGather_RING_LL", 1000 * i, 1000 * i + 10, us, **NOTED)
    (found,), _ = _found({0: trace}, tmp_path, 8)
    assert (found.transfer_us, found.waited_us, found.traced) == (20.0, 30.0, 1)


def test_old_traces_describe_a_collective_by_its_annotation(tmp_path: Path, trace_file: Make) -> None:
    """The size is that of the annotation's tensor, the group that of the world; a kernel that nothing describes is counted."""
    trace = trace_file(rank=3, world_size=8)
    trace.op("nccl:all_reduce", 0, 20, [((1000,), "float")], category="user_annotation")
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 10, 30, 40)
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 100, 130, 7)
    (found,), lost = _found({3: trace}, tmp_path, 8)
    assert (found.kind, found.nbytes, found.ranks) == ("all_reduce", 4000, tuple(range(8)))
    assert lost == (1, 7.0)


def test_ranks_of_different_steps_are_left_apart(tmp_path: Path, trace_file: Make) -> None:
    """If one rank's trace holds another number of transfers they cannot be matched, and each stands for itself."""
    traces = {}
    for rank, count in ((0, 1), (2, 2)):
        traces[rank] = trace_file(rank=rank, world_size=8)
        for i in range(count):
            traces[rank].kernel("ncclDevKernel_AllGather_RING_LL", 1000 * i, 1000 * i + 1, 30, **NOTED)
    (found,), _ = _found(traces, tmp_path, 8)
    assert (found.calls, found.traced) == (3, 1)
