"""What modules that are compiled as a whole may do: groups of equal units, and the policies that are tried for each group.

What a policy costs a compiled unit is not the sum of what its operators cost: elementwise operators are fused, those that the
backward recomputes go into its kernels, and the partitioner decides on whatever a policy leaves open. So policies are proposed
here and measured as compiled (`compiled_costs`). Proposed are

- the compiler's own choice (no unit), and everything recomputed;
- policies of the unit's trade-off curve, by prices of what the compiler calls as it is (`compiled_prices`), evenly spread over
  the bytes that they keep;
- every second product, what is no product and launches a kernel of its own kept (TorchTitan's selective checkpointing);
- memory budgets of PyTorch's partitioner, where it takes one for a module (from PyTorch 2.13 on, not for modules that change
  buffers or draw random numbers).

A unit is *compiled as a whole* if no module inside it was entered in the compiled step. One that is compiled in parts (a block
with experts) is recomputed as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autosac.planning.inlined import inlined
from autosac.planning.traced import as_traced, follows
from autosac.planning.unit_policies import UnitPolicies, UnitPolicy
from autosac.plans import Unit
from autosac.simulation import Simulation
from autosac.solvers import frontier
from autosac.solvers.mix import Cost
from autosac.trace import ModuleEnter, Op, Phase, Trace, TracedOperators

BUDGETS = tuple(tenths / 10 for tenths in range(1, 10))
_OF_CURVE = 15
_PRODUCTS = ("mm", "bmm", "addmm", "linear", "_scaled_mm", "_grouped_mm")
_GENERATED = "triton."
_SMALL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPolicy:
    """One way to run a unit: as `template`, a unit of the group, does. None: as the compiler does by itself."""

    name: str
    template: Unit | None

    def of(self, unit: UnitPolicy) -> Unit | None:
        """The same for another unit of the group."""
        if self.template is None:
            return None
        return replace(self.template, fqn=unit.name, parameters=unit.parameters)

    def as_traced(self, operators: TracedOperators) -> CompiledPolicy:
        """The same about the operators that the compiler traces in such a unit."""
        return self if self.template is None else replace(self, template=as_traced(self.template, operators))

    @property
    def has_decisions(self) -> bool:
        """Whether it is checkpointing, and no choice of the compiler's."""
        return self.template is not None and self.template.memory_budget is None

    def expected(self, own: Cost) -> Cost:
        """About what a unit costs that costs `own` as the compiler does by itself. Bytes of what has decisions are exact but
        for small change; a memory budget is taken to cost no time.
        """
        if self.template is None:
            return own
        budget = self.template.memory_budget
        nbytes = self.template.kept_bytes if budget is None else int(budget * own.nbytes)
        return Cost(nbytes, own.ms + self.template.recompute_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGroup:
    """Equal units in the order in which they run, and the policies that they may follow; the first is the compiler's own.

    `of_parts`: the units are parts of what the job itself would checkpoint.
    """

    units: tuple[UnitPolicy, ...]
    policies: tuple[CompiledPolicy, ...]
    of_parts: bool = False

    def follows(self, operators: TracedOperators) -> bool:
        """Whether the policies decide about these operators."""
        decided = [p.template.decisions for p in self.policies if p.template is not None and p.template.decisions]
        return all(follows(rows, operators) for rows in decided)

    def as_traced(self, operators: TracedOperators) -> UnitGroup:
        """The group with policies about the operators that the compiler traces."""
        return replace(self, policies=tuple(policy.as_traced(operators) for policy in self.policies))

    def whole(self) -> CompiledPolicy:
        """Everything recomputed, whatever there is."""
        return _whole(self.units[0])

    def policy(self, name: str) -> CompiledPolicy | None:
        """The policy of this name; None if it is not proposed, or proposed as another one."""
        return next((policy for policy in self.policies if policy.name == name), None)


def compiled_prices(observed: Simulation, compiled: Simulation) -> list[float]:
    """Device time of the observed step's events, as a compiled unit recomputes them: what the compiler generates code for goes
    into kernels of the backward, and counts as free; what it calls (products, attention, collectives) takes its time.
    """
    trace = compiled.trace
    forward = [event for event in trace.events if type(event) is Op and event.phase is Phase.FORWARD]
    generated = {e.module for e in forward if trace.signatures[e.signature].name.startswith(_GENERATED)}
    called = {_operator(trace.signatures[e.signature].name) for e in forward if e.module in generated}
    names = [_operator(signature.name) for signature in observed.trace.signatures]
    return [
        0.0 if type(event) is Op and names[event.signature] not in called else ms
        for event, ms in zip(observed.trace.events, observed.pricing.event_ms.tolist(), strict=True)
    ]


def _operator(name: str) -> str:
    """Without its overload: the compiler calls those that write to memory which is there."""
    return ".".join(name.split(".")[:2])


def groups_of(policies: UnitPolicies, compiled: Trace) -> tuple[UnitGroup, ...]:
    """The units that a plan decides on, equal ones together, in the order in which they run: the outermost ones, and of one
    that is compiled in parts those directly inside it. None if nothing is compiled as a whole.

    Small units between the layers (a final norm) are not worth a policy, and do not count.
    """
    entered = {compiled.modules[e.module] for e in compiled.events if type(e) is ModuleEnter}
    inside = {name.rpartition(".")[0] for name in entered}
    around = {".".join(name.split(".")[:i]) for name in inside for i in range(1, name.count(".") + 2)}
    gathered = policies.base.trace.info.fsdp_units

    def in_parts(unit: UnitPolicy) -> bool:
        """A unit that FSDP gathers in parts is compiled in parts."""
        return unit.name in around or any(part.startswith(f"{unit.name}.") for part in gathered)

    chosen: list[UnitPolicy] = []
    outermost = _outermost(policies.units)
    for unit in outermost:
        members = [other for other in policies.units if policies.is_inside(other, unit)]
        chosen += _outermost(members) if in_parts(unit) else [unit]
    first = {region.module: region.first for region in reversed(policies.base.trace.regions)}
    found: dict[object, list[UnitPolicy]] = {}
    for unit in sorted(chosen, key=lambda unit: first[unit.module]):
        found.setdefault(_kind(unit), []).append(unit)
    large = max((_total_bytes(units) for units in found.values()), default=0)
    worthwhile = [units for units in found.values() if _total_bytes(units) > _SMALL * large]
    if any(u.name not in entered for units in worthwhile for u in units):
        return ()
    budgets = BUDGETS if modules_have_budgets(compiled.info.torch_version) else ()
    whole = [not any(map(in_parts, units)) for units in worthwhile]
    if not any(whole):
        return ()
    return tuple(
        UnitGroup(
            units=tuple(units),
            policies=_of_whole(units[0], policies.base.trace, budgets) if is_whole else all_or_nothing(units[0]),
            of_parts=units[0] not in outermost,
        )
        for units, is_whole in zip(worthwhile, whole, strict=True)
    )


def modules_have_budgets(torch_version: str) -> bool:
    """Whether this PyTorch takes a memory budget for a part of what it compiles (2.13), or only one for all (before)."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return (major, minor) >= (2, 13)


def _outermost(units: Sequence[UnitPolicy]) -> list[UnitPolicy]:
    names = {unit.name for unit in units}
    return [u for u in units if not any(".".join(u.name.split(".")[:i]) in names for i in range(1, _depth(u)))]


def _total_bytes(units: Sequence[UnitPolicy]) -> int:
    return units[0].sac.stats.memory_bytes * len(units)


def _depth(unit: UnitPolicy) -> int:
    return unit.name.count(".") + 1


def _kind(unit: UnitPolicy) -> object:
    """Equal for units that run the same operators on the same sizes."""
    operators = tuple((operator.name, operator.outputs) for operator in unit.sac.stats.operators)
    return operators, tuple(unit.parameters)


def proposed(unit: UnitPolicy, budgets: Sequence[float] = BUDGETS) -> tuple[CompiledPolicy, ...]:
    """The policies of a unit's group, with these memory budgets: see the module's docstring. No two of them decide alike."""
    named: list[tuple[str, Unit | None]] = [("the compiler's own", None), ("full", unit.recompute_all())]
    curve = frontier(unit.sac.problem)
    corners = [nbytes for nbytes, _ in curve.hull]
    low, high = corners[0], corners[-1]
    targets = [low + (high - low) * k / _OF_CURVE for k in range(_OF_CURVE + 1)]
    for nbytes in sorted({min(corners, key=lambda corner: abs(corner - target)) for target in targets}):
        kept = curve.within(nbytes)
        if kept is not None:
            named.append((f"keeps {kept.kept_bytes / 2**20:.0f} MiB", unit.unit(kept)))
    named.append(("every second product", unit.keeping(_every_second_product(unit))))
    named += [(_budget_name(budget), _left_to_compiler(unit, budget)) for budget in budgets]
    known: dict[object, CompiledPolicy] = {}
    for name, template in named:
        known.setdefault(None if template is None else template.policy, CompiledPolicy(name=name, template=template))
    return tuple(known.values())


def _of_whole(unit: UnitPolicy, trace: Trace, budgets: Sequence[float]) -> tuple[CompiledPolicy, ...]:
    known = inlined(unit, trace)
    if not _takes_budgets(unit, trace):
        budgets = ()
    if known is not None:
        return proposed(known, budgets)
    to_compiler = (CompiledPolicy(name=_budget_name(b), template=_left_to_compiler(unit, b)) for b in budgets)
    return (*all_or_nothing(unit), *to_compiler)


def _takes_budgets(unit: UnitPolicy, trace: Trace) -> bool:
    """Whether the compiler takes a memory budget for a unit. It refuses one where the graph has operators that are not of the
    unit's own code: what writes changed buffers back (batch norms), and the seeds of random numbers.
    """
    calls = trace.regions[unit.sac.stats.region].calls
    made = {storage for call in calls for storage in call.created}
    return not any(call.is_random or not made.issuperset(call.writes) for call in calls)


def _budget_name(budget: float) -> str:
    return f"memory_budget {budget:g}"


def all_or_nothing(unit: UnitPolicy) -> tuple[CompiledPolicy, ...]:
    """The policies of units of which not all operators can be decided on: those inside of compiled parts or functions."""
    return (CompiledPolicy(name="the compiler's own", template=None), _whole(unit))


def _whole(unit: UnitPolicy) -> CompiledPolicy:
    return CompiledPolicy(name="full", template=replace(unit.recompute_all(), decisions=()))


def nearest(
    group: UnitGroup, wanted_bytes: float, own: Cost, known: Mapping[CompiledPolicy, Cost] | None = None
) -> list[CompiledPolicy]:
    """The policies that save about `wanted_bytes`, by what is expected of them (`CompiledPolicy.expected`), on either side one
    that decides and a memory budget. `known`: what has been measured, between which what other budgets save is interpolated:
    the partitioner may save far more than a budget's share.
    """
    measured = {0.0: 0, 1.0: own.nbytes}
    for policy, cost in (known or {}).items():
        if policy.template is not None and policy.template.memory_budget is not None:
            measured[policy.template.memory_budget] = cost.nbytes
    found: list[CompiledPolicy] = []
    for decided in (True, False):
        of_kind = [p for p in group.policies[1:] if p.has_decisions is decided]
        expected = {p: float(p.expected(own).nbytes) if decided else _between(p, measured) for p in of_kind}
        ordered = sorted(expected, key=expected.__getitem__)
        found += [p for p in ordered if expected[p] <= wanted_bytes][-1:]
        found += [p for p in ordered if expected[p] > wanted_bytes][:1]
    return found


def _between(policy: CompiledPolicy, measured: Mapping[float, int]) -> float:
    """The bytes that a memory budget saves, from those that others save."""
    assert policy.template is not None and policy.template.memory_budget is not None
    budget = policy.template.memory_budget
    below = max(b for b in measured if b <= budget)
    above = min(b for b in measured if b >= budget)
    share = (budget - below) / (above - below) if above > below else 0.0
    return measured[below] + share * (measured[above] - measured[below])


def without_budgets(group: UnitGroup) -> UnitGroup:
    """The group without memory budgets of single units."""
    kept = tuple(p for p in group.policies if p.template is None or p.template.memory_budget is None)
    return replace(group, policies=kept)


def left_to_compiler(group: UnitGroup) -> UnitGroup:
    """The group without what cannot be done where checkpointed units cannot be compiled: memory budgets only. The smallest, 0,
    recomputes all, random numbers too: a unit that draws some does not get it.
    """
    unit = group.units[0]
    policies = [policy for policy in group.policies if not policy.has_decisions]
    if len(policies) == 1:  # compiled in parts
        return replace(group, policies=tuple(policies))
    if not any(operator.random for operator in unit.sac.stats.operators):
        everything = replace(_left_to_compiler(unit, 0.0), recompute_ms=unit.recompute_all().recompute_ms)
        policies.append(CompiledPolicy(name="memory_budget 0", template=everything))
    return replace(group, policies=tuple(policies))


def _every_second_product(unit: UnitPolicy) -> Sequence[int]:
    """The items to keep: attention and products, of these every second one."""
    found, products = [], 0
    operators = unit.sac.stats.operators
    for i, group in enumerate(unit.sac.stats.groups):
        name = operators[group.members[0]].name.removeprefix("aten.").partition(".")[0]
        products += name in _PRODUCTS
        if unit.sac.problem.items[i].forced or "attention" in name or (name in _PRODUCTS and products % 2):
            found.append(i)
    return found


def _left_to_compiler(unit: UnitPolicy, budget: float) -> Unit:
    return Unit(
        fqn=unit.name,
        discard_fraction=0.0,
        kept_bytes=0,
        recompute_ms=0.0,
        decisions=(),
        parameters=unit.parameters,
        memory_budget=budget,
    )
