"""Verified plans, and the bracket of solvers' budgets that leads to one that just fits (for `search` and `offloading`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from autosac.planning.planner import Costs, Goal
from autosac.planning.traced import as_traced
from autosac.plans import Plan
from autosac.quantities import format_ms
from autosac.simulation import Simulation
from autosac.solvers import TwoLevelSolution
from autosac.trace import TracedOperators


def is_faster(step_ms: float, other_ms: float) -> bool:
    """Whether a step is shorter than another one by so much that it is worth telling."""
    return step_ms < 0.999 * other_ms


def own_note(name: str, why: str) -> str:
    """What is told of a plan that is the job's own checkpointing."""
    return (
        f"the plan is the job's own {name} checkpointing, done by TorchTitan: {why}"
        " (under such a plan the host records every operator)"
    )


def early_note(saved_ms: float) -> str:
    """What is told of a plan that is the job's own checkpointing, stopping early though the job does not."""
    return (
        f"its recomputation stops with the last result that is needed (early_stop), which saves {format_ms(saved_ms)}"
    )


class Verifier(Protocol):
    """Simulates the step under a plan."""

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""

    def derived(self, plan: Plan) -> Simulation | None:
        """The step under a plan; None if that would cost a capture."""

    def is_derived(self, simulation: Simulation) -> bool:
        """Whether the simulation cost no capture."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, the step simulated under it, and the solution that it came from (None: from no solver).

    `costs`: what the solution minimised, None for the time of recomputation. `mirrors`: the baseline that it does the same as.
    """

    plan: Plan
    simulation: Simulation
    solution: TwoLevelSolution | None = None
    costs: Costs | None = None
    mirrors: str = ""

    def fits(self, goal: Goal) -> bool:
        """The verified peak is within the goal's budget."""
        return self.simulation.peak_bytes(goal.budget_kind) <= goal.budget_bytes

    def uses(self, goal: Goal) -> bool:
        """There is nothing to gain from what the plan leaves of the budget."""
        peak = self.simulation.peak_bytes(goal.budget_kind)
        return peak >= goal.utilisation * goal.budget_bytes or not any(unit.recompute_ms for unit in self.plan.units)


class Candidates:
    """Every plan that was verified, each once. `progress` gets `doing` before a step is simulated. `traced`: what the compiler
    is known to trace in units; plans decide about that.
    """

    def __init__(
        self,
        verifier: Verifier,
        progress: Callable[[str], None],
        doing: str,
        traced: Mapping[str, TracedOperators] | None = None,
    ) -> None:
        self._verifier = verifier
        self._traced = traced or {}
        self._progress = progress
        self._doing = doing
        self.verified: list[Candidate] = []

    def verify(
        self, plan: Plan, solution: TwoLevelSolution | None = None, costs: Costs | None = None, mirrors: str = ""
    ) -> Candidate:
        """The candidate with the plan's units and settings, simulated if there is none yet."""
        if self._traced:
            plan = replace(plan, units=tuple(as_traced(u, self._traced.get(u.fqn, ())) for u in plan.units))
        for i, known in enumerate(self.verified):
            if _decided(known.plan) == _decided(plan):
                if mirrors and not known.mirrors:
                    self.verified[i] = known = replace(known, mirrors=mirrors)
                return known
        self._progress(f"{self._doing} (plan {len(self.verified) + 1})")
        simulation = self._verifier.under(plan)
        candidate = Candidate(plan=plan, simulation=simulation, solution=solution, costs=costs, mirrors=mirrors)
        self.verified.append(candidate)
        return candidate


def _decided(plan: Plan) -> object:
    """Equal for plans under which the step is the same, whatever they state of their units."""
    return plan.settings, [(unit.fqn, unit.policy) for unit in plan.units]


def find_border(fits: Callable[[int], bool], guess: int, count: int) -> int:
    """The last of `count` ascending choices that fits, where what fits comes first; -1 if none does.

    Asks near the guess first, then further away in doubled strides, then in the middle of the rest: each answer is a capture.
    """
    low, high, i, stride = -1, count, guess, 1
    while high - low > 1:
        if fits(i):
            low = i
        else:
            high = i
        if low >= 0 and high < count:
            i = (low + high) // 2
        else:
            i = max(0, high - stride) if low < 0 else min(count - 1, low + stride)
            stride *= 2
    return low


class Bracket:
    """What a solver is to keep within, `inner`, such that the verified peak becomes `target_bytes`.

    The border lies between `low`, the largest inner budget that did not exceed the goal, and `high`, the smallest that did.
    What the verified peak lies above the inner budget corrects the next one, as long as that stays inside the bracket; else it
    is the bracket's middle.
    """

    def __init__(self, inner: int, high: int, target_bytes: int) -> None:
        self.inner, self.low, self.high = inner, 0, high
        self._target_bytes = target_bytes

    def unsolved(self) -> None:
        """No plan exists within this little memory."""
        self.low = max(self.low, self.inner)
        self.inner = self._middle()

    def verified(self, candidate: Candidate, goal: Goal) -> None:
        """A candidate came out of this inner budget."""
        if candidate.fits(goal):
            self.low = max(self.low, self.inner)
        else:
            self.high = min(self.high, self.inner)
        wanted = self._target_bytes - (candidate.simulation.peak_bytes(goal.budget_kind) - self.inner)
        self.inner = wanted if self.low < wanted < self.high else self._middle()

    def _middle(self) -> int:
        return (self.low + self.high) // 2


def reserved_beyond_active(simulation: Simulation) -> int:
    """By how much the reserved peak is above the active one (bytes)."""
    return simulation.peak_bytes("reserved") - simulation.peak_active_bytes
