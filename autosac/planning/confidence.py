"""Plans that fit with a given probability, and how sure their step times are.

Memory. Where runs were measured, x = measured / predicted peak - 1 is the error of a prediction. Each cause has a rule of
its own (`memory_sim/margins.toml`): "active" (tensors, their lifetimes, the libraries' workspaces), "reserved" (the caching
allocator in addition) and "reserved-expandable" (the allocator with expandable segments, which leaves hardly any holes).
Assumed is that the errors of a rule's runs and of the planned one are independent draws from one normal distribution around
zero, of unknown variance. With s^2 the mean of the n squares x_i^2, the next x / s then follows Student's t distribution
with n degrees of freedom: few runs mean wide margins. Real errors have longer tails (most are zero, some cause strikes): s
is at least so large that an error beyond the worst of the runs, to either side, has a probability of 1 / (n + 1). A mean of
the x_i is not taken off: what was predicted too high on average is not counted on. So a plan of predicted peak p fits the
budget B with probability T_n((B / p - 1) / s) (`Margin.probability`), and planning for B / (1 + s t_n(P)) gives at least P
(`Margin.budget_bytes`). The errors of pipeline stages are taken as the same, so the largest peak decides. The runs are those
that the memory model is checked by while it is developed: jobs of another kind may err more. What the runs did not have
(another GPU or library, unbalanced experts, memory that other processes take) is not in the margin; nor are what the CUDA
context and NCCL take, which the budget does not bound.

Times. Each cost model states a relative standard error of every event (`Pricing.event_rel_std`). Assumed is that the errors
of one model are the same multiple of these for all its events (fully correlated), those of different models independent,
and normal. To first order the standard error of the step time T is then sqrt(sum_m (T_m - T)^2), where T_m is the step
simulated again with model m's events one standard error slower (`step_errors_ms`): what hides stays hidden. What no model
states (launch times of the host, kernels that slow each other down) is not in it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from statistics import NormalDist
from typing import Any

import numpy as np

from autosac.errors import InfeasibleError, UsageError
from autosac.memory_sim import AllocatorConfig
from autosac.planning.closed_loop import Planned
from autosac.plans import Certainty
from autosac.quantities import format_bytes, format_ms, format_probability
from autosac.simulation import Pipeline, Simulation

HIGHEST = 0.9999
"""The few dozen measured runs show no more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The distribution of a predicted peak's relative error: `scale` times Student's t with `freedom` degrees."""

    scale: float
    freedom: int

    @staticmethod
    def fit(errors: Sequence[float]) -> Margin:
        """From the relative errors of measured runs."""
        from scipy.special import stdtrit

        count = len(errors)
        mean_square = sum(x * x for x in errors) / count
        worst = max(map(abs, errors)) / float(stdtrit(count, 1 - 0.5 / (count + 1)))
        return Margin(scale=max(math.sqrt(mean_square), worst), freedom=count)

    def budget_bytes(self, budget_bytes: int, confidence: float) -> int:
        """The largest predicted peak that fits the budget with this probability (the budget itself up to one half)."""
        from scipy.special import stdtrit

        return int(budget_bytes / (1 + self.scale * max(0.0, float(stdtrit(self.freedom, confidence)))))

    def probability(self, peak_bytes: int, budget_bytes: int) -> float:
        """That a predicted peak turns out to fit the budget."""
        from scipy.special import stdtr

        return float(stdtr(self.freedom, (budget_bytes / peak_bytes - 1) / self.scale))


@cache
def _rules() -> dict[str, Any]:
    return tomllib.loads(resources.files("autosac.memory_sim").joinpath("margins.toml").read_text())


def margin_of(budget_kind: str, allocator: AllocatorConfig) -> Margin:
    """The margin for what a budget bounds."""
    expandable = budget_kind == "reserved" and allocator.expandable_segments
    runs = _rules()["reserved-expandable" if expandable else budget_kind]["runs"]
    return Margin.fit([measured / predicted - 1 for _, predicted, measured in runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """A wanted probability of fitting. UsageError if it is none."""

    level: float
    margin: Margin

    def __post_init__(self) -> None:
        if not 0 < self.level <= HIGHEST:
            raise UsageError(
                f"confidence {self.level:.16g}: expected a probability above 0 and at most {HIGHEST}, such as 0.99"
            )

    def inner_bytes(self, budget_bytes: int) -> int:
        """What to plan for: the budget less the margin."""
        return self.margin.budget_bytes(budget_bytes, self.level)

    def certain(self, result: Planned | InfeasibleError, budget_bytes: int) -> Planned | InfeasibleError:
        """The result of planning for `inner_bytes`, as an answer for the budget itself."""
        if isinstance(result, InfeasibleError):
            return self.refused(result, budget_bytes)
        kept_bytes = budget_bytes - self.inner_bytes(budget_bytes)
        plan = result.plan
        peak_bytes = plan.predictions["autosac"].peak_bytes(plan.made_for.budget_kind)
        certainty, main = self._certainty(result.simulation, peak_bytes, budget_bytes, kept_bytes)
        notes = (
            f"it fits the budget with a probability of {format_probability(certainty.fits)}; "
            f"planned for {self._left(budget_bytes)}",
            f"the step takes {format_ms(certainty.step_low_ms)} to {format_ms(certainty.step_high_ms)} with a probability of "
            f"{self.level:.6g}{f'; the error of {main} counts most' if main else ''}",
        )
        plan = replace(plan, made_for=replace(plan.made_for, budget_bytes=budget_bytes), certainty=certainty)
        return replace(result, plan=plan, notes=(*notes, *result.notes))

    def refused(self, error: InfeasibleError, budget_bytes: int) -> InfeasibleError:
        """The error of planning for `inner_bytes`, in terms of the budget that was asked for."""
        share = budget_bytes / self.inner_bytes(budget_bytes) - 1
        return InfeasibleError(
            f"{error} (planned for {self._left(budget_bytes)}; add {share:.2%} to the smallest budget for them)",
            peak_in=error.peak_in,
        )

    def _left(self, budget_bytes: int) -> str:
        inner_bytes = self.inner_bytes(budget_bytes)
        return (
            f"{format_bytes(inner_bytes)}, which leaves {format_bytes(budget_bytes - inner_bytes)} of "
            f"{format_bytes(budget_bytes)} to errors of the prediction"
        )

    def _certainty(
        self, simulation: Simulation, peak_bytes: int, budget_bytes: int, kept_bytes: int
    ) -> tuple[Certainty, str]:
        """The figures, and the model whose error matters most ("" if none states one)."""
        errors = step_errors_ms(simulation)
        width_ms = NormalDist().inv_cdf((1 + self.level) / 2) * math.hypot(*errors.values())
        certainty = Certainty(
            confidence=self.level,
            margin_bytes=kept_bytes,
            fits=self.margin.probability(peak_bytes, budget_bytes),
            step_low_ms=max(0.0, simulation.step_ms - width_ms),
            step_high_ms=simulation.step_ms + width_ms,
        )
        return certainty, max(errors, key=lambda name: abs(errors[name])) if width_ms > 0 else ""


def confidence_of(level: float, budget_kind: str, allocator: AllocatorConfig) -> Confidence:
    """The wanted probability, with the margin for what the budget bounds. UsageError if it is no probability."""
    return Confidence(level=level, margin=margin_of(budget_kind, allocator))


def step_errors_ms(simulation: Simulation) -> dict[str, float]:
    """By how much the step gets longer if all events that a model prices are slower by one standard error, by model."""
    stages = simulation.pipeline.stages if simulation.pipeline is not None else (simulation,)
    names = sorted({name for stage in stages for name in stage.pricing.source})
    return {
        name: Pipeline(stages=tuple(_slower(stage, name) for stage in stages)).timeline.makespan_ms - simulation.step_ms
        for name in names
    }


def _slower(simulation: Simulation, model: str) -> Simulation:
    """The same step with one model's events one standard error slower."""
    pricing = simulation.pricing
    index = pricing.source.index(model) if model in pricing.source else len(pricing.source)
    event_ms = pricing.event_ms * (1 + np.where(pricing.event_source == index, pricing.event_rel_std, 0.0))
    return replace(simulation, pipeline=None, stage=0, other_prices=replace(pricing, event_ms=event_ms))
