"""The rank for which others wait: under a drawn expert load imbalance, the one whose experts got most tokens.

Which rank of a group that is differs by layer. Another rank of the group is captured in its place (`MoELoad.busiest`), and
executed beside the captured one: they meet in every exchange, so that the captured rank waits as it would in the real job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autosac.jobs.titan import TitanJob
from autosac.simulation import Pipeline, Simulation
from autosac.trace import Collective, Op, Trace


def busiest_beside(job: TitanJob, trace: Trace) -> TitanJob | None:
    """The job as seen from the rank that the captured one waits for; None if it exchanges no tokens with others."""
    group = _exchanging(trace)
    if group is None:
        return None
    others = [rank for rank in group if rank != job.rank]
    return replace(job, rank=others[0], moe_load=replace(job.moe_load, busiest=True)) if others else None


def _exchanging(trace: Trace) -> Sequence[int] | None:
    """The group of the first all-to-all after tokens were counted by expert."""
    counted = False
    for event in trace.events:
        if type(event) is Op:
            counted = counted or trace.signatures[event.signature].name == "aten.histc.default"
        elif counted and type(event) is Collective and event.kind == "all_to_all":
            return trace.groups[event.group].ranks()
    return None


def fullest(stages: Sequence[Simulation], waited_for: Iterable[Simulation] = ()) -> Simulation:
    """The stage that first runs out of memory, in the step of all of them and of those that they wait for: one that does, else
    the one for which most is reserved.
    """
    together = (*stages, *waited_for)
    if len(together) == 1:
        return together[0]
    joined = Pipeline(stages=together).joined()[: len(stages)]
    return max(joined, key=lambda stage: (not stage.fits, stage.peak_reserved_bytes, stage.peak_active_bytes))
