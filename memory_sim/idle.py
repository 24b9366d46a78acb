"""What the caching allocator holds without anybody using it, when it has reserved the most.

Reserved memory grows when no free block serves a request. At that moment no free block could be used, for one of
these reasons:

- it is cached for another stream: blocks are handed out on the stream only that they were made for;
- it is in the other pool: requests of up to 1 MiB and larger ones do not share memory;
- it is a hole, smaller than the request, between tensors that are alive (on the request's own stream and in its pool).

Beside free blocks, what tensors take is rounded up. The peak of *active* memory can be at another moment; the rest of the
difference between both peaks is what was not active yet, or not any more, when reserved memory grew:

    reserved peak - active peak = free blocks - (active peak - active memory at that moment)

Small segments, of 2 MiB for tensors of up to 1 MiB, may be the last that a job reserves, long after all that matters. So the
moment is that of the last larger one, and the reserved memory is less than the peak by the small ones that follow it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise

from autosac.memory_sim.allocator import LogEntry
from autosac.memory_sim.allocator_blocks import Block
from autosac.memory_sim.allocator_config import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from autosac.memory_sim.attribution import module_name
from autosac.memory_sim.replay import Outcome, ReachedError, Replay, Verdict
from autosac.memory_sim.workspaces import WorkspaceModel
from autosac.trace import Collective, Op, Phase, Trace


class Cause(Enum):
    """Why a free block could not serve the request for which memory was reserved."""

    HOLE = "in pieces too small for the request"
    OTHER_STREAM = "cached for another stream"
    OTHER_POOL = "cached for tensors of another size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remnant:
    """A tensor that was freed, and how many bytes of free blocks it left."""

    nbytes: int
    op: str
    module: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePart:
    """The free blocks of one stream's pool, how many they are, and who left them, most bytes first.

    `is_small`: it serves requests of up to 1 MiB.
    """

    cause: Cause
    stream: str
    is_small: bool
    nbytes: int
    blocks: int
    remnants: tuple[Remnant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleMemory:
    """Memory at the moment at which the last larger segment of it was reserved; `parts` are all free blocks, most bytes first.

    `request`: what needed new memory. `rounding_bytes`: by what live blocks are larger than what was asked for.
    """

    reserved_bytes: int
    active_bytes: int
    active_peak_bytes: int
    rounding_bytes: int
    request: Verdict
    parts: tuple[IdlePart, ...]

    @property
    def idle_bytes(self) -> int:
        """All free blocks."""
        return sum(part.nbytes for part in self.parts)


def idle_memory(
    trace: Trace,
    reserved_peak_bytes: int,
    active_peak_bytes: int,
    *,
    config: AllocatorConfig | None = None,
    workspaces: WorkspaceModel | None = None,
    steps: int = 8,
    largest: int = 3,
) -> IdleMemory:
    """Reserved memory that cannot be used at the moment when `replay_allocator` (without a capacity) first reaches its peak,
    but for small segments.

    The arguments are those of `replay_allocator`, and both peaks those of its report. `largest`: the number of tensors to
    name for each part.
    """

    def reaching(until_bytes: int) -> Replay:
        replay = Replay(trace, config or AllocatorConfig(), None, 0, workspaces)
        replay.until_bytes = until_bytes
        with contextlib.suppress(ReachedError):
            replay.play(steps, history=True)
        return replay

    replay = reaching(reserved_peak_bytes)
    small_bytes = _last_small_bytes([reserved for _, _, reserved, *_ in replay.samples] + [reserved_peak_bytes])
    if small_bytes:
        replay = reaching(reserved_peak_bytes - small_bytes)
    allocator = replay.allocator
    request = replay.at(Outcome.FITS)
    is_small = allocator.config.round_size(request.requested_bytes) <= SMALL_BYTES
    stream = replay.now[1][4]
    free = [block for pool in (allocator.large, allocator.small) for block in pool.free_blocks()]
    left = _remnants(trace, free, allocator.log or [])
    names = stream_names(trace)
    parts: dict[tuple[int, bool], list[Block]] = {}
    for block in free:
        parts.setdefault((block.stream, block.pool.is_small), []).append(block)
    found = (
        IdlePart(
            cause=Cause.OTHER_STREAM if s != stream else Cause.HOLE if small == is_small else Cause.OTHER_POOL,
            stream=names[s] if s < len(names) else f"stream {s}",
            is_small=small,
            nbytes=sum(block.size for block in blocks),
            blocks=len(blocks),
            remnants=_largest(left[block.address] for block in blocks)[:largest],
        )
        for (s, small), blocks in parts.items()
    )
    live = [*replay.live.values(), *allocator.pending]
    return IdleMemory(
        reserved_bytes=allocator.reserved_bytes,
        active_bytes=allocator.active_bytes,
        active_peak_bytes=active_peak_bytes,
        rounding_bytes=sum(block.size - block.requested for block in live),
        request=request,
        parts=tuple(sorted(found, key=lambda part: -part.nbytes)),
    )


def _last_small_bytes(reserved_bytes: Sequence[int]) -> int:
    """What small segments took after the last larger one; 0 if there is no larger one."""
    last = reserved_bytes[-1]
    for before, after in pairwise(reversed(reserved_bytes)):
        if before - after > SMALL_SEGMENT_BYTES:
            return last - before
    return 0


def stream_names(trace: Trace) -> tuple[str, ...]:
    """The streams by what is made on them: the buffers of which collectives, if of any. The first is "compute"."""
    kinds: dict[int, dict[str, None]] = {}
    for event in trace.events:
        if type(event) is Collective:
            for storage in (*event.inputs, *event.outputs):
                if storage >= 0:
                    kinds.setdefault(trace.storages[storage].stream, {})[event.kind] = None
    return tuple(" and ".join(kinds[i]) if i and i in kinds else name for i, name in enumerate(trace.streams))


def _remnants(trace: Trace, free: Sequence[Block], log: Sequence[LogEntry]) -> dict[int, list[Remnant]]:
    """Of each free block, by address, what was freed there last: each byte belongs to the last tensor that held it."""
    blocks = sorted(free, key=lambda block: block.address)
    starts = [block.address for block in blocks]
    open_ranges = [[(block.address, block.address + block.size)] for block in blocks]
    found: dict[int, list[Remnant]] = {start: [] for start in starts}
    for action, address, nbytes, _, context in reversed(log):
        i = bisect_right(starts, address) - 1
        if action != "free_completed" or i < 0 or not open_ranges[i]:
            continue
        taken, open_ranges[i] = cut_out(open_ranges[i], address, address + nbytes)
        if taken:
            found[starts[i]].append(_named(trace, context, taken))
    return found


def cut_out(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """How many bytes of [begin, end) lie in some ranges, and what is left of these."""
    taken, left = 0, []
    for first, last in ranges:
        a, b = max(first, begin), min(last, end)
        if a >= b:
            left.append((first, last))
            continue
        taken += b - a
        left += [part for part in ((first, a), (b, last)) if part[0] < part[1]]
    return taken, left


def _named(trace: Trace, context: int, nbytes: int) -> Remnant:
    """What a context of the replay stands for: a storage, a library's workspace, or an operator's temporaries."""
    if 0 <= context < len(trace.storages):
        storage = trace.storages[context]
        return Remnant(nbytes=nbytes, op=storage.op, module=module_name(trace, storage.module), phase=storage.phase)
    event = trace.events[-2 - context] if 0 <= -2 - context < len(trace.events) else None
    if type(event) is Op:
        op = f"{trace.signatures[event.signature].name} (temporary)"
        return Remnant(nbytes=nbytes, op=op, module=module_name(trace, event.module), phase=event.phase)
    return Remnant(nbytes=nbytes, op="workspace", module="", phase=Phase.OTHER)


def _largest(groups: Iterable[list[Remnant]]) -> tuple[Remnant, ...]:
    """The remnants of several blocks, those of one operator of one module and phase as one, most bytes first."""
    total: dict[tuple[str, str, Phase], int] = {}
    for remnant in chain.from_iterable(groups):
        key = (remnant.op, remnant.module, remnant.phase)
        total[key] = total.get(key, 0) + remnant.nbytes
    rows = (Remnant(nbytes=nbytes, op=op, module=module, phase=phase) for (op, module, phase), nbytes in total.items())
    return tuple(sorted(rows, key=lambda remnant: -remnant.nbytes))
