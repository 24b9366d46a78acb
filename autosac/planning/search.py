"""The search for the plan with the shortest step whose verified peak fits (see `autosac.planning.closed_loop`).

For one objective, `fit` looks for the inner budget of the MILP at which the verified peak just fits. The first objective
is the time of recomputation itself. Where the step pays less for it, or more (`step_costs`), what the step pays is
the next: solve, simulate, measure again at the plan that was found, as long as the step gets shorter (`run`). Whatever was
verified on the way competes, by its simulated step.

The solver knows of active memory only. Where the budget bounds what the allocator reserves, two more plans may compete: one
for which it may reserve less, as equal units keep nearly the same (`_level`), and whatever baseline is faster than all that
was found, as a plan (`compete`). What is left of the budget then goes to a few more plans
(`_spend`), and if that is much, single units recompute less (`_relax`). At last, units of the best plan keep something else,
one or two at a time (`local_search`).

Where the layers are compiled as a whole, plans are mixes of measured policies instead (`compiled_search`). A memory budget of
the compiler's partitioner for all that is compiled competes (`_leave_to_compiler`) where single layers cannot have one, and
where parts of layers are compiled: functions inside them obey that, and no unit's. There each plan costs a capture: few are
tried, for what the step pays only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from autosac.errors import CaptureError, InfeasibleError
from autosac.planning.bound_notes import bound_notes
from autosac.planning.candidates import (
    Bracket,
    Candidate,
    Candidates,
    Verifier,
    find_border,
    is_faster,
    own_note,
    reserved_beyond_active,
)
from autosac.planning.compiled_policies import BUDGETS
from autosac.planning.compiled_search import CompiledMixes
from autosac.planning.idle_notes import fitting_hint, reserved_notes
from autosac.planning.local_search import LocalSearch
from autosac.planning.planner import ADDITIVE, Costs, Goal, Planner, plan_of
from autosac.planning.relaxations import Relaxed
from autosac.plans import Plan
from autosac.quantities import format_bytes, format_enough_bytes, format_ms
from autosac.simulation import Simulation
from autosac.trace import TracedOperators

# A bracket of inner budgets narrower than this is not worth another capture.
_NARROW_BYTES = 2**20
# Where recomputing everything needs so many times the budget, nothing else is tried: of eleven small models, the plan that the
# allocator reserves least for needs 0.91 times as much as that at the least.
_HOPELESS = 1.2
# Inner budgets that are tried beyond one that exceeded, where the verified peak need not rise with them.
BEYOND = 3
# How a job asks for the baselines that checkpoint.
_SETTINGS = {
    "full": 'activation_checkpoint.mode = "full"',
    "selective-op": 'activation_checkpoint.mode = "selective" with selective_ac_option = "op"',
}
# Plans that are tried for each objective where parts of layers are compiled.
_CAPTURED = 4
# Plans that are tried for what is left of the budget, if that is worth this share of the step.
LAST_TRIES = 3
_WORTH = 1e-4
# Where a plan leaves some of the budget, units recompute less if the step is longer than without checkpointing by this share.
_WORTH_RELAXING = 3e-3
_RELAXING_ROUNDS = 2
# A verified plan with less active memory than this share of what the solver found no plan for shows that its problem is wrong.
_REFUTED = 0.9
# A step that is not shorter than this share of the one before is no reason to go on.
_SHORTER = 0.999


class Search:
    """Verifies plans of one planner for one budget after the other; what was verified counts for every budget."""

    def __init__(
        self,
        verifier: Verifier,
        planner: Planner,
        progress: Callable[[str], None],
        mixes: CompiledMixes | None = None,
        compiled: Simulation | None = None,
        traced: Mapping[str, TracedOperators] | None = None,
    ) -> None:
        """`mixes` for a job whose layers are compiled as a whole; `compiled` for one of whose layers parts are: its step
        without checkpointing. `traced`: see `Candidates`.
        """
        self._mixes = mixes
        self._compiled = compiled
        self._verifier = verifier
        self._candidates = Candidates(verifier, progress, "simulating the step under the plan", traced)
        self._planner = planner
        self._progress = progress
        self._own: dict[str, Candidate] = {}  # the job's own ways of checkpointing that are plans; they solve nothing
        self._failure = ""  # why checkpointing of compiled modules was not tried
        self._changes = 0  # of single units: plans that were simulated and not kept
        self._unsolved_bytes = 0  # the largest inner budget that the solver has found no plan for
        base, kind = planner.base, planner.goal.budget_kind
        # By how much the verified peak lies above what the problem promises; corrected by each verification.
        if compiled is None:
            self._excess_bytes = max(0, base.peak_bytes(kind) - base.peak_active_bytes)
        else:
            self._excess_bytes = compiled.peak_bytes(kind) - base.peak_active_bytes

    @property
    def verified(self) -> list[Candidate]:
        """Every plan that was verified."""
        return self._candidates.verified

    def run(self, goal: Goal, ahead: Callable[[Plan], object] = lambda _: None) -> Candidate | None:
        """The fastest verified plan that fits; None if there is none. `ahead` gets what it may well be, if nothing better is
        found.
        """
        if self._mixes is not None:
            self._mixes.find(goal, self._candidates)
            if self._mixes.leaves_out:
                self._leave_to_compiler(goal, self._mixes.none)
            if self._fastest(goal) is None:  # its peak is what is said to work
                with contextlib.suppress(CaptureError):
                    self._candidates.verify(self._mixes.smallest(goal))
            return self._fastest(goal)
        if self._compiled is not None:
            self._leave_to_compiler(goal, self._compiled)
            try:
                self.fit(goal, self._planner.costs() if goal.objective == "step" else None)
            except CaptureError as e:
                self._failure = f"only memory budgets of the compiler's partitioner were tried: {e}"
            return self._fastest(goal)
        self.fit(goal, None)
        best = self._fastest(goal)
        if best is None:
            return None
        planner = self._planner
        costs: Costs | None = None
        for _ in range(goal.rounds):
            free_ms = planner.base.step_ms / _SHORTER
            if goal.objective != "step" or best.simulation.recompute_ms == 0 or best.simulation.step_ms <= free_ms:
                break
            costs = planner.costs() if costs is None else planner.refined(costs, best.plan)
            if costs is None:
                break
            self._progress("measuring what the step pays for recomputation")
            self.fit(goal, costs)
            before, best = best, self._fastest(goal) or best
            if best.simulation.step_ms > _SHORTER * before.simulation.step_ms:
                break
        for improve in (self._leave, self._level, self._spend, self._relax, self._climb):
            ahead((self._fastest(goal) or best).plan)
            improve(goal)
        return self._fastest(goal)

    def _leave_to_compiler(self, goal: Goal, none: Simulation) -> None:
        """Verify the largest memory budget of the compiler's partitioner that fits, for all that the job compiles; from where
        it would be if peaks were the budget's share of the peak without checkpointing. Below one whose step is longer than
        that of a plan that fits nothing is looked for.
        """
        too_slow = -1

        def fits(i: int) -> bool:
            nonlocal too_slow
            if i <= too_slow:
                return True
            candidate = self.verify_budget(goal, BUDGETS[i])
            best = self._fastest(goal)
            if best is not None and best.simulation.step_ms < candidate.simulation.step_ms:
                too_slow = i
            return candidate.fits(goal)

        share = goal.budget_bytes / max(1, none.peak_bytes(goal.budget_kind))
        find_border(fits, min(len(BUDGETS) - 1, int(len(BUDGETS) * share)), len(BUDGETS))

    def verify_budget(self, goal: Goal, budget: float) -> Candidate:
        """Verify a memory budget of the compiler's partitioner for all that is compiled."""
        plan = plan_of(self._planner.base, goal, ())
        return self._candidates.verify(replace(plan, settings=replace(plan.settings, memory_budget=budget)))

    def fit(self, goal: Goal, costs: Costs | None) -> None:
        """Verify plans until one fits and uses the budget, or no inner budget is left to try.

        A bracket finds the border between what fits and what does not, if there is but one. What the allocator reserves
        does not always rise with what is active: if nothing below the border uses the budget, a few budgets above it are
        tried as well. None is where recomputing everything needs far more than the budget.
        """
        exceeds = max(self._planner.base.peak_active_bytes, goal.budget_bytes)
        bracket = Bracket(goal.target_bytes - self._excess_bytes, exceeds, goal.target_bytes)
        captured = self._compiled is not None
        for _ in range(min(goal.rounds, _CAPTURED) if captured else goal.rounds):
            inner = bracket.inner
            self._progress(f"solving for {format_bytes(inner)} of active memory")
            candidate = self._candidate(inner, costs)
            if candidate is None:
                bracket.unsolved()
                if not self.verified:
                    smallest = self._candidates.verify(self._planner.smallest()).simulation
                    if smallest.peak_bytes(goal.budget_kind) > _HOPELESS * goal.budget_bytes:
                        return
                continue
            self._excess_bytes = candidate.simulation.peak_bytes(goal.budget_kind) - inner
            if candidate.fits(goal) and candidate.uses(goal):
                return
            bracket.verified(candidate, goal)
            if bracket.high - bracket.low < _NARROW_BYTES:
                break
        exceeded = bracket.high
        if goal.budget_kind == "reserved" and exceeded < goal.budget_bytes and not captured:
            for step in range(1, BEYOND + 1):
                inner = exceeded + (goal.budget_bytes - exceeded) * step // (BEYOND + 1)
                self._progress(f"solving for {format_bytes(inner)} of active memory")
                candidate = self._candidate(inner, costs)
                if candidate is not None and candidate.fits(goal) and candidate.uses(goal):
                    return

    def _level(self, goal: Goal) -> None:
        """Try plans in which equal units keep nearly the same.

        At the most they save what the best plan's allocator reserves beyond its active peak and the un-checkpointed step's
        does not. They are verified while what they recompute for that is less than what the best plan recomputes.
        """
        best = self._fastest(goal)
        if goal.budget_kind != "reserved" or best is None or best.solution is None:
            return
        spare_bytes = reserved_beyond_active(best.simulation) - reserved_beyond_active(self._planner.base)
        worth_ms = best.solution.budgets.shadow_ms_per_gib * spare_bytes / 2**30
        if worth_ms < (1 - _SHORTER) * best.simulation.step_ms:
            return
        excess_bytes = best.simulation.peak_bytes(goal.budget_kind) - best.solution.peak_bytes - spare_bytes
        for _ in range(BEYOND):
            inner = goal.target_bytes - excess_bytes
            self._progress(f"solving for {format_bytes(inner)} of active memory, equal units alike")
            try:
                plan, solution = self._planner.solve(inner, best.costs, level=True)
            except InfeasibleError:
                return
            if solution.recompute_ms >= best.solution.recompute_ms:
                return
            candidate = self._candidates.verify(plan, solution, best.costs)
            if candidate.fits(goal) and candidate.uses(goal):
                return
            excess_bytes = candidate.simulation.peak_bytes(goal.budget_kind) - inner

    def _leave(self, goal: Goal) -> None:
        """Relax the plan that recomputes everything where the host makes the best one's step longer than recomputation does:
        it records the operators of every module that is checkpointed. Only where steps are derived.
        """
        best = self._fastest(goal)
        if best is None or not self._verifier.is_derived(best.simulation):
            return
        host_ms = best.simulation.step_ms - self._planner.base.step_ms - best.simulation.recompute_ms
        if host_ms < max(best.simulation.recompute_ms, _WORTH_RELAXING * best.simulation.step_ms):
            return
        candidate = self._candidates.verify(self._planner.smallest())
        if candidate.fits(goal) and self._verifier.is_derived(candidate.simulation):
            self._relax_one(goal, candidate)

    def _spend(self, goal: Goal) -> None:
        """Try plans for what the best one leaves of the budget; for a half and a quarter of that where they do not fit.

        Only where steps are derived: a capture for each takes longer than the plans are worth.
        """
        share = 1.0
        for _ in range(LAST_TRIES):
            best = self._fastest(goal)
            if best is None or best.solution is None or not self._verifier.is_derived(best.simulation):
                return
            left_bytes = goal.budget_bytes - best.simulation.peak_bytes(goal.budget_kind)
            worth_ms = best.solution.budgets.shadow_ms_per_gib * share * left_bytes / 2**30
            if worth_ms < _WORTH * best.simulation.step_ms:
                return
            inner = best.solution.peak_bytes + int(share * left_bytes)
            self._progress(f"solving for {format_bytes(inner)} of active memory, for the rest of the budget")
            self._candidate(inner, best.costs, level=best.solution.level)
            if self._fastest(goal) is best:
                share /= 2

    def _relax(self, goal: Goal) -> None:
        """Let single units recompute less where the best plan leaves much of the budget that would shorten the step
        (`Planner.relaxations`): in as many as fit, again from what that gives. Where steps are captured only if the solver has
        found no plan that fits, and then once, in modules that are not checkpointed any more.
        """
        for _ in range(_RELAXING_ROUNDS):
            best = self._fastest(goal)
            if best is None or best.uses(goal):
                return
            is_derived = self._verifier.is_derived(best.simulation)
            if not is_derived and best.solution is not None:
                return
            if best.simulation.step_ms - self._planner.base.step_ms < _WORTH_RELAXING * best.simulation.step_ms:
                return
            self._relax_one(goal, best, every=1 if is_derived else 2)
            if self._fastest(goal) is best or not is_derived:
                return

    def _relax_one(self, goal: Goal, candidate: Candidate, every: int = 1) -> None:
        """Verify, of each sequence, or of every so many, the plan that recomputes least and fits, and some around it."""
        left_bytes = goal.budget_bytes - candidate.simulation.peak_bytes(goal.budget_kind)
        for plans in islice(self._planner.relaxations(candidate.plan), 0, None, every):

            def fits(i: int, plans: Sequence[Relaxed] = plans) -> bool:
                self._progress(f"recomputing less in {i + 1} of {len(plans)} modules")
                return self._candidates.verify(plans[i].plan, costs=candidate.costs).fits(goal)

            find_border(fits, max(0, sum(p.more_bytes <= left_bytes for p in plans) - 1), len(plans))

    def _climb(self, goal: Goal) -> None:
        """Let single units of the best plan keep something else (`local_search`). Only where steps are derived, and not for
        solvers that are there to be compared.
        """
        best = self._fastest(goal)
        if not goal.changes or goal.solver in ADDITIVE or best is None or not best.plan.units:
            return
        if not self._verifier.is_derived(best.simulation) and self._verifier.derived(best.plan) is None:
            return
        self._progress("changing single modules")
        found, tries = LocalSearch(self._planner, self._verifier).climb(goal, best)
        self._changes += tries
        if found is not best:
            self._changes -= 1  # it counts as a plan
            self._candidates.verified.append(found)

    def compete(self, goal: Goal, baselines: Mapping[str, Simulation]) -> None:
        """Verify, as plans, the baselines that fit and are faster than all that was found: full checkpointing costs the host
        nothing per operator, and the allocator may reserve less for what every layer does alike. If nothing fits, that which
        needs least competes as well: what a job can do by itself is never refused. Those that are plans as they are compete
        as such, too.
        """
        best = self._fastest(goal)
        least = None if best is not None else _least(baselines, goal.budget_kind)
        for name, baseline in baselines.items():
            if baseline.peak_bytes(goal.budget_kind) > goal.budget_bytes and name != least:
                continue
            if best is not None and baseline.step_ms >= best.simulation.step_ms:
                continue
            self.verify_as(goal, name, baseline)
            own = self._planner.own(name, baseline) if self._mixes is None else None
            if own is not None:
                self._own[name] = Candidate(plan=own, simulation=baseline, mirrors=name)

    def verify_as(self, goal: Goal, name: str, baseline: Simulation) -> None:
        """Verify the plan that does what the job does under a baseline, or full checkpointing; nothing if no plan can."""
        mirror = self._mixes.mirror(goal, name) if self._mixes is not None else self._planner.mirror(baseline)
        if mirror is None:
            return
        if mirror.units:
            best = self._fastest(goal)
            prices = best.plan.reasons if best is not None else ()
            reasons = tuple(replace(reason, method=f"as the job's {name}", binding=()) for reason in prices)
            self._candidates.verify(replace(mirror, reasons=reasons), mirrors=name)
        else:
            self._candidates.verify(self._planner.smallest())

    def best(self, goal: Goal, baselines: Mapping[str, Simulation], *, own: bool = True) -> Candidate:
        """The fastest verified plan that fits, of equally fast ones that which recomputes least. With `own`, the job's own
        checkpointing where that is faster. InfeasibleError says the smallest budget that would do, and names a baseline
        that needs less.
        """
        best = self._fastest(goal)
        owns = list(self._own.values()) if own else []
        fitting = [c for c in owns if c.fits(goal)]
        fastest = min(fitting, key=lambda c: c.simulation.step_ms, default=None)
        if fastest is not None and (best is None or is_faster(fastest.simulation.step_ms, best.simulation.step_ms)):
            return fastest
        if best is None:
            raise self._infeasible(goal, baselines, owns)
        return best

    def _fastest(self, goal: Goal) -> Candidate | None:
        fitting = [c for c in self.verified if c.fits(goal)]
        if not fitting:
            return None
        limit_ms = min(c.simulation.step_ms for c in fitting) * (1 + 1e-6)
        fastest = [c for c in fitting if c.simulation.step_ms <= limit_ms]
        return min(fastest, key=lambda c: (c.simulation.recompute_ms, c.simulation.peak_bytes(goal.budget_kind)))

    def settle(self, candidate: Candidate, simulation: Simulation) -> Candidate:
        """The candidate with another simulation of its plan in place of its own."""
        settled = replace(candidate, simulation=simulation)
        self.verified[self.verified.index(candidate)] = settled
        return settled

    def forget(self, is_wrong: Callable[[Simulation], bool]) -> None:
        """Do as if the plans with these simulations had never been verified."""
        self.verified[:] = [candidate for candidate in self.verified if not is_wrong(candidate.simulation)]

    def _candidate(self, inner: int, costs: Costs | None, *, level: bool = False) -> Candidate | None:
        try:
            plan, solution = self._planner.solve(inner, costs, level=level)
        except InfeasibleError:
            self._unsolved_bytes = max(self._unsolved_bytes, inner)
            return None
        return self._candidates.verify(plan, solution, costs)

    @property
    def is_refuted(self) -> bool:
        """Whether a plan was verified that needs far less active memory than the problem allows any: then its bound is none.
        So it is where a schedule divides the backward, and a unit holds nothing between its two parts.
        """
        return any(c.simulation.peak_active_bytes < _REFUTED * self._unsolved_bytes for c in self.verified)

    @property
    def is_uneven(self) -> bool:
        """Whether the problem knows of some modules what their executions take in the mean: then its bound is none, either."""
        return self._planner.policies.is_uneven

    def _infeasible(
        self, goal: Goal, baselines: Mapping[str, Simulation], owns: Sequence[Candidate]
    ) -> InfeasibleError:
        """What the smallest budget would be: the least verified peak, that of recomputing everything among them, or of a
        baseline that no plan can express. Plans that keep more may reserve a little less, as its holes are the allocator's:
        it is the smallest that was found; of compiled mixes, of which another budget's search tries others, the smallest that
        every search finds. `owns`: the job's own ways of checkpointing that are plans.
        """
        kind = goal.budget_kind
        plan = self._planner.smallest() if self._mixes is None else self._mixes.smallest(goal)
        try:
            found = self._candidates.verify(plan)
            smallest = found.simulation
            tried = [c for c in self.verified if self._mixes is None or c is found or c.mirrors]
        except CaptureError:
            if not self.verified:
                raise
            smallest = min((c.simulation for c in self.verified), key=lambda s: s.peak_bytes(kind))
            tried = self.verified
        least = min(c.simulation.peak_bytes(kind) for c in (*tried, *owns))
        report = smallest.memory.peak()
        name = _least(baselines, kind)
        own_bytes = baselines[name].peak_bytes(kind) if name is not None else least
        hint = f"the smallest budget found to work is {format_enough_bytes(least)}"
        plain_bytes = baselines["none"].peak_bytes(kind) if "none" in baselines else least
        if plain_bytes < min(own_bytes, least):  # it recomputes by itself, what its plans do once more
            hint = f"the step without a plan needs {format_enough_bytes(plain_bytes)}, and every plan more"
        elif name is not None and own_bytes < least:
            fits = "fits" if own_bytes <= goal.budget_bytes else "needs less"
            hint = (
                f"the smallest that a plan needs is {format_enough_bytes(least)}, but {_SETTINGS[name]} of the job "
                f"itself {fits} with {format_enough_bytes(own_bytes)}, which no plan can express"
            )
        where = f"{report.op or 'the start'} in the {report.phase.name.lower()} of {report.module or 'the step'}"
        peak = f"with everything recomputed the peak is at {where}"
        why = "; ".join((hint, *fitting_hint(smallest, goal), peak, *self._planner.policies.left_out))
        return InfeasibleError(
            f"no plan meets {format_bytes(goal.budget_bytes)} {kind}: {why}",
            peak_in=report.outside,
        )

    def gap(self, candidate: Candidate) -> float | None:
        """By how much a verified plan is above the joint problem's bound at its own peak, at the most; None if it offloads,
        which that problem does not know.
        """
        if candidate.plan.offloads:
            return None
        return self._planner.gap(candidate.plan, candidate.costs)

    def notes(self, goal: Goal, best: Candidate, *, is_stage: bool = False) -> tuple[str, ...]:
        """What is worth telling of the plan; of a stage's without the bound, which is that of all stages."""
        peak = best.simulation.peak_bytes(goal.budget_kind)
        report = best.simulation.memory.peak()
        count = len(self.verified) + self._changes
        found = [
            f"the verified peak uses {peak / goal.budget_bytes:.1%} of the budget; "
            f"{count} {'plan was' if count == 1 else 'plans were'} simulated",
            f"the peak is at {report.op} in the {report.phase.name.lower()} of {report.module or 'the step'}",
        ]
        if best.plan.settings.job_checkpointing:
            found.append(self._why_own(goal, best))
        elif best.mirrors:
            found.append(f"the plan does the same as the job's own {best.mirrors}: nothing faster was found")
        solution = best.solution
        if solution is not None and solution.method != "milp":
            found.append(f"the MILP found nothing within its time limit; decided by: {solution.method}")
        if solution is not None and solution.level:
            found.append("equal modules keep nearly the same operators, so that the allocator reserves less")
        if goal.budget_kind == "reserved":
            found += reserved_notes(best.simulation)
        if best.plan.units:
            gap = None if is_stage or best.simulation.trace.info.compiled else self.gap(best)
            found += bound_notes(best, gap, self.is_refuted, self.is_uneven)
        if self._mixes is not None:
            found += self._mixes.notes(best)
        if self._failure:
            found.append(self._failure)
        return tuple(found + list(self._planner.policies.refusals))

    def _why_own(self, goal: Goal, own: Candidate) -> str:
        """Why the plan is the job's own checkpointing."""
        other = self._fastest(goal)
        if other is None:
            return own_note(own.mirrors, "no plan for single modules fits")
        more_ms = other.simulation.step_ms - own.simulation.step_ms
        return own_note(own.mirrors, f"the fastest plan for single modules takes {format_ms(more_ms)} longer")


def _least(baselines: Mapping[str, Simulation], kind: str) -> str | None:
    """The baseline with the least memory, if there is one that checkpoints."""
    names = [name for name in baselines if name in _SETTINGS]
    return min(names, key=lambda name: baselines[name].peak_bytes(kind), default=None)
