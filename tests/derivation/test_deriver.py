"""Derived traces against captures of the same plans, operator by operator; and what is not derived."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autosac.derivation import Derivation, Deriver, NotDerivableError
from autosac.errors import InfeasibleError
from autosac.plans import GRAPH, Plan, Settings
from autosac.trace import UNSHARD, Op, Phase, Trace

SEEDS = range(2)


def deriver_of(subject: Any) -> Deriver:
    """With templates of all outermost and all innermost modules, and of those between them."""
    deriver = Deriver(subject.base.trace)
    between = [policy for policy in subject.policies if policy not in subject.outer + subject.inner]
    for policies in filter(None, (subject.outer, subject.inner, between)):
        deriver.add(subject.captured(subject.plain(policies)))
    return deriver


def solved(subject: Any) -> Plan:
    """The solver's plan halfway between the least memory and no checkpointing."""
    planner = subject.planner
    high = subject.base.memory.peak_bytes
    for share in (0.5, 0.7, 0.9, 0.97, 0.99):
        try:
            plan, _ = planner.solve(int(share * high))
        except InfeasibleError:
            continue
        if plan.units:
            return plan
    raise AssertionError("no budget has a plan")


def test_eager_plans_are_derived_exactly(eager: Any, rows: Any) -> None:
    """Dropout, in-place operators, two microbatches: every random plan's trace is the captured one, row by row."""
    deriver = deriver_of(eager)
    for plan in [eager.random(seed) for seed in range(4)] + [solved(eager)]:
        assert rows(deriver.under(plan)) == rows(eager.captured(plan))


def test_views_in_place_and_routers_are_derived_exactly(images: Any, rows: Any) -> None:
    """Whole blocks are checkpointed, with poolings that end in a view in place and scores that are divided in place."""
    assert {policy.name for policy in images.outer} == {"0", "1", "2"}
    assert not images.planner.policies.refusals
    deriver = deriver_of(images)
    for plan in [images.random(seed) for seed in range(4)] + [solved(images)]:
        assert rows(deriver.under(plan)) == rows(images.captured(plan))


def test_plans_of_compiled_functions_are_derived_exactly(calling: Any, rows: Any) -> None:
    """Graphs that are kept, with what they saved, and graphs that run again."""
    deriver = deriver_of(calling)
    kept = set()
    for plan in (calling.random(seed) for seed in range(3, 7)):
        assert rows(deriver.under(plan)) == rows(calling.captured(plan))
        kept |= {decision.keep for unit in plan.units for decision in unit.decisions if decision.op == GRAPH}
    assert kept == {True, False}


def test_titan_plans_are_derived_exactly(titan: Any, rows: Any) -> None:
    """TorchTitan jobs alone (under autocast), under FSDP, tensor and expert parallelism: the same, mixed levels of modules
    and plans that take nothing of the first template included.
    """
    deriver = deriver_of(titan)
    for plain in (titan.plain(titan.outer), titan.plain(titan.inner[:-1])):
        assert rows(deriver.under(plain)) == rows(titan.captured(plain))
    kept = 0
    for plan in [titan.random(seed) for seed in SEEDS] + [solved(titan)]:
        derived = deriver.under(plan)
        assert rows(derived) == rows(titan.captured(plan))
        kept += sum(decision.keep for unit in plan.units for decision in unit.decisions)
    assert kept


@pytest.mark.parametrize("titan", ["deepseek_v3, EP of 8"], indirect=True)
def test_parameters_are_gathered_where_a_plan_needs_them(titan: Any, rows: Any) -> None:
    """Experts in FSDP units of their own: a plan that keeps their first product gathers before the second one, a plan that
    keeps all of them leaves that to FSDP's hook; beside layers without a plan both are derived.
    """
    deriver = deriver_of(titan)
    gathered = []
    for products in (1, 3):
        units = [_keeping_products(policy, products) for policy in titan.outer[2:4]]
        plan = titan.plan(units)
        captured = titan.captured(plan)
        assert rows(deriver.under(plan)) == rows(captured)
        gathered.append(sum(call.op == UNSHARD for region in captured.regions for call in region.calls))
    assert gathered == [2, 0]


def _keeping_products(policy: Any, count: int) -> Any:
    """The unit that keeps the experts' first products, and what has to be kept."""
    unit, kept = policy.recompute_all(), 0
    decisions = []
    for decision in unit.decisions:
        is_product = decision.op == "aten._grouped_mm.default" and kept < count
        kept += is_product
        decisions.append(replace(decision, keep=decision.keep or is_product))
    assert kept == count
    return replace(unit, decisions=tuple(decisions))


def _again(subject: Any, plan: Plan) -> dict[str, set[tuple[str, int]]]:
    """The operators that run again under a plan, as the solver's closure has it, by module."""
    units = {unit.name: unit for unit in subject.policies}
    found = {}
    for unit in plan.units:
        stats = units[unit.fqn].sac.stats
        again = units[unit.fqn].operators_again(unit.decisions)
        found[unit.fqn] = {(stats.operators[i].name, stats.operators[i].occurrence) for i in again}
    return found


def _ran(subject: Any, plan: Plan) -> dict[str, set[tuple[str, int]]]:
    """The operators that did run again in the captured step, by module."""
    trace = subject.captured(plan)
    found: dict[str, set[tuple[str, int]]] = {unit.fqn: set() for unit in plan.units}
    for region in trace.regions:
        calls = [call for call in region.calls if call.op != UNSHARD]
        found[trace.modules[region.module]] |= {(call.op, call.occurrence) for call in calls}
    return found


def test_the_solvers_closure_is_what_runs(eager: Any) -> None:
    """What the planner expects to run again under a random plan is what the captured recomputation ran, each operator but the
    copies of empty caches, whose results have no memory.
    """

    def without_copies(units: dict[str, set[tuple[str, int]]]) -> dict[str, set[tuple[str, int]]]:
        return {name: {ran for ran in found if ran[0] != "aten._to_copy.default"} for name, found in units.items()}

    for plan in [eager.random(seed) for seed in range(4)] + [eager.plain(eager.outer), eager.plain(eager.inner)]:
        assert without_copies(_again(eager, plan)) == without_copies(_ran(eager, plan))


def test_the_solvers_closure_is_what_runs_in_titan_jobs(titan: Any) -> None:
    """The same for TorchTitan jobs."""
    for plan in [titan.random(seed) for seed in SEEDS] + [titan.plain(titan.outer), titan.plain(titan.inner[:-1])]:
        assert _again(titan, plan) == _ran(titan, plan)


def test_the_simulated_step_is_the_same(eager: Any) -> None:
    """Simulations on derived traces are those on captured ones: time, peaks, recomputation."""
    derivation = Derivation(eager.captures, {policy.name: policy.recompute_all() for policy in eager.policies})
    plan = eager.random(4)
    derived, captured = derivation.under(plan), eager.captures.under(plan)
    assert derivation.is_derived(derived)
    assert derived.prediction() == captured.prediction()
    assert derivation.confirm(plan, derived) and derivation.notes() == ()
    assert not derivation.is_derived(derivation.under(plan))


# ---- what is not covered --------------------------------------------------------------------------------------------


def test_units_without_a_template(eager: Any) -> None:
    """A unit that no template recomputes is refused."""
    deriver = Deriver(eager.base.trace)
    deriver.add(eager.captured(eager.plain(eager.inner)))
    assert deriver.covers(eager.inner[0].name) and not deriver.covers(eager.outer[0].name)
    with pytest.raises(NotDerivableError, match="no template"):
        deriver.under(eager.plain(eager.outer[:1]))


def keeping(subject: Any, name: str, ops: tuple[str, ...]) -> Plan:
    """The plan with the first module of this name, which keeps these operators."""
    unit = next(policy for policy in subject.policies if policy.name.endswith(name)).recompute_all()
    decisions = tuple(replace(d, keep=d.op in ops) for d in unit.decisions)
    assert {d.op for d in decisions if d.keep} == set(ops)
    return subject.plan([replace(unit, decisions=decisions)])


def test_in_place_operators(eager: Any, rows: Any) -> None:
    """Kept with what they change they are derived; one without the other they are not."""
    deriver = deriver_of(eager)
    both = keeping(eager, "ffn", ("aten.addmm.default", "aten.relu_.default"))
    assert rows(deriver.under(both)) == rows(eager.captured(both))
    with pytest.raises(NotDerivableError, match="changed in place"):
        deriver.under(keeping(eager, "ffn", ("aten.addmm.default",)))
    with pytest.raises(NotDerivableError, match="changed in place"):
        deriver.under(keeping(eager, "ffn", ("aten.relu_.default",)))


def test_aliases_of_recomputed_memory(eager: Any, rows: Any) -> None:
    """To keep what is only an alias of a recomputed result keeps nothing."""
    aliases = keeping(eager, "attention", ("aten._unsafe_view.default",))
    assert rows(deriver_of(eager).under(aliases)) == rows(eager.captured(aliases))


def test_decisions_for_other_operators(eager: Any) -> None:
    """A plan with an operator less than the module runs is refused."""
    unit = eager.outer[0].keeping(tuple(range(3)))
    first = replace(unit.decisions[0], keep=True)
    with pytest.raises(NotDerivableError, match="other operators"):
        deriver_of(eager).under(eager.plan([replace(unit, decisions=(first, *unit.decisions[1:-1]))]))


def test_other_ways_of_checkpointing(eager: Any) -> None:
    """A plan with other settings than the templates' is refused, and one without units."""
    deriver = deriver_of(eager)
    plan = eager.plain(eager.outer)
    with pytest.raises(NotDerivableError, match="another way"):
        deriver.under(replace(plan, settings=Settings(early_stop=not plan.settings.early_stop)))
    with pytest.raises(NotDerivableError, match="nothing"):
        deriver.under(eager.plan([]))


def test_a_job_that_recomputes_by_itself(eager: Any) -> None:
    """An observed step with recomputation in it is no base."""
    with pytest.raises(NotDerivableError, match="without a plan"):
        Deriver(eager.captured(eager.plain(eager.outer)))


def test_rows_that_depend_on_checkpointing(eager: Any) -> None:
    """Templates whose steps differ from the observed one outside of units cannot be mixed with it."""
    template = eager.captured(eager.plain(eager.outer))
    optimizer = [i for i, row in enumerate(template.events) if type(row) is Op and row.phase is Phase.OPTIMIZER]
    assert optimizer
    events = template.events[: optimizer[-1]] + template.events[optimizer[-1] + 1 :]
    deriver = Deriver(eager.base.trace)
    deriver.add(replace(template, events=events))
    with pytest.raises(NotDerivableError, match="depend on checkpointing"):
        deriver.under(eager.plain(eager.outer[:1]))


# ---- the search's side ----------------------------------------------------------------------------------------------


class Counted:
    """Captures that count, and that can be made to lie."""

    def __init__(self, captures: Any) -> None:
        self._captures = captures
        self.plans: list[Plan] = []
        self.begun: list[tuple[Plan, bool]] = []
        self.change: Any = None

    def observed(self) -> Any:
        """The step without checkpointing."""
        return self._captures.observed()

    def baselines(self) -> Any:
        """Without full checkpointing, so that templates have to be asked for."""
        return {"none": self._captures.observed()}

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        """Note it."""
        self.begun.append((plan, ahead))

    def under(self, plan: Plan) -> Any:
        """The step under a plan."""
        self.plans.append(plan)
        simulation = self._captures.under(plan)
        return simulation if self.change is None else replace(simulation, trace=self.change(simulation.trace))

    begin_template, template = begin, under


def test_one_template_serves_all(eager: Any) -> None:
    """The first plan for outer modules has one capture made, of all modules of their level; the others have none."""
    captures = Counted(eager.captures)
    derivation = Derivation(captures, {policy.name: policy.recompute_all() for policy in eager.policies})
    for count in (1, 2, 3):
        plan = eager.plan([policy.keeping((count,)) for policy in eager.outer[:count]])
        assert derivation.is_derived(derivation.under(plan))
    assert [{unit.fqn for unit in plan.units} for plan in captures.plans] == [{p.name for p in eager.outer}]


def test_nothing_is_captured_for_a_step_that_must_be_derived(eager: Any) -> None:
    """None before there is a template, for a plan that the rules do not cover, and for one that offloads."""
    captures = Counted(eager.captures)
    derivation = Derivation(captures, {policy.name: policy.recompute_all() for policy in eager.policies})
    plan, uncovered = eager.random(4), keeping(eager, "ffn", ("aten.relu_.default",))
    assert derivation.derived(plan) is None and not captures.plans
    simulation = derivation.under(plan)
    templates = list(captures.plans)
    derived = derivation.derived(plan)
    assert derived is not None and derived.trace == simulation.trace and derivation.is_derived(derived)
    assert derivation.derived(uncovered) is None and captures.plans == templates


def test_what_cannot_be_derived_is_captured(eager: Any) -> None:
    """A plan that the rules do not cover is captured, once."""
    captures = Counted(eager.captures)
    derivation = Derivation(captures, {policy.name: policy.recompute_all() for policy in eager.policies})
    plan = keeping(eager, "ffn", ("aten.relu_.default",))
    first = derivation.under(plan)
    assert derivation.under(plan) is first and not derivation.is_derived(first)
    assert captures.plans.count(plan) == 1


def test_only_a_capture_that_will_be_needed_is_begun(eager: Any) -> None:
    """A plan whose step was derived has its capture begun when it is expected; one that was captured has not."""
    captures = Counted(eager.captures)
    derivation = Derivation(captures, {policy.name: policy.recompute_all() for policy in eager.policies})
    derived, captured = eager.random(4), keeping(eager, "ffn", ("aten.relu_.default",))
    for plan in (derived, captured):
        derivation.under(plan)
        derivation.expect(plan, ahead=True)
        derivation.expect(plan)
    assert captures.begun == [(derived, True), (derived, False)]


def test_a_wrong_derivation_is_noticed(eager: Any) -> None:
    """A capture that is not as it was derived ends all derivation, and the plan's note says so."""
    captures = Counted(eager.captures)
    derivation = Derivation(captures, {policy.name: policy.recompute_all() for policy in eager.policies})
    plan = eager.random(4)
    derived = derivation.under(plan)

    def shorter(trace: Trace) -> Trace:
        last = max(i for i, row in enumerate(trace.events) if type(row) is Op and row.phase is Phase.RECOMPUTE)
        return replace(trace, events=trace.events[:last] + trace.events[last + 1 :])

    captures.change = shorter
    assert not derivation.confirm(plan, derived)
    assert derivation.under(plan).trace == shorter(eager.captured(plan)) and derivation.notes()
    assert not derivation.is_derived(derivation.under(eager.random(1)))
