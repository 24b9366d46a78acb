"""The longest path through a pipeline's schedule: a lower bound of the time from one step to the next.

Ranks run forwards F and backwards B of their stages in the schedule's order (`space.schedules.order`), one
after the other. Of stage s, microbatch i:

    F(s, i) begins after F(s - 1, i);   B(s, i) after B(s + 1, i);   B of the last stage after F(last, i)

Every path through these orders takes no longer than a step, from the first forward of the first rank to its last backward,
after which it begins its next step. With lower bounds of the durations, the longest path is a lower bound.

Four things lengthen it:

- What one stage has made is sent to the next before that begins.
- A rank recomputes for r in the step, at least, in the backwards of its m microbatches; how much of it in which of its stages
  is not known. What is freed of one microbatch of a stage is freed of all. So with shares x of its stages (sum x = 1), stage j
  adds x_j r / m to each of its backwards. A path with c_j of them takes a + (r / m) sum x_j c_j, which is linear in x; the
  least of the largest of several paths over all x is a linear program, and a lower bound. Its x have a longest path of their
  own, which is added to it (cutting planes).
- FSDP gathers a stage's parameters again before whatever follows a forward, which freed them, and copies them.
- The optimizer follows the last backward, when the first layer's gradients have been scattered; the next step begins when that
  layer's parameters have been gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from autosac.configurations.space.schedules import order

Numbers = NDArray[np.float64]
_MOST_PATHS = 6
_CLOSE = 1e-4  # share of the step by which another path may still lengthen it
_SAFE = 1 - 1e-7  # the solver's precision


class StageTimes(NamedTuple):
    """Milliseconds of one stage and one microbatch, at least: `gathered` follows a forward, and comes first of all."""

    forward: float
    backward: float
    gathered: float = 0.0


class _Path(NamedTuple):
    """Its length without recomputation, and how many backwards of each stage are on it."""

    ms: float
    backwards: list[int]


def longest_path_ms(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages: Sequence[StageTimes],
    extra_ms: Sequence[float],
    *,
    hop_ms: float = 0.0,
    after_ms: float = 0.0,
) -> float:
    """The bound of a schedule with whole backwards whose stages run over the ranks in a loop. `stages`: all of the model's, in
    their order; `extra_ms`: recomputation of each rank in the step; `hop_ms`: from one stage to the next; `after_ms`: what the
    first rank does after its last backward.
    """
    of_rank = len(stages) // ranks
    each_ms = np.array([extra_ms[stage % ranks] / microbatches for stage in range(len(stages))])
    again_ms = each_ms / of_rank
    paths: list[_Path] = []
    least_ms = 0.0
    for _ in range(_MOST_PATHS):
        paths.append(_longest(schedule, ranks, microbatches, stages, again_ms.tolist(), hop_ms))
        longest_ms = paths[-1].ms + float(again_ms @ np.array(paths[-1].backwards))
        if of_rank == 1 or not any(extra_ms):
            return longest_ms + after_ms
        least_ms, shares = _least_longest(paths, each_ms, ranks)
        again_ms = each_ms * shares
        if longest_ms - least_ms <= _CLOSE * longest_ms:
            break
    return least_ms * _SAFE + after_ms


def _least_longest(paths: Sequence[_Path], each_ms: Numbers, ranks: int) -> tuple[float, Numbers]:
    """The least, over all shares of stages in their ranks' recomputation, of the longest of the paths; and the shares."""
    count = len(each_ms)
    slopes = np.array([path.backwards for path in paths]) * each_ms
    solved = linprog(
        [0.0] * count + [1.0],
        A_ub=np.hstack([slopes, -np.ones((len(paths), 1))]),
        b_ub=[-path.ms for path in paths],
        A_eq=[[float(stage % ranks == rank) for stage in range(count)] + [0.0] for rank in range(ranks)],
        b_eq=[1.0] * ranks,
        bounds=[(0, 1)] * count + [(0, None)],
        method="highs",
    )
    assert solved.status == 0, solved.message
    return float(solved.fun), solved.x[:count]


def _longest(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages: Sequence[StageTimes],
    again_ms: Sequence[float],
    hop_ms: float,
) -> _Path:
    """The longest path to the first rank's last backward. `again_ms`: what each stage's backwards recompute.

    Operations are numbered (stages * is_backward + stage) * microbatches + microbatch; each begins as early as it can.
    """
    count = len(stages)
    orders = [order(schedule, ranks, microbatches, count // ranks, rank) for rank in range(ranks)]
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
                ms = times.gathered if freed[stage] else 0.0
                ms += times.forward if kind == "F" else times.backward
                hop = hop_ms if needed >= 0 and needed // microbatches % count != stage else 0.0
                previous = latest[rank]
                if needed < 0 or (previous >= 0 and ends_ms[previous] > ends_ms[needed] + hop):
                    needed, hop = previous, 0.0
                waited_for[at], own_ms[at] = needed, ms + hop
                ends_ms[at] = ms + hop + (ends_ms[needed] if needed >= 0 else 0.0)
                ends_ms[at] += again_ms[stage] if kind == "B" else 0.0
                freed[stage] = kind == "F"
                begun[row] += 1
                position[rank] += 1
                latest[rank] = at
        assert sum(position) > before, "the schedule waits for itself"
    return _walked(latest[0], waited_for, own_ms, microbatches, count)


def _walked(last: int, waited_for: Sequence[int], own_ms: Sequence[float], microbatches: int, stages: int) -> _Path:
    """The path that ends with this operation."""
    backwards, length_ms, at = [0] * stages, 0.0, last
    while at >= 0:
        length_ms += own_ms[at]
        is_backward, stage = divmod(at // microbatches, stages)
        backwards[stage] += is_backward
        at = waited_for[at]
    return _Path(length_ms, backwards)


def _needed(at: int, stage: int, microbatches: int, stages: int) -> int:
    """What has to be done before an operation; -1 for what needs nothing."""
    if at < stages * microbatches:  # a forward
        return at - microbatches if stage else -1
    return at + microbatches if stage < stages - 1 else at - stages * microbatches
