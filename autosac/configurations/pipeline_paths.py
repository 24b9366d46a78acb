"""The longest path through a pipeline's schedule: a lower bound of the time from one step to the next.

Ranks run forwards F and backwards B of their stages in the schedule's order (`autosac.configurations.schedules.order`), one
after the other. Of stage s, microbatch i:

    F(s, i) begins after F(s - 1, i);   B(s, i) after B(s + 1, i);   B of the last stage after F(last, i)

Every path through these orders takes no longer than a step, from the first forward of the first rank to its last backward,
after which it begins its next step. With lower bounds of the durations, the longest path is a lower bound.

Three things lengthen the operators of a stage:

- A rank recomputes for r in the step, at least, in the backwards of its m microbatches; how much of it in which of its stages
  is not known. What is freed of one microbatch of a stage is freed of all. So with shares x of its stages (sum x = 1), stage j
  adds x_j r / m to each of its backwards; a path with c_j of them grows by (r / m) sum x_j c_j >= (r / m) min c_j. The path
  that is taken is the longest with equal shares.
- FSDP gathers a stage's parameters again before whatever follows a forward, which freed them, and copies them.
- The optimizer follows the last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autosac.configurations.schedules import order


class StageTimes(NamedTuple):
    """Milliseconds of one stage and one microbatch, at least: `gathered` follows a forward, and comes first of all."""

    forward: float
    backward: float
    gathered: float = 0.0


class _Placed(NamedTuple):
    """Operations by their numbers, (stages * is_backward + stage) * microbatches + microbatch: what each takes, with equal
    shares of recomputation, and the one that it waited for (-1: none). `last`: the first rank's last one.
    """

    own_ms: list[float]
    waited_for: list[int]
    last: int


def longest_path_ms(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages: Sequence[StageTimes],
    extra_ms: Sequence[float],
    optimizer_ms: float = 0.0,
) -> float:
    """The bound of a schedule with whole backwards whose stages run over the ranks in a loop. `stages`: all of the model's, in
    their order; `extra_ms`: recomputation of each rank in the step.
    """
    placed = _placed(schedule, ranks, microbatches, stages, extra_ms)
    backwards = [0] * len(stages)
    length_ms, at = 0.0, placed.last
    while at >= 0:
        length_ms += placed.own_ms[at]
        is_backward, stage = divmod(at // microbatches, len(stages))
        backwards[stage] += is_backward
        at = placed.waited_for[at]
    of_rank = len(stages) // ranks
    for rank, extra in enumerate(extra_ms):
        own = backwards[rank::ranks]
        length_ms += extra / microbatches * (min(own) - sum(own) / of_rank)
    return length_ms + optimizer_ms


def _placed(
    schedule: str, ranks: int, microbatches: int, stages: Sequence[StageTimes], extra_ms: Sequence[float]
) -> _Placed:
    """Every operation as early as it can be."""
    of_rank, count = len(stages) // ranks, len(stages)
    orders = [order(schedule, ranks, microbatches, of_rank, rank) for rank in range(ranks)]
    ends_ms, own_ms = [-1.0] * (2 * count * microbatches), [0.0] * (2 * count * microbatches)
    waited_for = [-1] * len(ends_ms)
    position, latest = [0] * ranks, [-1] * ranks
    begun = [0] * (2 * count)
    freed = [True] * count
    while any(at < len(own) for at, own in zip(position, orders, strict=True)):
        before = sum(position)
        for rank in range(ranks):
            while position[rank] < len(orders[rank]):
                kind, own_stage = orders[rank][position[rank]]
                stage = own_stage * ranks + rank
                row = stage if kind == "F" else count + stage
                at = row * microbatches + begun[row]
                needed = _needed(at, stage, microbatches, count)
                if needed >= 0 and ends_ms[needed] < 0:
                    break
                times = stages[stage]
                ms = times.forward if kind == "F" else times.backward + extra_ms[rank] / microbatches / of_rank
                own_ms[at] = ms + times.gathered if freed[stage] else ms
                previous = latest[rank]
                if needed < 0 or (previous >= 0 and ends_ms[previous] > ends_ms[needed]):
                    needed = previous
                waited_for[at] = needed
                ends_ms[at] = own_ms[at] + (ends_ms[needed] if needed >= 0 else 0.0)
                freed[stage] = kind == "F"
                begun[row] += 1
                position[rank] += 1
                latest[rank] = at
        assert sum(position) > before, "the schedule waits for itself"
    return _Placed(own_ms, waited_for, latest[0])


def _needed(at: int, stage: int, microbatches: int, stages: int) -> int:
    """What has to be done before an operation; -1 for what needs nothing."""
    if at < stages * microbatches:  # a forward
        return at - microbatches if stage else -1
    return at + microbatches if stage < stages - 1 else at - stages * microbatches
