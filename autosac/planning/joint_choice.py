"""One plan for each pipeline stage, of those that were simulated for it, so that the step of all stages together is shortest.

T(c_1, ..., c_n) is the simulated step in which stage s follows candidate c_s. What a candidate does to the other stages is how
long it takes from one meeting with them (a transfer, or a collective of several stages) to the next, if it need not wait: its
`burden`. When the stages meet follows from these by sums and maxima, so T never falls where a burden grows, and a candidate
whose burden is nowhere below that of another one of its stage is *dominated*: no combination with it is shorter
(`undominated`). What is left is executed, all of it where that is few combinations, else by descent from the candidates with
the shortest steps of their own, one stage after the other (`choose`).

Two assumptions: what a stage overlaps with what is the same whether it waits for others or not, and links that transfers of
several stages share do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autosac.planning.candidates import Candidate
from autosac.simulation import Pipeline, Simulation
from autosac.trace import Collective

# Combinations that are all executed; of more of them a descent executes a part.
MOST_COMBINATIONS = 64
# Steps that differ by less than this share are equally long.
_EQUAL = 1e-6

StepOf = Callable[[Sequence[Simulation]], float]


class JointSteps:
    """The steps of combinations of simulated stages (ms), each executed once; the last pipeline that is told of is kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], float] = {}
        self._held: list[tuple[Simulation, ...]] = []  # so that no number stands for two simulations
        self._last: Pipeline | None = None

    def step_ms(self, stages: Sequence[Simulation], *, is_beside: bool = False) -> float:
        """The step of all stages together. `is_beside`: no more than this is told of it."""
        key = tuple(map(id, stages))
        if key not in self._known:
            pipeline = Pipeline(stages=tuple(stages)) if is_beside else self.pipeline(stages)
            self._known[key] = pipeline.timeline.makespan_ms
            self._held.append(tuple(stages))
        return self._known[key]

    def pipeline(self, stages: Sequence[Simulation]) -> Pipeline:
        """The stages executed together; the last one that was asked for is not executed again."""
        if self._last is None or tuple(map(id, self._last.stages)) != tuple(map(id, stages)):
            self._last = Pipeline(stages=tuple(stages))
            self.step_ms(stages)  # others ask for its time later on
        return self._last


def burden(simulation: Simulation, ranks: Collection[int]) -> NDArray[np.float64]:
    """How long a stage computes, or waits for itself, from one meeting with stages of these ranks to the next (ms)."""
    trace = simulation.trace
    apart = set(ranks) - {trace.info.rank}
    meets = [bool(apart.intersection(group.ranks())) for group in trace.groups]
    rows = [i for i, e in enumerate(trace.events) if type(e) is Collective and (e.peer >= 0 or meets[e.group])]
    reached = simulation.event_ms[rows]
    return np.diff(np.concatenate([[0.0], reached, [simulation.step_ms]]))


def _dominates(one: NDArray[np.float64], other: NDArray[np.float64], tolerance_ms: float) -> bool:
    return one.shape == other.shape and bool((one <= other + tolerance_ms).all())


def is_dominated(simulation: Simulation, others: Sequence[Simulation], ranks: Collection[int]) -> bool:
    """Whether a stage's burden is nowhere below that of one of others."""
    own, tolerance_ms = burden(simulation, ranks), _EQUAL * simulation.step_ms
    return any(_dominates(burden(other, ranks), own, tolerance_ms) for other in others)


def undominated(candidates: Sequence[Candidate], ranks: Collection[int]) -> list[Candidate]:
    """The candidates of one stage that the shortest step may need; of equal burdens that which recomputes least."""
    if len(candidates) < 2:
        return list(candidates)  # there is nothing to execute
    order = sorted(range(len(candidates)), key=lambda i: _modesty(candidates[i]))
    burdens = {i: burden(candidates[i].simulation, ranks) for i in order}
    tolerance_ms = _EQUAL * min((c.simulation.step_ms for c in candidates), default=0.0)
    kept: list[int] = []
    for i in order:
        if any(_dominates(burdens[k], burdens[i], tolerance_ms) for k in kept):
            continue
        kept = [k for k in kept if not _dominates(burdens[i], burdens[k], tolerance_ms)] + [i]
    return [candidates[i] for i in kept]


def agreeing(stages: Sequence[Sequence[Candidate]]) -> list[list[list[Candidate]]]:
    """The candidates of all stages that a job can follow together, by what it has one of: the memory budget of all that is
    compiled. Empty if the stages have none in common.
    """
    budgets = sorted({c.plan.settings.memory_budget for candidates in stages for c in candidates})
    found = [[[c for c in pool if c.plan.settings.memory_budget == budget] for pool in stages] for budget in budgets]
    return [pools for pools in found if all(pools)]


def choose(stages: Sequence[Sequence[Candidate]], step_of: StepOf) -> tuple[Candidate, ...]:
    """The combination with the shortest step; of equally long ones that which recomputes least, then of least memory."""
    ranks = [candidates[0].simulation.trace.info.rank for candidates in stages]
    fronts = [undominated(candidates, ranks) for candidates in stages]
    if math.prod(map(len, fronts)) <= MOST_COMBINATIONS:
        return _shortest(list(product(*fronts)), step_of)
    best = tuple(min(front, key=lambda c: (c.simulation.step_ms, *_modesty(c))) for front in fronts)
    while True:
        before = best
        for position, front in enumerate(fronts):
            tried = [(*best[:position], candidate, *best[position + 1 :]) for candidate in front]
            best = _shortest(tried, step_of)
        if best == before:
            return best


def _shortest(combinations: Sequence[tuple[Candidate, ...]], step_of: StepOf) -> tuple[Candidate, ...]:
    steps = [step_of([c.simulation for c in combination]) for combination in combinations]
    limit_ms = min(steps) * (1 + _EQUAL)
    shortest = [c for c, step_ms in zip(combinations, steps, strict=True) if step_ms <= limit_ms]

    def modesty(combination: tuple[Candidate, ...]) -> tuple[float, int]:
        single = [_modesty(candidate) for candidate in combination]
        return math.fsum(ms for ms, _ in single), max(peak for _, peak in single)

    return min(shortest, key=modesty)


def _modesty(candidate: Candidate) -> tuple[float, int]:
    return candidate.simulation.recompute_ms, candidate.simulation.peak_reserved_bytes
