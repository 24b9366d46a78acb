"""Modules that run several times in a step on tensors of different sizes: crops of an image, microbatches of other lengths.

A plan decides about a module's operators, whichever forward they are in. If all forwards run the same operators, it can: it
leaves open the sizes in which they differ (`autosac.plans.ANY_SIZE`), and an operator takes the mean of the time and of the
memory that it takes in them. So what all of them hold together, where the step's peak usually is, and what recomputing them
all takes are as they are; points between two of them are not, which the simulation of the plan tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.estimator.sac_estimator import SACModule
from autosac.estimator.sac_stats import SACModStats, SACOperator, tradeoff
from autosac.plans import ANY_SIZE
from autosac.solvers import Closure, Operator, UnitResult
from autosac.trace import TensorMeta


def mean_of(executions: Sequence[SACModule]) -> SACModule | None:
    """The statistics of a module by those of its executions; None if one is refused, or runs other operators."""
    all_stats = [execution.stats for execution in executions]
    first = all_stats[0]
    if any(stats.refusal is not None or _structure(stats) != _structure(first) for stats in all_stats):
        return None
    stats = SACModStats(
        module=first.module,
        region=first.region,
        operators=tuple(_operator(same) for same in zip(*(stats.operators for stats in all_stats), strict=True)),
        groups=first.groups,
        implicit_bytes=_mean([stats.implicit_bytes for stats in all_stats]),
        boundary_bytes=_mean([stats.boundary_bytes for stats in all_stats]),
        closure=_closure([stats.closure for stats in all_stats if stats.closure is not None]),
        closed=first.closed,
    )
    problem = stats.local_problem()
    return SACModule(stats=stats, problem=problem, tradeoff=tradeoff(problem))


def _structure(stats: SACModStats) -> object:
    """What executions have in common if they differ in sizes only."""
    closure = stats.closure
    return (
        [_nature(operator) for operator in stats.operators],
        [(group.members, group.forced) for group in stats.groups],
        stats.closed,
        None if closure is None else [operator.reads for operator in closure.operators],
        None if closure is None else [(result.item, result.makers) for result in closure.results],
        None if closure is None else closure.asked,
    )


def _nature(operator: SACOperator) -> object:
    outputs = [(len(meta.shape), meta.dtype, meta.place) for meta in operator.outputs]
    return outputs, operator._replace(runtime_ms=0.0, memory_bytes=0, outputs=())


def _operator(same: Sequence[SACOperator]) -> SACOperator:
    outputs = zip(*(operator.outputs for operator in same), strict=True)
    return same[0]._replace(
        runtime_ms=_mean_ms([operator.runtime_ms for operator in same]),
        memory_bytes=_mean([operator.memory_bytes for operator in same]),
        outputs=tuple(map(_opened, outputs)),
    )


def _opened(metas: Sequence[TensorMeta]) -> TensorMeta:
    """A result without the sizes in which it differs."""
    shapes = zip(*(meta.shape for meta in metas), strict=True)
    return metas[0]._replace(shape=tuple(sizes[0] if len(set(sizes)) == 1 else ANY_SIZE for sizes in shapes))


def _closure(closures: Sequence[Closure]) -> Closure | None:
    if not closures:
        return None
    operators = zip(*(closure.operators for closure in closures), strict=True)
    results = zip(*(closure.results for closure in closures), strict=True)
    return Closure(
        tuple(Operator(_mean_ms([operator.recompute_ms for operator in same]), same[0].reads) for same in operators),
        tuple(UnitResult(_mean([r.memory_bytes for r in same]), same[0].item, same[0].makers) for same in results),
        closures[0].asked,
    )


def _mean(sizes: Sequence[int]) -> int:
    return sum(sizes) // len(sizes)


def _mean_ms(times: Sequence[float]) -> float:
    return math.fsum(times) / len(times)
