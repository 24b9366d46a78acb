"""Plans that keep results in host memory: which, and whether that makes the step shorter.

What is offloaded is neither held nor recomputed, so it is free as long as its copies hide. With the schedule of
`recompute.offload` the copies of unit k to the host run beside the forward of the unit after it, those back beside
that unit's recomputation and backward, which take longer. Hence, with a link of beta bytes per ms and a unit's forward of
T_u ms, unit u may offload

    B_u = share * beta * T_u                                                                 (`offloaded_items`)

of its operators' results, chosen so that the most recomputation is saved,

    maximise sum_j t_j x_j   subject to   sum_j m_j x_j <= B_u,  x_j in {0, 1}               (`_chosen`)

over all groups of operators about which there is something to decide. A unit whose backward comes right after its forward
offloads nothing. What is left is the problem of `autosac.planning.planner` without these items (`OffloadPlanner`).

How much hides depends on what else the step does, and next to its unit an offloaded result is on the device after all. So
plans are made for several shares (`SHARES`), captured, and simulated; one that offloads is taken only if it fits the budget
and its step is shorter (`Offloading.improved`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from autosac.errors import CaptureError, InfeasibleError, UsageError
from autosac.estimator import Hardware, Roofline
from autosac.memory_sim.spans import Span
from autosac.planning.candidates import Bracket, Candidate, Candidates, Verifier
from autosac.planning.planner import Goal, Planner
from autosac.planning.unit_policies import UnitPolicy
from autosac.plans import ANY_SIZE, SMALLEST_OFFLOAD_BYTES, Plan
from autosac.quantities import format_bytes, format_ms
from autosac.runtime_sim.program import Engine
from autosac.simulation import Simulation
from autosac.solvers import LocalItem, LocalProblem, knapsack
from autosac.trace import Signature, TensorMeta

SHARES = (1.0, 0.5, 0.25)
# Plans that are made for one share: a captured one's peak tells by how much the next one's has to differ.
_ROUNDS = 4
# A step that is not shorter than this share of the one without is not worth the host's memory.
_SHORTER = 0.999


class OffloadPlanner(Planner):
    """A planner whose units offload these items, by the unit's name, whenever they are checkpointed."""

    def __init__(self, planner: Planner, items: Mapping[str, frozenset[int]]) -> None:
        super().__init__(planner.base, planner.goal, planner.policies.offloading(items))
        units = [self.policies.of_module(module) for module in self.problem.modules]
        self.window_bytes = max((unit.keeping(sorted(unit.offloaded)).offloaded_bytes for unit in units), default=0)


class Offloading:
    """Looks for plans that offload, beside those of a planner; what was verified counts for every budget.

    UsageError if the job is compiled: the compiler knows of no offloading.
    """

    def __init__(self, planner: Planner, verifier: Verifier, progress: Callable[[str], None]) -> None:
        _check_eager(planner.base)
        self._planner = planner
        self._progress = progress
        self._candidates = Candidates(verifier, progress, "capturing the step under a plan that offloads")
        self._failures: dict[str, None] = {}
        self._planners = self._make_planners()

    def _make_planners(self) -> list[OffloadPlanner]:
        """A planner for each share, without those that offload the same as one before, or nothing."""
        seen: list[Mapping[str, frozenset[int]]] = [{}]
        for share in SHARES:
            items = offloaded_items(self._planner, share)
            if items not in seen:
                seen.append(items)
        return [OffloadPlanner(self._planner, items) for items in seen[1:]]

    def improved(self, goal: Goal, best: Candidate) -> tuple[Candidate, tuple[str, ...]]:
        """The best plan, or one that offloads if its step is shorter; and what is worth telling of it."""
        if best.simulation.recompute_ms == 0:
            return best, ("offloading would not avoid any recomputation",)
        for planner in self._planners:
            try:
                self._try(planner, goal, best)
            except CaptureError as e:  # the plan without offloading is there
                self._failures[f"a plan that offloads could not be captured: {e}"] = None
        limit_ms = _SHORTER * best.simulation.step_ms
        fitting = [c for c in self._candidates.verified if c.fits(goal) and c.simulation.step_ms < limit_ms]
        if not fitting:
            return best, ("no plan that offloads to host memory has a shorter step", *self._failures)
        found = min(fitting, key=lambda c: c.simulation.step_ms)
        return found, (
            f"up to {format_bytes(self._host_bytes(found.plan))} per GPU are offloaded to host memory; the step is "
            f"{format_ms(best.simulation.step_ms - found.simulation.step_ms)} shorter than without offloading",
            *self._failures,
        )

    def _try(self, planner: OffloadPlanner, goal: Goal, best: Candidate) -> None:
        """Capture plans until one fits and uses the budget, or cannot save anything. CaptureError."""
        target = goal.target_bytes
        peak = best.simulation.peak_bytes(goal.budget_kind)
        promised = best.simulation.peak_active_bytes if best.solution is None else best.solution.peak_bytes
        without = target - (peak - promised)  # what the best plan's solver was to keep within
        bracket = Bracket(without - planner.window_bytes, max(target, planner.base.peak_active_bytes), target)
        for _ in range(_ROUNDS):
            self._progress(f"solving for {format_bytes(bracket.inner)} of active memory, with offloading")
            try:
                plan, solution = planner.solve(bracket.inner, best.costs)
            except InfeasibleError:
                bracket.unsolved()
                continue
            no_better = best.solution is not None and solution.recompute_ms >= best.solution.recompute_ms
            if not plan.offloads or (no_better and bracket.inner >= without):
                return
            candidate = self._candidates.verify(plan)
            if candidate.fits(goal) and (candidate.uses(goal) or candidate.simulation.recompute_ms == 0):
                return
            bracket.verified(candidate, goal)

    def _host_bytes(self, plan: Plan) -> int:
        """The most that waits on the host at one time."""
        offloaded = {unit.fqn: unit.offloaded_bytes for unit in plan.units}
        changes: list[tuple[int, int]] = []
        problem = self._planner.problem
        for unit, spans in zip(problem.problem.units, problem.executions, strict=True):
            nbytes = offloaded.get(unit.name, 0)
            changes += [change for s in spans for change in ((s.held_first, nbytes), (s.active_first, -nbytes))]
        return int(np.cumsum([nbytes for _, nbytes in sorted(changes)]).max(initial=0))


def offloaded_items(planner: Planner, share: float) -> dict[str, frozenset[int]]:
    """The items that each unit may offload if its copies take this share of a forward; units without any are left out."""
    bytes_per_ms = link_bytes_per_ms(planner.base.target.hardware)
    found = {}
    for u, (module, spans) in enumerate(zip(planner.problem.modules, planner.problem.executions, strict=True)):
        unit = planner.policies.of_module(module)
        if all(_is_followed(planner, u, span) for span in spans):
            forward_ms = min(_forward_ms(planner.base, span) for span in spans)
            chosen = _chosen(unit, int(share * bytes_per_ms * forward_ms))
            if chosen:
                found[unit.name] = chosen
    return found


def link_bytes_per_ms(hardware: Hardware) -> float:
    """What a large copy between a GPU and its host moves in a ms."""
    size = 2**30
    device, host = (TensorMeta((size,), (1,), "uint8", place) for place in ("device", "cpu"))
    copy = Signature("aten.copy_.default", (host, device), (host,), mutates=(0,))
    (estimate,) = Roofline(hardware).estimate([copy])
    return size / estimate.ms


def _is_followed(planner: Planner, unit: int, span: Span) -> bool:
    """Whether another unit's forward runs between the forward and the backward of this execution."""
    units, regions = planner.problem.problem.units, planner.base.trace.regions
    name = units[unit].name

    def is_apart(other: str) -> bool:
        return other != name and not other.startswith(f"{name}.") and not name.startswith(f"{other}.")

    return any(
        is_apart(other.name) and regions[t.region].first >= span.held_first and t.held_first <= span.active_first
        for other, spans in zip(units, planner.problem.executions, strict=True)
        for t in spans
    )


def _forward_ms(base: Simulation, span: Span) -> float:
    """How long an execution's forward takes, waiting included."""
    timeline, region = base.timeline.ranks[base.stage], base.trace.regions[span.region]
    part = slice(region.first, region.last)
    computing = timeline.engine[part] == Engine.COMPUTE
    if not computing.any():
        return 0.0
    return float(timeline.end_ms[part][computing].max() - timeline.start_ms[part][computing].min())


def _chosen(unit: UnitPolicy, capacity_bytes: int) -> frozenset[int]:
    """The items to offload: those that save the most recomputation of all that fit the capacity."""
    stats = unit.sac.stats

    def may_leave(item: int) -> bool:
        operators = [stats.operators[i] for i in stats.groups[item].members]
        sizes = [size for operator in operators for meta in operator.outputs for size in meta.shape]
        return not any(operator.must_save for operator in operators) and ANY_SIZE not in sizes

    items = unit.sac.problem.items
    wanted = {i for i in unit.sac.problem.free() if items[i].memory_bytes >= SMALLEST_OFFLOAD_BYTES and may_leave(i)}
    problem = LocalProblem(items=tuple(item if i in wanted else LocalItem(0, 0.0) for i, item in enumerate(items)))
    return frozenset(knapsack(problem, capacity_bytes).kept)


def _check_eager(base: Simulation) -> None:
    if base.trace.info.compiled:
        raise UsageError("offloading needs a model that is not compiled: turn off compile.enable, or offloading")
