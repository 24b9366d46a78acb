"""Plans for jobs whose layers are compiled as a whole: mixes of measured policies.

1. Policies are proposed for each group of equal units (`compiled_policies`).
2. What a unit costs under the compiler's own policy, under full and under selective checkpointing comes from the job's
   baselines (`compiled_costs`). They also tell how many bytes of the budget are left for what units save. Of the other
   policies those that save about as much are measured (`nearest`), by *trials*: plans in which the units of a group take
   turns, captured as compiled.
3. The fastest mix within a limit of saved bytes is chosen (`autosac.solvers.mix`). Every policy of a mix is one more graph to
   compile, for which it has to save a little. The units that keep most run last: they are the first to let go of it.
4. The step under that plan is simulated. By how much its peak is above its saved bytes moves the limit, until the peak uses
   the budget (`candidates.Bracket`).

Trials and baselines compete with what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autosac.errors import CaptureError, InfeasibleError
from autosac.planning.candidates import Bracket, Candidate, Candidates
from autosac.planning.compiled_costs import unit_costs
from autosac.planning.compiled_policies import CompiledPolicy, UnitGroup, left_to_compiler, nearest
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
    turns: tuple[tuple[CompiledPolicy, ...], ...]


class CompiledMixes:
    """Chooses mixes for the groups of one job. `baselines`: the compiled step without checkpointing ("none") and under the
    job's own; `observed`: the eager one, of which plans are made. `begin` starts a capture that will be asked for.
    """

    def __init__(
        self,
        groups: tuple[UnitGroup, ...],
        baselines: Mapping[str, Simulation],
        observed: Simulation,
        begin: Callable[[Plan], None],
        progress: Callable[[str], None],
    ) -> None:
        self._groups = groups
        self._baselines = baselines
        self._none = baselines["none"]
        self._observed = observed
        self._begin = begin
        self._progress = progress
        self._costs: list[dict[CompiledPolicy, Cost]] = [{} for _ in groups]
        self._excess = 0
        self._failure = ""

    def leave_to_compiler(self, reason: str) -> None:
        """Units that are checkpointed cannot be compiled here: try memory budgets only."""
        self._failure = reason
        self._groups = tuple(map(left_to_compiler, self._groups))
        for group, costs in zip(self._groups, self._costs, strict=True):
            for policy in set(costs).difference(group.policies):
                del costs[policy]

    def find(self, goal: Goal, candidates: Candidates) -> None:
        """Verify mixes until one fits and uses the budget, or none is left to try."""
        self._measure(goal, candidates)
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
        """The plan in which every unit follows the policy with the fewest saved bytes; without costs, one that recomputes
        everything.
        """
        units = []
        for group, costs in zip(self._groups, self._costs, strict=True):
            policy = min(costs, key=lambda p: costs[p].nbytes) if costs else group.policies[1]
            units += [policy.of(unit) for unit in group.units]
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

    # ---- what policies cost -----------------------------------------------------------------------------------------

    def _measure(self, goal: Goal, candidates: Candidates) -> None:
        if not any(self._costs):
            self._learn_baselines(goal)
        try:
            self._try_out(goal, candidates)
        except CaptureError as e:
            self.leave_to_compiler(str(e))
            self._try_out(goal, candidates)

    def _learn_baselines(self, goal: Goal) -> None:
        excess = []
        for name, simulation in self._baselines.items():
            if name != "none" and name not in _BASELINES:
                continue
            turns = []
            for group in self._groups:
                policy = group.policies[0] if name == "none" else group.policy(_BASELINES[name])
                turns.append((policy,) * len(group.units))
            excess.append(simulation.peak_bytes(goal.budget_kind) - self._costs_in(simulation, turns))
        self._excess = max(excess)

    def _try_out(self, goal: Goal, candidates: Candidates) -> None:
        """Measure what is near the goal and has not been measured."""
        near = [list(self._near(goal, g)) for g in range(len(self._groups))]
        if not any(near):
            return
        trials = list(self._trials(goal, near))
        for trial in trials:
            self._begin(trial.plan)
        self._progress("measuring policies as compiled")
        for trial in trials:
            self._costs_in(candidates.verify(trial.plan).simulation, trial.turns)

    def _near(self, goal: Goal, number: int) -> Iterator[CompiledPolicy]:
        """The policies of a group, without those that are known, that save about what the goal leaves for a unit of it: all
        groups get the same share of what they would save by themselves.
        """
        group, costs = self._groups[number], self._costs[number]
        free = [known[g.policies[0]].nbytes for g, known in zip(self._groups, self._costs, strict=True)]
        most = sum(nbytes * len(g.units) for nbytes, g in zip(free, self._groups, strict=True))
        wanted = (goal.target_bytes - self._excess) / max(1, most) * free[number]
        yield from (policy for policy in nearest(group, wanted, free[number]) if policy not in costs)

    def _trials(self, goal: Goal, near: Sequence[Sequence[CompiledPolicy]]) -> Iterator[_Trial]:
        """Each policy in one trial, in as many units as there are turns for it."""
        for number in range(min(_TRIALS, max(map(len, near)))):
            turns = []
            for group, policies in zip(self._groups, near, strict=True):
                own = policies[number::_TRIALS] or policies or group.policies[1:2]
                turns.append(tuple(own[i % len(own)] for i in range(len(group.units))))
            pairs = zip(self._groups, turns, strict=True)
            units = [p.of(unit) for group, own in pairs for unit, p in zip(group.units, own, strict=True)]
            plan = plan_of(self._observed, goal, tuple(unit for unit in units if unit is not None))
            yield _Trial(plan=plan, turns=tuple(turns))

    def _costs_in(self, simulation: Simulation, turns: Sequence[Sequence[CompiledPolicy | None]]) -> int:
        """Learn what policies cost from a step whose units follow them; the bytes that all units save in it."""
        measured = unit_costs(simulation, [unit.name for group in self._groups for unit in group.units])
        for group, own, known in zip(self._groups, turns, self._costs, strict=True):
            rows: dict[CompiledPolicy, list[Cost]] = {}
            for unit, policy in zip(group.units, own, strict=True):
                if policy is not None:
                    rows.setdefault(policy, []).append(measured[unit.name])
            for policy, row in rows.items():
                known.setdefault(policy, _typical(row))
        return sum(cost.nbytes for cost in measured.values())

    # ---- mixes ------------------------------------------------------------------------------------------------------

    def _sizes(self) -> list[Group]:
        pairs = zip(self._groups, self._costs, strict=True)
        return [Group(len(group.units), tuple(costs.values())) for group, costs in pairs]

    def _plan(self, goal: Goal, choice: Choice) -> Plan:
        units: list[Unit] = []
        for group, costs, mix in zip(self._groups, self._costs, choice.mixes, strict=True):
            policies = list(costs)
            turns = [policies[p] for p, count in mix for _ in range(count)]
            for unit, policy in zip(group.units, turns, strict=True):
                found = policy.of(unit)
                if found is not None:
                    units.append(_stated(found, costs[policy], costs[group.policies[0]]))
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
