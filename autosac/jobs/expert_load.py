"""Jobs with a random expert load imbalance: figures over several draws, and a plan for an unlucky one.

A draw is a whole capture of the job (`autosac.capture.moe_load`). Figures over N draws are given as the median and the 95th
percentile by nearest rank, the ceil(q N)-th smallest, so that each is the figure of one draw; with fewer than 20 draws the
95th percentile is the largest.

A plan is made on the draw whose un-checkpointed peak is the 95th percentile, and the step is then captured under it in
every draw. If the 95th percentile of *those* peaks is above the budget, the plan is made again on the draw that has it
(checkpointing may change which draw is the worst), until a plan holds or a draw comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autosac.errors import InfeasibleError, UsageError
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import plan_titan_job, simulate_draws
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Goal, Planned
from autosac.quantities import format_bytes
from autosac.simulation import Simulation

HIGH = 0.95
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A figure over all draws, in the unit that its name ends with."""

    name: str
    median: float
    p95: float
    least: float
    most: float


def at_quantile(values: Sequence[T], q: float, key: Callable[[T], float]) -> T:
    """The value at the quantile q (0 < q <= 1) by nearest rank: the ceil(q N)-th smallest."""
    assert values and 0 < q <= 1
    # ceil(0.95 * 20) must be 19, whatever the product is in binary
    return sorted(values, key=key)[max(0, math.ceil(q * len(values) - 1e-9) - 1)]


def figures_of_draw(simulation: Simulation) -> dict[str, float]:
    """What is reported of every draw."""
    breakdown = simulation.breakdown
    found = {
        "step_ms": simulation.step_ms,
        "compute_ms": breakdown.compute_ms,
        "exposed_communication_ms": breakdown.exposed_communication_ms,
        "waiting_for_peers_ms": breakdown.bubble_ms,
        "peak_active_bytes": float(simulation.peak_active_bytes),
        "peak_reserved_bytes": float(simulation.peak_reserved_bytes),
    }
    if simulation.trace.info.tokens_per_step:
        found["tokens_per_second"] = simulation.throughput.tokens_per_second
    return found


def statistics(simulations: Sequence[Simulation]) -> tuple[Statistic, ...]:
    """Median and 95th percentile of each figure. Of tokens per second the 95th percentile is the slow end."""
    rows = [figures_of_draw(simulation) for simulation in simulations]
    found = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        sign = -1 if name == "tokens_per_second" else 1

        def bad(value: float, sign: int = sign) -> float:
            return sign * value

        found.append(
            Statistic(
                name=name,
                median=at_quantile(values, 0.5, bad),
                p95=at_quantile(values, HIGH, bad),
                least=min(values),
                most=max(values),
            )
        )
    return tuple(found)


def representative(simulations: Sequence[Simulation]) -> Simulation:
    """The draw whose reserved peak is the 95th percentile."""
    return at_quantile(simulations, HIGH, lambda simulation: simulation.peak_reserved_bytes)


def plan_over_draws(job: TitanJob, goal: Goal, count: int) -> Planned:
    """The plan whose peak is within the goal's budget in 95 % of the draws. InfeasibleError if none was found."""
    if count < 1:
        raise UsageError("at least one draw of the expert load imbalance is needed")

    def peak(pair: tuple[int, Simulation]) -> float:
        return pair[1].peak_bytes(goal.budget_kind)

    plain = simulate_draws(job, count, checkpointing="none", observe=True)
    number = at_quantile(list(enumerate(plain)), HIGH, peak)[0]
    tried: list[int] = []
    with temporary_folder() as folder:
        while True:
            tried.append(number)
            job.progress(f"planning for draw {number} of {count}")
            (planned,) = plan_titan_job(job.draw(number), goal)
            if isinstance(planned, InfeasibleError):
                raise planned
            path = folder / f"plan{number}.json"
            planned.plan.save(path)
            under = list(enumerate(simulate_draws(job, count, plan_file=str(path))))
            worst, simulation = at_quantile(under, HIGH, peak)
            if simulation.peak_bytes(goal.budget_kind) <= goal.budget_bytes:
                notes = _notes(job, goal, number, [s for _, s in under])
                waits = max(s.step_ms for _, s in under) > planned.simulation.step_ms
                return replace(planned, notes=(*planned.notes, *notes, *(_ALONE,) * waits))
            if worst in tried:
                raise InfeasibleError(
                    f"no plan fits in {HIGH:.0%} of {count} draws of the expert load {job.moe_load}: the plan for draw "
                    f"{number} needs {format_bytes(simulation.peak_bytes(goal.budget_kind))} in draw {worst}; ask for a "
                    "smaller budget"
                )
            number = worst


_ALONE = (
    "the table's steps are of one rank by itself; those of the draws wait for the rank whose experts get most tokens"
)


def _notes(job: TitanJob, goal: Goal, number: int, under: Sequence[Simulation]) -> tuple[str, ...]:
    peaks = [simulation.peak_bytes(goal.budget_kind) for simulation in under]
    times = [simulation.step_ms for simulation in under]
    fits = sum(peak <= goal.budget_bytes for peak in peaks)
    return (
        f"expert load imbalance {job.moe_load}, seed {job.moe_load.seed}: planned for draw {number} of {len(under)}; "
        f"the step under the plan is within the budget in {fits} of {len(under)}",
        f"median and 95th percentile over the draws: peak {format_bytes(at_quantile(peaks, 0.5, float))} and "
        f"{format_bytes(at_quantile(peaks, HIGH, float))}, step time {at_quantile(times, 0.5, float):,.1f} ms and "
        f"{at_quantile(times, HIGH, float):,.1f} ms",
    )
