"""Memory around every execution of every module: the ModuleStates of TorchSim section D.3.

An execution is a ModuleEnter with its ModuleExit. Locals of a module's forward die just after its exit hook
has run, so the state "after" is taken behind the frees that directly follow the exit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from autosac.memory_sim.lifetimes import IntArray
from autosac.memory_sim.range_maximum import RangeMaximum
from autosac.trace import Free, ModuleEnter, ModuleExit, Phase, Trace


class ModuleSpan(NamedTuple):
    """One execution of `module` (index) in `phase` (FORWARD, BACKWARD, RECOMPUTE): events ``first <= i <=
    last``.

    `occurrence`: how many executions of the module in this phase came before. Bytes allocated on the device
    before, after, and at the most within.
    """

    module: int
    phase: Phase
    occurrence: int
    first: int
    last: int
    before_bytes: int
    after_bytes: int
    peak_bytes: int


def module_spans(trace: Trace, live: IntArray, maximum: RangeMaximum) -> tuple[ModuleSpan, ...]:
    """All executions in the order of their beginnings; one that never ends in the step is left out."""
    pairs = _pairs(trace)
    if not pairs:
        return ()
    first = np.array([begin for _, begin, _ in pairs], dtype=np.int64)
    last = np.array([end for _, _, end in pairs], dtype=np.int64)
    peaks = maximum(first, last + 1)
    spans = []
    occurrences: dict[tuple[int, Phase], int] = defaultdict(int)
    for (event, begin, end), peak in zip(pairs, peaks, strict=True):
        key = (event.module, event.phase)
        settled = _settled(trace, end)
        spans.append(ModuleSpan(*key, occurrences[key], begin, end, int(live[begin]), int(live[settled]), int(peak)))
        occurrences[key] += 1
    return tuple(spans)


def _pairs(trace: Trace) -> list[tuple[ModuleEnter, int, int]]:
    """Enters with the events of their beginnings and ends."""
    open_: dict[tuple[int, Phase], list[int]] = defaultdict(list)
    pairs: list[tuple[ModuleEnter, int, int]] = []
    for i, event in enumerate(trace.events):
        if type(event) is ModuleEnter:
            open_[event.module, event.phase].append(len(pairs))
            pairs.append((event, i, -1))
        elif type(event) is ModuleExit:
            stack = open_[event.module, event.phase]
            if stack:
                entered = stack.pop()
                pairs[entered] = (pairs[entered][0], pairs[entered][1], i)
    return [pair for pair in pairs if pair[2] >= 0]


def _settled(trace: Trace, end: int) -> int:
    """The last of the frees that directly follow event `end`, or `end`."""
    while end + 1 < len(trace.events) and type(trace.events[end + 1]) is Free:
        end += 1
    return end
