"""The longest path through a pipeline's schedule: a lower bound of the time from one step to the next.

Ranks run forwards F and backwards B of their stages in the schedule's order (`space.schedules.order`), one
after the other. Of stage s, microbatch i:

    F(s, i) begins after F(s - 1, i);   B(s, i) after B(s + 1, i);   B of the last stage after F(last, i)

Every path through these orders takes no longer than a step, from the first forward of the first rank to its last backward,
after which it begins its next step. With lower bounds of the durations, the longest path is a lower bound.

Seven things lengthen it:

- What one stage has made is sent to the next before that begins.
- A forward that gathers parameters waits for its first layer's: when a model's forward is called, FSDP lets its gathers wait
  for all that its rank has been given to do, the transfer of its input among it. That layer's gather lies beside nothing. The
  next layers' lie in this forward as well, for each is copied before its layer begins, and slow down what they lie beside. Of
  the first forward in a step nothing is said.
- A rank recomputes for r in the step, at least, in the backwards of its m microbatches; how much of it in which of its stages
  is not known. What is freed of one microbatch of a stage is freed of all. So with shares x of its stages (sum x = 1), stage j
  adds x_j r / m to each of its backwards. A path with c_j of them takes a + (r / m) sum x_j c_j, which is linear in x; the
  least of the largest of several paths over all x is a linear program, and a lower bound. Its x have a longest path of their
  own, which is added to it (cutting planes).
- FSDP gathers a stage's parameters again before whatever follows a forward, which freed them, and copies them.
- All backwards of a stage but the first one add their gradients to those that are there.
- Products take longer at the clock that a rank's power leaves. The clock follows from the mix of the rank's whole work of W
  milliseconds at full clock, which takes at least d longer (`autosac.estimator.power.least_sustained_ms`). That work consists
  of kinds of operations (forwards, backwards, gathers, additions of each of its stages), each of which is run N times a step,
  alike each time. A path that has each kind n times at least has a share phi = min n / N of the whole work, of each kind the
  same, which takes at least phi (W + d); what else it has of the rank takes no less than at full clock. So the rank's part of
  the path is longer by phi d. What is not known of an operation is in each of its kind: more of it lengthens the whole
  work. It counts no less than nothing.
- The optimizer follows the last backward. Only after that are the gradients of the first stage reduced, of all its layers one
  after the other. The next step begins when its first layer's parameters have been gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
    """Milliseconds of one stage and one microbatch, at least: `gathered` follows a forward, and comes first of all;
    `accumulated` is part of every backward but the first. `awaited`: by how much transfers lengthen a forward that gathers.
    """

    forward: float
    backward: float
    gathered: float = 0.0
    accumulated: float = 0.0
    awaited: float = 0.0


class _Path(NamedTuple):
    """Its length at full clock without recomputation, and how many backwards of each stage are on it; each rank's share of
    whose work all kinds of operations have.
    """

    ms: float
    backwards: list[int]
    shares: Numbers

    def at_the_clock_ms(self, lengthened_ms: Numbers) -> float:
        """Its length if the whole work of each rank takes longer by so much."""
        return self.ms + float(self.shares @ lengthened_ms)


def works_ms(stages: Sequence[StageTimes], ranks: int, microbatches: int) -> list[float]:
    """What each rank does in a step, without recomputation, at full clock. `stages`: all of the model's, in their order."""
    m = microbatches
    each = [m * (s.forward + s.backward) + (m + 1) * s.gathered + (m - 1) * s.accumulated for s in stages]
    return [sum(each[rank::ranks]) for rank in range(ranks)]


def longest_path_ms(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages: Sequence[StageTimes],
    extra_ms: Sequence[float],
    *,
    hop_ms: float = 0.0,
    after_ms: float = 0.0,
    lengthened_ms: Sequence[float] = (),
) -> float:
    """The bound of a schedule with whole backwards whose stages run over the ranks in a loop. `stages`: all of the model's, in
    their order; `extra_ms`: recomputation of each rank in the step; `hop_ms`: from one stage to the next; `after_ms`: what the
    first rank does after its last backward; `lengthened_ms`: by how much each rank's whole work, recomputation included, takes
    longer at its clock.
    """
    of_rank = len(stages) // ranks
    each_ms = np.array([extra_ms[stage % ranks] / microbatches for stage in range(len(stages))])
    longer_ms = np.array(lengthened_ms) if len(lengthened_ms) else np.zeros(ranks)
    whole_ms = np.array(works_ms(stages, ranks, microbatches)) + np.array(extra_ms)
    factors = 1 + longer_ms / np.maximum(whole_ms, 1e-12)  # only to find long paths
    again_ms = each_ms / of_rank
    paths: list[_Path] = []
    least_ms = 0.0
    for _ in range(_MOST_PATHS):
        paths.append(_longest(schedule, ranks, microbatches, stages, again_ms, hop_ms, factors))
        longest_ms = paths[-1].at_the_clock_ms(longer_ms) + float(again_ms @ np.array(paths[-1].backwards))
        if of_rank == 1 or not any(extra_ms):
            return longest_ms + after_ms
        least_ms, shares = _least_longest(paths, each_ms, ranks, longer_ms)
        again_ms = each_ms * shares
        if longest_ms - least_ms <= _CLOSE * longest_ms:
            break
    return least_ms * _SAFE + after_ms


def _least_longest(paths: Sequence[_Path], each_ms: Numbers, ranks: int, longer_ms: Numbers) -> tuple[float, Numbers]:
    """The least, over all shares of stages in their ranks' recomputation, of the longest of the paths; and the shares."""
    count = len(each_ms)
    slopes = np.array([path.backwards for path in paths]) * each_ms
    solved = linprog(
        [0.0] * count + [1.0],
        A_ub=np.hstack([slopes, -np.ones((len(paths), 1))]),
        b_ub=[-path.at_the_clock_ms(longer_ms) for path in paths],
        A_eq=[[float(stage % ranks == rank) for stage in range(count)] + [0.0] for rank in range(ranks)],
        b_eq=[1.0] * ranks,
        bounds=[(0, 1)] * count + [(0, None)],
        method="highs",
    )
    assert solved.status == 0, solved.message
    return float(solved.fun), solved.x[:count]


class _Links(NamedTuple):
    """A schedule's operations in an order in which they can be executed: what each is (its kind times the number of stages,
    and its stage), which other one it needs (the number of operations for none), whether that is on another stage, and which
    one its rank runs before it; the last operation of the first rank.
    """

    rows: list[tuple[int, int, bool, int]]
    last: int


_BACKWARD, _GATHERS, _AGAIN = 1, 2, 4  # kinds are sums of these; _AGAIN: not the stage's first forward or backward

_ADDS, _AWAITS = _BACKWARD | _AGAIN, _GATHERS | _AGAIN
# Work, as the first fields of `StageTimes`: (flags that tell, those of them that are set).
_KINDS = ((_BACKWARD, 0), (_BACKWARD, _BACKWARD), (_GATHERS, _GATHERS), (_ADDS, _ADDS))


@lru_cache(maxsize=32)
def _links(schedule: str, ranks: int, microbatches: int, count: int) -> _Links:
    orders = [order(schedule, ranks, microbatches, count // ranks, rank) for rank in range(ranks)]
    total = 2 * count * microbatches
    numbers: dict[tuple[bool, int, int], int] = {}
    position, latest = [0] * ranks, [total] * ranks
    begun = [[0, 0] for _ in range(count)]
    freed = [True] * count
    rows: list[tuple[int, int, bool, int]] = []
    while len(rows) < total:
        before = len(rows)
        for rank in range(ranks):
            while position[rank] < len(orders[rank]):
                kind, own_stage = orders[rank][position[rank]]
                stage, is_backward = own_stage * ranks + rank, kind == "B"
                i = begun[stage][is_backward]
                needed = _needed(is_backward, stage, i, count)
                if needed is not None and needed not in numbers:
                    break
                what = _BACKWARD * is_backward + _GATHERS * freed[stage] + _AGAIN * (i > 0)
                crosses = needed is not None and needed[1] != stage
                needs = total if needed is None else numbers[needed]
                numbers[is_backward, stage, i] = len(rows)
                previous, latest[rank] = latest[rank], len(rows)
                rows.append((what * count + stage, needs, crosses, previous))
                freed[stage] = not is_backward
                begun[stage][is_backward] += 1
                position[rank] += 1
        assert len(rows) > before, "the schedule waits for itself"
    return _Links(rows, latest[0])


def _needed(is_backward: bool, stage: int, i: int, count: int) -> tuple[bool, int, int] | None:
    """What has to be done before an operation."""
    if not is_backward:
        return (False, stage - 1, i) if stage else None
    return (True, stage + 1, i) if stage < count - 1 else (False, stage, i)


def _longest(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages: Sequence[StageTimes],
    again_ms: Numbers,
    hop_ms: float,
    factors: Numbers,
) -> _Path:
    """The longest path to the first rank's last backward. `again_ms`: what each stage's backwards recompute; `factors`: by
    which the work of each rank is taken to be longer. Each operation begins as early as it can.
    """
    count = len(stages)
    links = _links(schedule, ranks, microbatches, count)
    own_ms = []
    for what in range(8):
        for stage, times in enumerate(stages):
            ms = times.backward + float(again_ms[stage]) if what & _BACKWARD else times.forward
            ms += bool(what & _GATHERS) * times.gathered + (what & _ADDS == _ADDS) * times.accumulated
            waits_ms = (what & (_BACKWARD | _AWAITS) == _AWAITS) * times.awaited
            own_ms.append(ms * float(factors[stage % ranks]) + waits_ms)
    ends_ms = [0.0] * (len(links.rows) + 1)
    waited_for = [0] * len(links.rows)
    for at, (what, needed, crosses, previous) in enumerate(links.rows):
        begin_ms, other_ms = ends_ms[previous], ends_ms[needed] + hop_ms if crosses else ends_ms[needed]
        if begin_ms >= other_ms:
            waited_for[at] = previous
        else:
            waited_for[at], begin_ms = needed, other_ms
        ends_ms[at] = begin_ms + own_ms[what]
    return _walked(links, waited_for, stages, ranks, microbatches, hop_ms)


def _walked(
    links: _Links,
    waited_for: Sequence[int],
    stages: Sequence[StageTimes],
    ranks: int,
    microbatches: int,
    hop_ms: float,
) -> _Path:
    """The path that ends with the last operation."""
    count, hops, at = len(stages), 0, links.last
    times_run = [0] * (8 * count)
    while at < len(links.rows):
        what, needed, crosses, previous = links.rows[at]
        times_run[what] += 1
        hops += crosses and waited_for[at] == needed != previous
        at = waited_for[at]
    run = np.array(times_run).reshape(8, count)
    kinds = np.arange(8)
    numbers = np.array([run[(kinds & flag) == value].sum(0) for flag, value in _KINDS], np.float64)
    awaited = run[(kinds & (_BACKWARD | _AWAITS)) == _AWAITS].sum(0)
    m = microbatches
    most = np.array([m, m, m + 1, m - 1], np.float64)
    of_stages = np.array([times[: len(_KINDS)] for times in stages]).T
    waits_ms = float(sum(n * times.awaited for n, times in zip(awaited, stages, strict=True)))
    present = np.vstack([np.ones((2, count), bool), of_stages[2:] > 0]) & (most > 0)[:, None]
    shares = np.where(present, numbers / np.maximum(most, 1)[:, None], 1.0).min(0)
    return _Path(
        float((numbers * of_stages).sum()) + waits_ms + hops * hop_ms,
        [int(n) for n in numbers[1]],
        np.array([shares[rank::ranks].min() for rank in range(ranks)]),
    )
