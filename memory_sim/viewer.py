"""A simulated step for PyTorch's own memory viewer (pytorch.org/memory_viz) and the tools in
`torch.cuda._memory_viz`.

The snapshot has the form of ``torch.cuda.memory._snapshot()``: the segments with their blocks at the end of
the last replayed step, and the allocator's actions during that step. In place of a stack, every allocation
has the operator with its source line, its module, and its phase; its category is the one of
`autosac.memory_sim.categories`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from autosac.files.writing import write_bytes_atomically
from autosac.memory_sim.allocator_blocks import Block
from autosac.memory_sim.allocator_config import AllocatorConfig
from autosac.memory_sim.attribution import module_name, source_name
from autosac.memory_sim.categories import Category
from autosac.memory_sim.replay import Outcome, Replay
from autosac.memory_sim.timeline import simulate_memory
from autosac.memory_sim.workspaces import WorkspaceModel
from autosac.trace import Op, Phase, Trace

_Place: TypeAlias = "tuple[list[dict[str, Any]], str]"  # frames and category


def memory_snapshot(
    trace: Trace,
    *,
    config: AllocatorConfig | None = None,
    capacity_bytes: int | None = None,
    outside_bytes: int = 0,
    workspaces: WorkspaceModel | None = None,
    steps: int = 8,
) -> dict[str, Any]:
    """The snapshot, as plain dictionaries, lists, strings and numbers. Arguments as of `replay_allocator`."""
    config = config or AllocatorConfig()
    replay = Replay(trace, config, capacity_bytes, outside_bytes, workspaces)
    replay.play(steps, log=True)
    contexts = _Contexts(trace)
    actions: list[dict[str, Any]] = [_action("snapshot", 0, 0, 0, [], "unknown")]
    actions += [
        _action(action, address, nbytes, stream, *contexts.of(context))
        for action, address, nbytes, stream, context in replay.allocator.log or ()
    ]
    if replay.verdict is not None and replay.verdict.outcome is Outcome.OUT_OF_MEMORY:
        oom = _action("oom", 0, replay.verdict.requested_bytes, 0, *contexts.of(replay.allocator.context))
        limit = replay.allocator.limit_bytes or 0
        actions.append({**oom, "device_free": limit - replay.allocator.reserved_bytes})
    return {
        "segments": [segment(run, contexts.of) for run in replay.allocator.segments(replay.live.values())],
        "device_traces": [actions],
        "allocator_settings": {"expandable_segments": config.expandable_segments},
    }


def write_memory_snapshot(path: str | Path, snapshot: dict[str, Any]) -> None:
    """Write a snapshot for the memory viewer; OSError if that is not possible.

    The viewer reads nothing but Python's pickle format (its JavaScript decodes the protocols 2 to 4, plain
    containers, strings and numbers only), so this one file is a pickle: of plain values, for the viewer,
    never read back by AutoSAC.
    """
    write_bytes_atomically(Path(path), pickle.dumps(snapshot, protocol=2))


class _Contexts:
    """Frames and category of what the replay calls a context: a storage, or an operator with temporaries."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        lifetimes = simulate_memory(trace)
        rows = zip(lifetimes.lifetimes.storage.tolist(), lifetimes.categories.tolist(), strict=True)
        self.category = {storage: Category(category).name.lower() for storage, category in rows}
        self.known: dict[int, _Place] = {-1: ([], "unknown")}

    def of(self, context: int) -> _Place:
        """(frames, category)."""
        if context not in self.known:
            self.known[context] = self._look_up(context)
        return self.known[context]

    def _look_up(self, context: int) -> _Place:
        trace = self.trace
        if 0 <= context < len(trace.storages):
            storage = trace.storages[context]
            where = (storage.module, storage.source, storage.phase)
            return self._frames(storage.op, *where), self.category.get(context, "unknown")
        if context >= 0:
            return self._frames("cuBLAS workspace", -1, -1, 0), "workspace"
        event = trace.events[-2 - context]
        assert type(event) is Op
        name = f"{trace.signatures[event.signature].name} (temporary)"
        return self._frames(name, event.module, event.source, event.phase), "workspace"

    def _frames(self, op: str, module: int, source: int, phase: int) -> list[dict[str, Any]]:
        filename, _, line = source_name(self.trace, source).rpartition(":")
        number = int(line) if line.isdecimal() else 0
        frames = [{"name": op, "filename": filename or "unknown", "line": number}]
        if module >= 0:
            name = f"{module_name(self.trace, module) or 'model'} ({Phase(phase).name.lower()})"
            frames.append({"name": name, "filename": self.trace.module_classes[module], "line": 0})
        return frames


def _action(
    action: str, address: int, nbytes: int, stream: int, frames: list[dict[str, Any]], category: str
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": nbytes,
        "stream": stream,
        "time_us": 0,
        "frames": frames,
        "category": category,
    }


def segment(run: list[Block], place: Callable[[int], _Place] = lambda _: ([], "unknown")) -> dict[str, Any]:
    """A contiguous run of blocks as ``torch.cuda.memory_snapshot`` lists it. `place`: frames and category of a context."""
    active = [block for block in run if not block.is_free]
    blocks = []
    for block in run:
        state = "active_allocated" if block.allocated else "active_pending_free"
        frames, category = ([], "unknown") if block.is_free else place(block.context)
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.size if block.is_free else block.requested,
                "state": "inactive" if block.is_free else state,
                "frames": frames,
                "category": category,
            }
        )
    return {
        "device": 0,
        "address": run[0].address,
        "total_size": sum(block.size for block in run),
        "allocated_size": sum(block.size for block in run if block.allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": run[0].stream,
        "segment_type": "small" if run[0].pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": run[0].segment is not None,
        "frames": [],
        "blocks": blocks,
    }
