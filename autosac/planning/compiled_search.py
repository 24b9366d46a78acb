"""Plans for jobs whose layers are compiled as a whole: mixes of measured policies.

1. Policies are proposed for each group of equal units (`compiled_policies`). How many bytes a unit saves under them is known,
   and about what recomputation takes (`CompiledPolicy.expected`).
2. What a unit costs under the compiler's own policy comes from the step without checkpointing (`compiled_costs`). That also
   tells how many bytes of the budget are left for what units save. Of the other policies those are measured that the best mix
   would follow by what is expected, and those that save about as much as is left for a unit (`nearest`): in *samples*, which
   are captures of a model with a few layers that take turns with them. Where there are memory budgets only, this is repeated
   with what has been measured: the partitioner may save far more than a budget's share.
3. The fastest mix within a limit of saved bytes is chosen (`autosac.solvers.mix`). Every policy of a mix is one more graph to
   compile, for which it has to save a little. The units that keep most run last: they are the first to let go of it.
4. The step under that plan is captured. By how much its peak is above its saved bytes moves the limit, until the peak uses
   the budget (`candidates.Bracket`).

The job's own ways of checkpointing compete with what is found (`search`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from autosac.errors import CaptureError, InfeasibleError
from autosac.planning.candidates import Bracket, Candidate, Candidates
from autosac.planning.compiled_costs import unit_costs
from autosac.planning.compiled_policies import CompiledPolicy, UnitGroup, left_to_compiler, nearest, without_budgets
from autosac.planning.planner import Goal, plan_of
from autosac.plans import Plan, Reasons, Unit
from autosac.plans.layers import layer_number
from autosac.simulation import Simulation
from autosac.solvers.mix import Cost, EqualUnits, Mix, MixChoice, best_mix
from autosac.trace import TracedOperators

# Another graph to compile must save this share of the step.
_GRAPH = 2e-4
_SAMPLES = 2
# Units of a sample that follow one policy: the first and the last of a model differ a little.
_TURNS = 3
# How often more memory budgets are measured, near what is left by those that have been, where there is nothing else.
_LOOKS = 2
# A bracket of budgets that is as narrow, in bytes or by its share of the budget, is not worth another capture.
_NARROW_BYTES = 2**24
_NARROW = 2e-3
# Another capture of the step must promise to shorten it by this share; by that of a graph if more of the budget is left.
_WORTH = 2e-3
_MUCH = 0.03
# What the allocator reserves beyond what is active grows about by this share where units are checkpointed.
_SCATTERED = 1 / 16
# The policies that do what the job does under its own ways of checkpointing.
_BASELINES = {"full": "full", "selective-op": "every second product"}
_Sampled: TypeAlias = Callable[[], Simulation]


class CompiledMixes:
    """Chooses mixes for the groups of one job. `baselines`: the compiled step without checkpointing ("none"), and those that
    plans are shown beside; `observed`: the eager step, of which plans are made. `begin`, `sample` and
    `traced`: see `autosac.planning.closed_loop.PlanningCaptures`.
    """

    def __init__(
        self,
        groups: tuple[UnitGroup, ...],
        baselines: Mapping[str, Simulation],
        observed: Simulation,
        begin: Callable[[Plan], None],
        sample: Callable[[Plan, int | None], _Sampled],
        progress: Callable[[str], None],
        traced: Mapping[str, TracedOperators] | None = None,
    ) -> None:
        self._groups = groups
        self._baselines = baselines
        self.none = baselines["none"]
        self._observed = observed
        self._begin = begin
        self._sample = sample
        self._progress = progress
        self._measured: list[dict[CompiledPolicy, Cost]] = [{} for _ in groups]
        self._traced = dict(traced or {})
        self._excess = 0
        self._failure = ""

    def find(self, goal: Goal, candidates: Candidates) -> None:
        """Verify mixes until one fits and uses the budget, or none is left to try."""
        self._measure(goal)
        bracket = Bracket(goal.target_bytes - self._excess, goal.budget_bytes, goal.target_bytes)
        seen: set[tuple[Unit, ...]] = set()
        for _ in range(goal.rounds):
            costs = self._costs()
            try:
                choice = best_mix(_sizes(self._groups, costs), bracket.inner, _GRAPH * self.none.step_ms)
            except InfeasibleError:
                bracket.unsolved()
                continue
            plan = self._plan(goal, choice)
            self._begin(plan)
            for baseline in self._baselines.values():
                baseline.prediction()  # worked out while that capture goes on
            candidate = candidates.verify(plan)
            saved_bytes = self._learn_used(candidate, choice, costs)
            self._excess = candidate.simulation.peak_bytes(goal.budget_kind) - saved_bytes
            again = candidate.plan.units in seen
            seen.add(candidate.plan.units)
            is_done = candidate.fits(goal) and (
                candidate.uses(goal) or not self._is_worthwhile(goal, choice, candidate)
            )
            if is_done or (again and candidate.fits(goal)):
                return
            bracket.verified(candidate, goal)
            if bracket.high - bracket.low < min(_NARROW_BYTES, _NARROW * goal.budget_bytes):
                return

    @property
    def has_budgets(self) -> bool:
        """Whether units may have memory budgets of their own."""
        return any(len(without_budgets(group).policies) < len(group.policies) for group in self._groups)

    @property
    def leaves_out(self) -> bool:
        """Whether a memory budget for all that is compiled may do what no mix can: units cannot have any of their own, or
        something inside of layers is compiled that is no unit (functions of experts).
        """
        return not self.has_budgets or any(group.of_parts for group in self._groups)

    def _is_worthwhile(self, goal: Goal, choice: MixChoice, candidate: Candidate) -> bool:
        """Whether what a verified choice leaves of the budget is worth another capture: where that is much, hardly any time
        is, for the expected peak was far off.
        """
        richer = best_mix(_sizes(self._groups, self._costs()), goal.target_bytes - self._excess)
        left = 1 - candidate.simulation.peak_bytes(goal.budget_kind) / goal.budget_bytes
        return choice.ms - richer.ms >= (_GRAPH if left > _MUCH else _WORTH) * self.none.step_ms

    def smallest(self, goal: Goal) -> Plan:
        """The plan in which every unit recomputes all that it can."""
        units = [_least(group).of(unit) for group in self._groups for unit in group.units]
        return plan_of(self._observed, goal, tuple(unit for unit in units if unit is not None))

    def mirror(self, goal: Goal, baseline: str) -> Plan | None:
        """The plan in which every unit does what it does under a baseline; None if no policy is known to do that."""
        wanted = _BASELINES.get(baseline)
        if any(group.of_parts for group in self._groups):
            return None  # the baseline checkpoints what these units are parts of
        units = [p.of(unit) for g in self._groups for p in g.policies if p.name == wanted for unit in g.units]
        found = tuple(unit for unit in units if unit is not None)
        return plan_of(self._observed, goal, found) if found else None

    def notes(self, best: Candidate) -> tuple[str, ...]:
        """How many graphs the plan costs, and what could not be tried."""
        found = []
        graphs = sum(len({_policy(best.plan, unit.name) for unit in group.units}) for group in self._groups)
        kinds = len(self._groups)
        found.append(
            f"the compiler makes {graphs} {'graph' if graphs == 1 else 'graphs'} for {kinds} "
            f"{'kind' if kinds == 1 else 'kinds'} of layers; {sum(map(len, self._measured))} policies were measured"
        )
        if self._failure:
            found.append(self._failure)
        return tuple(found)

    # ---- what policies cost -----------------------------------------------------------------------------------------

    def _measure(self, goal: Goal) -> None:
        """Measure what is near the goal and has not been measured. What cannot be compiled is left out, the least first."""
        if not any(self._measured):
            self._learn_own(goal)
            self._decide_as_traced(self._traced)
        proposed, reason = self._groups, ""
        for prepare in (None, self._follow_compiler, self._leave_out_budgets, self._leave_out_decisions):
            try:
                if prepare is not None and not prepare(goal, proposed, reason):
                    continue
                self._take_samples(goal)
                if self._decide_as_traced(self._traced):
                    self._take_samples(goal)
                self._look_closer(goal)
                return
            except CaptureError as e:
                reason = reason or str(e)
        raise CaptureError(reason)

    def _look_closer(self, goal: Goal) -> None:
        """Measure more memory budgets, where there is nothing else: what they save is not known before."""
        if any(policy.has_decisions for group in self._groups for policy in group.policies):
            return
        with contextlib.suppress(CaptureError):
            for _ in range(_LOOKS):
                if self._is_bracketed(goal):
                    return
                self._take_samples(goal)

    def _is_bracketed(self, goal: Goal) -> bool:
        """Whether some measured policies save less than is left for a unit and others more, beside the extremes."""
        share = self._left_share(goal)
        for group, known in zip(self._groups, self._measured, strict=True):
            own = known[group.policies[0]].nbytes
            between = [cost.nbytes for cost in known.values() if 0 < cost.nbytes < own]
            if not between or not min(between) <= share * own < max(between):
                return False
        return True

    def _left_share(self, goal: Goal) -> float:
        """Of what all units save by themselves, the share for which there is memory."""
        pairs = zip(self._groups, self._measured, strict=True)
        most = sum(known[group.policies[0]].nbytes * len(group.units) for group, known in pairs)
        return (goal.target_bytes - self._excess) / max(1, most)

    def _follow_compiler(self, goal: Goal, _: Sequence[UnitGroup], __: str) -> bool:
        """Let policies decide about what the compiler traces. Whether that is something else than what was observed."""
        own = [[group.whole()] for group in self._groups]
        self._progress("looking at what the compiler traces")
        sampled = self._sample(self._in_turns(goal, own), self._layers(own))
        return self._decide_as_traced(sampled().trace.info.traced)

    def _leave_out_budgets(self, _: Goal, __: Sequence[UnitGroup], reason: str) -> bool:
        """Do without memory budgets: the compiler takes none where it compiles a unit in pieces. Whether there were any."""
        had = self.has_budgets
        if had:
            self._failure = f"memory budgets of single modules were not tried: {reason}"
            self._propose(map(without_budgets, self._groups))
        return had

    def _leave_out_decisions(self, _: Goal, proposed: Sequence[UnitGroup], reason: str) -> bool:
        """Try memory budgets only: units that are checkpointed cannot be compiled. Whether there are any budgets."""
        self._failure = f"only memory budgets of the compiler's partitioner were tried: {reason}"
        self._propose(map(left_to_compiler, proposed))
        return self.has_budgets

    def _propose(self, groups: Iterable[UnitGroup]) -> None:
        """Other policies, of which the costs that are known still hold."""
        self._groups = tuple(groups)
        for group, costs in zip(self._groups, self._measured, strict=True):
            for policy in set(costs).difference(group.policies):
                del costs[policy]

    def _decide_as_traced(self, traced: Mapping[str, TracedOperators]) -> bool:
        """Let policies decide about what the compiler traces, where that is something else than what was observed, and forget
        what such policies cost. Whether there are any.
        """
        changed = False
        for g, group in enumerate(self._groups):
            operators = next((traced[unit.name] for unit in group.units if unit.name in traced), ())
            if not operators or group.follows(operators):
                continue
            changed = True
            self._groups = (*self._groups[:g], group.as_traced(operators), *self._groups[g + 1 :])
            self._measured[g] = {p: cost for p, cost in self._measured[g].items() if not p.has_decisions}
        return changed

    def _learn_own(self, goal: Goal) -> None:
        """The compiler's own policies, from the step without checkpointing, and what else is at its peak."""
        costs = unit_costs(self.none, [unit.name for group in self._groups for unit in group.units])
        for group, known in zip(self._groups, self._measured, strict=True):
            known[group.policies[0]] = _typical([costs[unit.name] for unit in group.units])
        active_bytes = self.none.peak_active_bytes
        beyond_bytes = self.none.peak_bytes(goal.budget_kind) - active_bytes
        saved_bytes = sum(cost.nbytes for cost in costs.values())
        self._excess = active_bytes - saved_bytes + int(beyond_bytes * (1 + _SCATTERED))

    def _take_samples(self, goal: Goal) -> None:
        near = self._near(goal)
        if not any(near):
            return
        waiting = []
        for number in range(min(_SAMPLES, max(map(len, near)))):
            own = [
                policies[number::_SAMPLES] or policies or g.policies[:1]
                for g, policies in zip(self._groups, near, strict=True)
            ]
            waiting.append((own, self._sample(self._in_turns(goal, own), self._layers(own))))
        self._progress("measuring policies as compiled")
        self.none.prediction()  # worked out while those captures go on
        for own, sampled in waiting:
            self._learn(sampled(), own)

    def _near(self, goal: Goal) -> list[list[CompiledPolicy]]:
        """The policies of each group that are worth measuring and have not been: those of the best mix by what is expected,
        and those that save about what is left for a unit, if all groups get the same share of what they save by themselves.
        """
        left_bytes = goal.target_bytes - self._excess
        free = [known[group.policies[0]] for group, known in zip(self._groups, self._measured, strict=True)]
        share = self._left_share(goal)
        expected = []
        for group, known, own in zip(self._groups, self._measured, free, strict=True):
            decided = {p: p.expected(own) for p in group.policies if p.has_decisions}
            expected.append({**decided, **known})
        mixes: Sequence[Mix] = [()] * len(expected)
        with contextlib.suppress(InfeasibleError):
            mixes = best_mix(_sizes(self._groups, expected), left_bytes, _GRAPH * self.none.step_ms).mixes
        found = []
        for group, known, costs, own, mix in zip(self._groups, self._measured, expected, free, mixes, strict=True):
            mixed = [list(costs)[p] for p, _ in mix]
            wanted = [*mixed, *nearest(group, share * own.nbytes, own, known)]
            found.append([policy for policy in dict.fromkeys(wanted) if policy not in known])
        return found

    def _in_turns(self, goal: Goal, own: Sequence[Sequence[CompiledPolicy]]) -> Plan:
        """The plan in which the units of each group take turns with its policies."""
        pairs = zip(self._groups, own, strict=True)
        units = [
            policies[i % len(policies)].of(unit) for group, policies in pairs for i, unit in enumerate(group.units)
        ]
        return plan_of(self._observed, goal, tuple(unit for unit in units if unit is not None))

    def _layers(self, own: Sequence[Sequence[CompiledPolicy]]) -> int | None:
        """How many layers there must be for every policy to have its turns; None for all."""
        last = [g.units[: _TURNS * len(policies)][-1] for g, policies in zip(self._groups, own, strict=True)]
        numbers = [number for number in (layer_number(unit.name) for unit in last) if number is not None]
        return 1 + max(numbers) if len(numbers) == len(last) else None

    def _learn(self, simulation: Simulation, own: Sequence[Sequence[CompiledPolicy]]) -> None:
        """What policies cost, from a step whose units take turns with them."""
        self._traced.update(simulation.trace.info.traced)
        there = set(simulation.trace.modules)
        costs = unit_costs(simulation, [u.name for group in self._groups for u in group.units if u.name in there])
        for group, policies, known in zip(self._groups, own, self._measured, strict=True):
            units = [unit for unit in group.units if unit.name in there]
            for turn, policy in enumerate(policies[: len(units)]):  # a group may have fewer units than policies
                known.setdefault(policy, _typical([costs[unit.name] for unit in units[turn :: len(policies)]]))

    def _learn_used(
        self, candidate: Candidate, choice: MixChoice, costs: Sequence[Mapping[CompiledPolicy, Cost]]
    ) -> int:
        """What policies cost that have not been measured, from a step in which units follow them; the bytes that all save."""
        found = unit_costs(candidate.simulation, [unit.name for group in self._groups for unit in group.units])
        saved_bytes = 0
        for group, known, before, mix in zip(self._groups, self._measured, costs, choice.mixes, strict=True):
            policies, first = list(before), 0
            for p, count in mix:
                own = [found[unit.name] for unit in group.units[first : first + count]]
                first += count
                saved_bytes += count * known.setdefault(policies[p], _typical(own)).nbytes
        return saved_bytes

    # ---- mixes ------------------------------------------------------------------------------------------------------

    def _costs(self) -> list[dict[CompiledPolicy, Cost]]:
        """What has been measured. Full checkpointing, which may be all that fits, costs what is expected until it is."""
        found = []
        for group, known in zip(self._groups, self._measured, strict=True):
            least, own = _least(group), known[group.policies[0]]
            found.append({**known, least: known.get(least, least.expected(own))})
        return found

    def _plan(self, goal: Goal, choice: MixChoice) -> Plan:
        units: list[Unit] = []
        for group, costs, mix in zip(self._groups, self._costs(), choice.mixes, strict=True):
            policies = list(costs)
            turns = [policies[p] for p, count in mix for _ in range(count)]
            for unit, policy in zip(group.units, turns, strict=True):
                found = policy.of(unit)
                if found is not None:
                    units.append(_stated(found, costs[policy], costs[group.policies[0]]))
        return replace(plan_of(self._observed, goal, tuple(units)), reasons=(self._reasons(choice),))

    def _reasons(self, choice: MixChoice) -> Reasons:
        """With what one GiB more would save, by the same costs."""
        price = _GRAPH * self.none.step_ms
        richer = best_mix(_sizes(self._groups, self._costs()), choice.nbytes + 2**30, price)
        return Reasons(
            objective="step", method="mix of measured policies", ms_per_gib=max(0.0, choice.ms - richer.ms), binding=()
        )


def _least(group: UnitGroup) -> CompiledPolicy:
    """Full checkpointing, or the smallest memory budget where units cannot be checkpointed."""
    return next((policy for policy in group.policies if policy.has_decisions), group.policies[-1])


def _sizes(groups: Sequence[UnitGroup], costs: Sequence[Mapping[CompiledPolicy, Cost]]) -> list[EqualUnits]:
    pairs = zip(groups, costs, strict=True)
    return [EqualUnits(len(group.units), tuple(known.values())) for group, known in pairs]


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
