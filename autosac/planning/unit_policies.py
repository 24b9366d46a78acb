"""Per-operator policies of every unit: from the SACEstimator's statistics to the units of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from autosac.display.module_names import alike, natural, span, without_numbers
from autosac.estimator.sac_curves import upper_bound
from autosac.estimator.sac_estimator import SACEstimator, SACModule
from autosac.estimator.sac_stats import tradeoff
from autosac.planning.build_problem import UnitStatistics
from autosac.planning.uneven import mean_of
from autosac.plans import Decision, Parameters, Unit
from autosac.simulation import Simulation
from autosac.solvers import LocalItem, LocalProblem, LocalSolution, unit_curve
from autosac.trace import Region


@dataclass(frozen=True, kw_only=True)
class UnitPolicy:
    """One module that may be checkpointed, with the statistics of its executions: of the first, or their mean (`mean_of`).

    `offloaded`: the items whose results wait in host memory.
    """

    name: str
    module: int
    sac: SACModule
    parameters: Parameters
    is_mean: bool = False
    offloaded: frozenset[int] = frozenset()

    def offloading(self, items: Collection[int]) -> UnitPolicy:
        """The unit whose results of these items wait in host memory: kept, without taking memory on the device."""
        problem = LocalProblem(
            items=tuple(
                LocalItem(0, 0.0, forced=True) if i in items else item for i, item in enumerate(self.sac.problem.items)
            )
        )
        sac = replace(self.sac, problem=problem, tradeoff=tradeoff(problem))
        return replace(self, sac=sac, offloaded=frozenset(items))

    def problem(self, *, additive: bool = False) -> LocalProblem:
        """What the local solvers decide; `additive`: as if all that is not kept ran again."""
        return self.sac.problem.additive() if additive else self.sac.problem

    def statistics(self, *, additive: bool = False, model: str = "staircase") -> UnitStatistics:
        """What the global problem needs: the hull of the unit's curve, or the curve in the order of MSPS, by a `model`."""
        if not additive and self.sac.problem.closure is not None:
            curve = unit_curve(self.sac.problem)
            fitted = model == "pwlf" and len(curve.corners) > 1
            return UnitStatistics(
                stored_bytes=curve.stored_bytes,
                discardable_bytes=curve.discardable_bytes,
                recompute_ms=curve.recompute_ms,
                segments=upper_bound(curve.corners) if fitted else curve.segments,
                is_mean=self.is_mean,
            )
        tradeoff = self.sac.tradeoff
        return UnitStatistics(
            stored_bytes=tradeoff.stored_bytes,
            discardable_bytes=tradeoff.discardable_bytes,
            recompute_ms=tradeoff.runtime_ms,
            segments=self.sac.segments(model),
            is_mean=self.is_mean,
        )

    def kept_items(self, decisions: Sequence[Decision]) -> frozenset[int]:
        """The items of which these decisions keep all operators. A launched kernel goes with what it writes to: nothing
        decides about it.
        """
        stats = self.sac.stats
        keep = {(decision.op, decision.occurrence) for decision in decisions if decision.keep}
        names = [(operator.name, operator.occurrence) for operator in stats.operators]
        found = []
        for g, group in enumerate(stats.groups):
            decided = [names[i] for i in group.members if stats.operators[i].occurrence >= 0]
            if decided and keep.issuperset(decided):
                found.append(g)
        return frozenset(found)

    def operators_again(self, decisions: Sequence[Decision]) -> frozenset[int]:
        """The operators that launch something and run again under these decisions."""
        return self.sac.stats.operators_again(self.kept_items(decisions))

    def recompute_all(self) -> Unit:
        """The unit that keeps nothing at all: plain checkpointing."""
        return self.keeping(())

    def keeping(self, kept: Sequence[int]) -> Unit:
        """The unit that keeps these items."""
        return self.unit(self.sac.problem.keeping({i for i in kept if i < len(self.sac.problem.items)}))

    def unit(self, solution: LocalSolution) -> Unit:
        """The unit of a plan that follows a local solution."""
        stats = self.sac.stats
        total, groups = stats.memory_bytes, [stats.groups[item] for item in self.offloaded.intersection(solution.kept)]
        offloaded = frozenset(i for group in groups for i in group.members)
        held = solution.kept_bytes + sum(stats.operators[i].memory_bytes for i in offloaded)
        return Unit(
            fqn=self.name,
            discard_fraction=1 - held / total if total else 1.0,
            kept_bytes=solution.kept_bytes,
            recompute_ms=solution.recompute_ms,
            decisions=self._decisions(stats.kept_operators(solution), offloaded),
            parameters=self.parameters,
        )

    def _decisions(self, kept: frozenset[int], offloaded: frozenset[int]) -> tuple[Decision, ...]:
        return tuple(
            Decision(
                op=operator.name,
                occurrence=operator.occurrence,
                keep=i in kept,
                outputs=tuple((meta.shape, meta.dtype) for meta in operator.outputs),
                memory_bytes=operator.memory_bytes,
                runtime_ms=operator.runtime_ms,
                msps=operator.memory_bytes / operator.runtime_ms * 1e3 if operator.runtime_ms > 0 else None,
                offload=i in offloaded and operator.memory_bytes > 0,
            )
            for i, operator in enumerate(self.sac.stats.operators)
            if operator.occurrence >= 0
        )


class UnitPolicies:
    """All modules of a captured step that may be checkpointed; `refusals` says of others why they may not, `left_out` of those
    of which nothing inside or around them may, either.

    `event_ms`: device time of its events, if not that of the simulation.
    """

    def __init__(self, base: Simulation, *, curve: str = "staircase", event_ms: Sequence[float] | None = None) -> None:
        self.base = base
        self._curve = curve
        trace = base.trace
        estimator = SACEstimator(
            trace, base.pricing.event_ms.tolist() if event_ms is None else event_ms, on_demand=True
        )
        self.modules = estimator.modules()
        self.units: list[UnitPolicy] = []
        self._by_module: dict[int, UnitPolicy] = {}
        units: list[UnitPolicy] = []
        executions: dict[int, list[int]] = {}
        for index in self.modules:
            executions.setdefault(trace.regions[index].module, []).append(index)
        refused: dict[str, str] = {}
        for module, indices in executions.items():
            name = trace.modules[module]
            sac = self.modules[indices[0]]
            refusal = sac.stats.refusal
            is_even = all(_same_calls(trace.regions[indices[0]], trace.regions[i]) for i in indices)
            if refusal is None and not is_even:
                mean = mean_of([self.modules[i] for i in indices])
                sac, refusal = (sac, "executions differ in their operators") if mean is None else (mean, None)
            if refusal is not None:
                refused[name] = refusal
                continue
            parameters = tuple(
                (parameter.removeprefix(f"{name}."), tuple(shape))
                for parameter, shape in trace.info.parameter_shapes.items()
                if parameter.startswith(f"{name}.")
            )
            units.append(UnitPolicy(name=name, module=module, sac=sac, parameters=parameters, is_mean=not is_even))
        self._choose([unit for unit in units if unit.name not in refused])
        self._refused = refused
        self.refusals = _told(refused)

    @property
    def left_out(self) -> tuple[str, ...]:
        """See the class."""
        left = {name: why for name, why in self._refused.items() if not self._is_part_decided(name)}
        return _told({name: left[name] for name in left if not any(name.startswith(f"{n}.") for n in left)})

    def _is_part_decided(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{u.name}.") or u.name.startswith(f"{name}.") for u in self.units)

    def _choose(self, units: list[UnitPolicy]) -> None:
        self.units = units
        self._by_module = {unit.module: unit for unit in units}

    @property
    def is_uneven(self) -> bool:
        """Whether some module's executions are of different sizes, of which the problem knows the mean."""
        return any(unit.is_mean for unit in self.units)

    def of_module(self, module: int) -> UnitPolicy:
        """The policy of a module by its index in the trace."""
        return self._by_module[module]

    def offloading(self, items: Mapping[str, Collection[int]]) -> UnitPolicies:
        """The same modules, of which these have results that wait in host memory: their items, by the module's name."""
        found = copy(self)
        found._choose([unit.offloading(items[unit.name]) if unit.name in items else unit for unit in self.units])
        return found

    def is_inside(self, inner: UnitPolicy, outer: UnitPolicy) -> bool:
        """`inner` lies within `outer` in the module tree."""
        return inner.name.startswith(f"{outer.name}.")

    def statistics(self, *, additive: bool = False) -> dict[int, UnitStatistics]:
        """What the global problem needs, by region; `additive`: as if all that is not kept ran again."""
        found = {}
        for index in self.modules:
            policy = self._by_module.get(self.base.trace.regions[index].module)
            if policy is not None:
                found[index] = policy.statistics(additive=additive, model=self._curve)
        return found

    def allowed(self) -> dict[int, bool]:
        """Every unit here may be checkpointed."""
        return dict.fromkeys(self._by_module, True)


def _told(refused: Mapping[str, str]) -> tuple[str, ...]:
    """Why modules are not checkpointed, one reason after the other."""
    ordered = sorted(refused, key=natural)
    told = []
    for why in dict.fromkeys(refused.values()):
        names = [name for name in ordered if refused[name] == why]
        families = ", ".join(map(span, alike(names, str, without_numbers)))
        told.append(f"{families} {'is' if len(names) == 1 else 'are'} not checkpointed: {why}")
    return tuple(told)


def _same_calls(first: Region, other: Region) -> bool:
    """Two executions of a module ran the same operators with outputs of the same layout."""

    def layouts(region: Region) -> list[tuple[object, ...]]:
        return [
            (call.op, tuple((meta.shape, meta.dtype) for meta in call.outputs))
            for call in region.calls
            if call.occurrence >= 0
        ]

    return layouts(first) == layouts(other)
