"""Collectives of one or several ranks: what they moved, how long the transfer took, and how long ranks waited for the last.

A collective's kernel begins when its rank is ready and ends with all others. With all ranks' traces the transfer begins
when the last rank does, and every rank's time before that is waiting. The clocks of ranks on different machines are
brought together by the ends of the collectives that they share. The trace of one rank alone does not tell how long it
waited: of equal transfers the fastest is then taken for the transfer, which is an upper bound.
"""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autosac.kineto.reader import HostEvent, Kernel

_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "_allgather_base": "all_gather",
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
_ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "float64", "int64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "half", "short", "c10::bfloat16", "c10::half", "float16"), 2),
}
_MOST_RANKS = 2**20


class TransferTimes(NamedTuple):
    """Equal transfers: of `nbytes` (nccl-tests' sense of size) among `ranks`, how often, and medians in microseconds.

    `waited_us` is a rank's mean waiting, `traced` the number of ranks whose traces say so.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    calls: int
    transfer_us: float
    waited_us: float
    traced: int


class _Call(NamedTuple):
    rank: int
    kind: str
    nbytes: int
    group: tuple[int, ...]
    stream: int
    begin_us: float
    end_us: float


def transfers(
    found: Mapping[int, Sequence[tuple[Kernel, HostEvent | None]]], world_size: int
) -> tuple[tuple[TransferTimes, ...], tuple[int, float]]:
    """The collectives in the traces of these ranks, and (how many, microseconds) could not be read.

    A collective that is not described, or whose group the trace does not hold in a world of unknown size, cannot be read.
    """
    calls: dict[int, list[_Call]] = {}
    lost, lost_us = 0, 0.0
    for rank, kernels in found.items():
        for kernel, event in kernels:
            call = _call(rank, kernel, event, world_size)
            if call is None:
                lost, lost_us = lost + 1, lost_us + kernel.us
            else:
                calls.setdefault(rank, []).append(call)
    matched = _matched(calls)
    offsets = _clock_offsets(matched)
    groups: dict[tuple[str, int, tuple[int, ...]], list[tuple[float, float, int]]] = {}
    for same in matched:
        starts = [call.begin_us - offsets.get(call.rank, 0.0) for call in same]
        ends = [call.end_us - offsets.get(call.rank, 0.0) for call in same]
        moved = max(statistics.median(ends) - max(starts), 0.0)
        waited = statistics.fmean(max(starts) - start for start in starts)
        key = (same[0].kind, same[0].nbytes, same[0].group)
        groups.setdefault(key, []).append((moved, waited, len(same)))
    return tuple(_transfer(key, rows) for key, rows in sorted(groups.items())), (lost, lost_us)


def _transfer(key: tuple[str, int, tuple[int, ...]], rows: Sequence[tuple[float, float, int]]) -> TransferTimes:
    traced = min(row[2] for row in rows)
    moved = [row[0] for row in rows]
    if traced > 1:
        typical, waited = statistics.median(moved), statistics.fmean(row[1] for row in rows)
    else:
        typical = min(moved)
        waited = statistics.fmean(moved) - typical
    return TransferTimes(*key, len(rows), typical, waited, traced)


def _matched(calls: Mapping[int, list[_Call]]) -> list[list[_Call]]:
    """The calls of all ranks that are one collective: the n-th of its kind, size and group on every rank that was traced.

    Ranks whose numbers of such calls differ were not traced over the same steps; those are left apart.
    """
    rows: dict[tuple[str, int, tuple[int, ...]], dict[int, list[_Call]]] = {}
    for rank, mine in calls.items():
        for call in sorted(mine, key=lambda c: c.begin_us):
            rows.setdefault((call.kind, call.nbytes, call.group), {}).setdefault(rank, []).append(call)
    found: list[list[_Call]] = []
    for by_rank in rows.values():
        if len({len(mine) for mine in by_rank.values()}) == 1:
            found += [list(same) for same in zip(*by_rank.values(), strict=True)]
        else:
            found += [[call] for mine in by_rank.values() for call in mine]
    return found


def _clock_offsets(matched: Sequence[Sequence[_Call]]) -> dict[int, float]:
    """What each rank's clock is ahead of the first rank's: the median difference of the ends of shared collectives."""
    differences: dict[int, list[float]] = {}
    ranks = sorted({call.rank for same in matched if len(same) > 1 for call in same})
    for same in matched:
        ends = {call.rank: call.end_us for call in same}
        if ranks and ranks[0] in ends:
            for rank, end in ends.items():
                differences.setdefault(rank, []).append(end - ends[ranks[0]])
    return {rank: statistics.median(values) for rank, values in differences.items()}


# ---- one call --------------------------------------------------------------------------------------------------


def _call(rank: int, kernel: Kernel, event: HostEvent | None, world_size: int) -> _Call | None:
    """What a kernel moved, from its own notes, those of the process group, or the annotation of the call."""
    args: Mapping[str, Any] = kernel.args or (event.args if event is not None else {})
    if "Collective name" in args:
        kind = _KINDS.get(str(args["Collective name"]).lower())
        elements = args.get("Out msg nelems" if kind == "all_gather" else "In msg nelems")
        item = _ITEM_BYTES.get(str(args.get("dtype", "")).lower(), 1)
    elif event is not None and event.name.startswith(("nccl:", "rccl:")):
        kind = _KINDS.get(event.name.split(":", 1)[1].lower())
        dims, types = event.args.get("Input Dims"), event.args.get("Input type")
        elements, item = None, 1
        if isinstance(dims, list) and isinstance(types, list) and dims and types and isinstance(dims[0], list):
            elements, item = _product(dims[0]), _ITEM_BYTES.get(str(types[0]).lower(), 1)
        if kind == "all_gather" and type(elements) is int:
            elements *= world_size
    else:
        return None
    if kind is None or type(elements) is not int or not 0 < elements < 2**48:
        return None
    group = _group(args, world_size)
    return _Call(rank, kind, elements * item, group, kernel.stream, kernel.begin_us, kernel.end_us) if group else None


def _product(dims: Sequence[Any]) -> int | None:
    return math.prod(dims) if all(type(d) is int and d >= 0 for d in dims) else None


def _group(args: Mapping[str, Any], world_size: int) -> tuple[int, ...]:
    """The global ranks of the group; all of the world where nothing is said. Long lists are noted with an ellipsis."""
    size = args.get("Group size")
    size = size if type(size) is int and 0 < size <= _MOST_RANKS else world_size
    try:
        ranks = ast.literal_eval(str(args.get("Process Group Ranks", "")))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        ranks = None
    if isinstance(ranks, list) and len(ranks) == size and all(type(r) is int and 0 <= r < _MOST_RANKS for r in ranks):
        return tuple(ranks)
    return tuple(range(size)) if size > 1 else ()
