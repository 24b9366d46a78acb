"""Plans for jobs whose layers are compiled as a whole: mixes of measured policies.

1. Policies are proposed for each group of equal units (`compiled_policies`).
2. *Trials*: plans in which the units of a group take turns with its policies are captured as compiled. They tell what a unit
   costs under each policy (`compiled_costs`).
3. The fastest mix within a limit of saved bytes is chosen (`autosac.solvers.mix`). Every policy of a mix is one more graph to
   compile, for which it has to save a little. The units that keep most run last: they are the first to let go of it.
4. The step under that plan is simulated. By how much its peak is above its saved bytes moves the limit, until the peak uses
   the budget (`candidates.Bracket`).

Trials and baselines compete with what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autosac.errors import CaptureError, InfeasibleError
from autosac.planning.candidates import Bracket, Candidate, Candidates
from autosac.planning.compiled_costs import unit_costs
from autosac.planning.compiled_policies import UnitGroup, left_to_compiler
from autosac.planning.planner import Goal, plan_of
from autosac.plans import Plan, Reasons, Unit
from autosac.simulation import Simulation
from autosac.solvers.mix import Choice, Cost, Group, best_mix

# Another graph to compile must save this share of the step.
_GRAPH = 2e-4
_TRIALS = 2
_NARROW_BYTES = 2**24
# The policies that do what the job does under its own ways of checkpointing.
_BASELINES = {"full": "full", "selective-op": "every second product"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A plan in which units take turns, and the policy of each unit of each group in it."""

    plan: Plan
    turns: tuple[tuple[int, ...], ...]


class CompiledMixes:
    """Chooses mixes for the groups of one job. `none`: the compiled step without checkpointing; `observed`: the eager one, of
    which plans are made. `begin` starts a capture that will be asked for.
    """

    def __init__(
        self,
        groups: tuple[UnitGroup, ...],
        none: Simulation,
        observed: Simulation,
        begin: Callable[[Plan], None],
        progress: Callable[[str], None],
    ) -> None:
        self._groups = groups
        self._none = none
        self._observed = observed
        self._begin = begin
        self._progress = progress
        self._costs: list[list[Cost]] = []
        self._excess: int | None = None
        self._failure = ""

    def leave_to_compiler(self, reason: str) -> None:
        """Units that are checkpointed cannot be compiled here: try memory budgets only."""
        self._failure = reason
        self._groups = tuple(map(left_to_compiler, self._groups))

    def find(self, goal: Goal, candidates: Candidates) -> None:
        """Verify mixes until one fits and uses the budget, or none is left to try."""
        if not self._costs:
            self._measure(goal, candidates)
        assert self._excess is not None
        bracket = Bracket(goal.target_bytes - self._excess, goal.budget_bytes, goal.target_bytes)
        seen: set[tuple[Unit, ...]] = set()
        for _ in range(goal.rounds):
            try:
                choice = best_mix(self._sizes(), bracket.inner, _GRAPH * self._none.step_ms)
            except InfeasibleError:
                bracket.unsolved()
                continue
            candidate = candidates.verify(self._plan(goal, choice))
            self._excess = candidate.simulation.peak_bytes(goal.budget_kind) - choice.nbytes
            again = candidate.plan.units in seen
            seen.add(candidate.plan.units)
            if candidate.fits(goal) and (candidate.uses(goal) or again):
                return
            bracket.verified(candidate, goal)
            if bracket.high - bracket.low < _NARROW_BYTES:
                return

    def smallest(self, goal: Goal) -> Plan:
        """The plan in which every unit follows the policy with the fewest saved bytes; without trials, one that recomputes
        everything.
        """
        chosen = [
            min(range(len(costs)), key=lambda p: costs[p].nbytes) if costs else 1
            for costs in self._costs or [[] for _ in self._groups]
        ]
        units = [
            group.policies[p].of(unit) for group, p in zip(self._groups, chosen, strict=True) for unit in group.units
        ]
        return plan_of(self._observed, goal, tuple(unit for unit in units if unit is not None))

    def mirror(self, goal: Goal, baseline: str) -> Plan | None:
        """The plan in which every unit does what it does under a baseline; None if no policy is known to do that."""
        wanted = _BASELINES.get(baseline)
        units = [p.of(unit) for g in self._groups for p in g.policies if p.name == wanted for unit in g.units]
        found = tuple(unit for unit in units if unit is not None)
        return plan_of(self._observed, goal, found) if found else None

    def notes(self, best: Candidate) -> tuple[str, ...]:
        """How many graphs the plan costs, and what could not be tried."""
        found = []
        graphs = sum(len({_policy(best.plan, unit.name) for unit in group.units}) for group in self._groups)
        kinds = len(self._groups)
        found.append(
            f"the compiler makes {graphs} {'graph' if graphs == 1 else 'graphs'} of {kinds} "
            f"{'kind' if kinds == 1 else 'kinds'} of layers; {sum(map(len, self._costs))} policies were measured"
        )
        if self._failure:
            found.append(f"only memory budgets of the compiler's partitioner were tried: {self._failure}")
        return tuple(found)

    # ---- trials -----------------------------------------------------------------------------------------------------

    def _measure(self, goal: Goal, candidates: Candidates) -> None:
        try:
            trials = self._captured(goal, candidates)
        except CaptureError as e:
            self.leave_to_compiler(str(e))
            trials = self._captured(goal, candidates)
        names = [unit.name for group in self._groups for unit in group.units]
        free = unit_costs(self._none, names)
        found: list[list[list[Cost]]] = [[[] for _ in group.policies] for group in self._groups]
        for group, rows in zip(self._groups, found, strict=True):
            rows[0] += [free[unit.name] for unit in group.units]
        peaks = []
        for trial, simulation in trials:
            costs = unit_costs(simulation, names)
            peaks.append(simulation.peak_bytes(goal.budget_kind) - sum(cost.nbytes for cost in costs.values()))
            for group, turns, rows in zip(self._groups, trial.turns, found, strict=True):
                for unit, p in zip(group.units, turns, strict=True):
                    rows[p].append(costs[unit.name])
        self._excess = max(peaks)
        measured = [[p for p, row in enumerate(rows) if row] for rows in found]
        self._groups = tuple(
            replace(group, policies=tuple(group.policies[p] for p in known))
            for group, known in zip(self._groups, measured, strict=True)
        )
        self._costs = [[_typical(rows[p]) for p in known] for rows, known in zip(found, measured, strict=True)]

    def _captured(self, goal: Goal, candidates: Candidates) -> list[tuple[_Trial, Simulation]]:
        trials = self._trials(goal)
        for trial in trials:
            self._begin(trial.plan)
        self._progress("measuring policies as compiled")
        return [(trial, candidates.verify(trial.plan).simulation) for trial in trials]

    def _trials(self, goal: Goal) -> list[_Trial]:
        """Each policy but the compiler's own in one trial, in as many units as there are turns for it."""
        found = []
        for number in range(_TRIALS):
            turns = []
            for group in self._groups:
                own = range(1 + number, len(group.policies), _TRIALS) or range(1, len(group.policies))
                turns.append(tuple(own[i % len(own)] for i in range(len(group.units))))
            pairs = zip(self._groups, turns, strict=True)
            units = [g.policies[p].of(unit) for g, own in pairs for unit, p in zip(g.units, own, strict=True)]
            plan = plan_of(self._observed, goal, tuple(unit for unit in units if unit is not None))
            found.append(_Trial(plan=plan, turns=tuple(turns)))
        return found

    # ---- mixes ------------------------------------------------------------------------------------------------------

    def _sizes(self) -> list[Group]:
        return [Group(len(g.units), tuple(costs)) for g, costs in zip(self._groups, self._costs, strict=True)]

    def _plan(self, goal: Goal, choice: Choice) -> Plan:
        units: list[Unit] = []
        for group, costs, mix in zip(self._groups, self._costs, choice.mixes, strict=True):
            turns = [p for p, count in mix for _ in range(count)]
            for unit, p in zip(group.units, turns, strict=True):
                found = group.policies[p].of(unit)
                if found is not None:
                    units.append(_stated(found, costs[p], costs[0]))
        return replace(plan_of(self._observed, goal, tuple(units)), reasons=(self._reasons(choice),))

    def _reasons(self, choice: Choice) -> Reasons:
        """With what one GiB more would save, by the same costs."""
        price = _GRAPH * self._none.step_ms
        richer = best_mix(self._sizes(), choice.nbytes + 2**30, price)
        return Reasons(
            objective="step", method="mix of measured policies", ms_per_gib=max(0.0, choice.ms - richer.ms), binding=()
        )


def _typical(costs: Sequence[Cost]) -> Cost:
    """The medians: the first and the last unit differ a little."""
    nbytes, ms = sorted(cost.nbytes for cost in costs), sorted(cost.ms for cost in costs)
    return Cost(nbytes[len(nbytes) // 2], ms[len(ms) // 2])


def _stated(unit: Unit, cost: Cost, free: Cost) -> Unit:
    """The unit with what was measured of it."""
    return replace(
        unit,
        kept_bytes=cost.nbytes,
        discard_fraction=min(1.0, max(0.0, 1 - cost.nbytes / free.nbytes)) if free.nbytes else 0.0,
        recompute_ms=max(0.0, cost.ms - free.ms),
    )


def _policy(plan: Plan, name: str) -> object:
    return next((unit.policy for unit in plan.units if unit.fqn == name), None)
