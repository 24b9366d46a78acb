"""Jobs whose layers are compiled as a whole: what a unit costs under a policy, and that every unit runs its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.estimator import Pricing
from autosac.planning.closed_loop import planner_for
from autosac.planning.compiled_costs import as_executed, kept_bytes, unit_costs
from autosac.planning.compiled_policies import CompiledPolicy, UnitGroup, groups_of, modules_have_budgets, nearest
from autosac.planning.planner import Goal
from autosac.plans import Decision, Plan, Unit
from autosac.simulation import Simulation, Target, simulation_of
from autosac.solvers.mix import Cost
from autosac.trace import Label, Phase
from plans import MADE_FOR as ANY_JOB
from traces import TraceBuilder, trace_of

JOB = ("--model.name", "llama3", "--model.flavor", "debugmodel", "--training.local_batch_size", "2")
JOB += ("--training.seq_len", "128", "--compile.enable")
REQUEST = TitanRequest(config_file=None, overrides=JOB, world_size=8, checkpointing="none")
MADE_FOR = replace(ANY_JOB, world_size=8)


@pytest.mark.parametrize(
    ("version", "expected"), [("2.11.0+cu130", False), ("2.12.1", False), ("2.13.0", True), ("2.14.0a0+git1", True)]
)
def test_who_takes_a_memory_budget_for_a_module(version: str, expected: bool) -> None:
    """PyTorch from 2.13 on; plans for older ones must not have any."""
    assert modules_have_budgets(version) is expected


def test_what_a_unit_takes() -> None:
    """Its kernels in both directions, those of modules inside too; of its storages those that its own backward uses, also
    if that puts a gradient there.
    """
    builder = TraceBuilder()
    builder.enter("layers.0")
    builder.op("a")
    saved, passing = builder.alloc(100), builder.alloc(7)
    gathered = builder.alloc(1000, Label.UNSHARDED_PARAMETER)
    of_tensor_parallelism = builder.alloc(50, Label.COMMUNICATION, "_c10d_functional.all_gather_into_tensor.default")
    of_fsdp = builder.alloc(500, Label.COMMUNICATION)
    builder.enter("layers.0.attention")
    builder.op("b")
    inner, result = builder.alloc(20, Label.GRADIENT), builder.alloc(9)
    builder.free(passing)
    builder.leave("layers.0.attention")
    builder.enter("layers.1")
    builder.op("c", (result,))
    other = builder.alloc(3)
    builder.phase, builder.module = Phase.BACKWARD, "layers.1"
    builder.op("d", (result, other))
    builder.free(other)
    builder.module = "layers.0"
    builder.op("e", (saved, gathered, of_tensor_parallelism, of_fsdp), (inner,))
    builder.free(result, saved, inner)
    simulation = simulation_with(builder, [1.0, 2.0, 4.0, 8.0, 16.0])
    assert unit_costs(simulation, ("layers.0", "layers.1")) == {"layers.0": (170, 19.0), "layers.1": (3, 12.0)}
    assert kept_bytes(simulation.trace, ("layers.0", "layers.1")) == {"layers.0": 170, "layers.1": 3}


def simulation_with(builder: TraceBuilder, operators_ms: list[float]) -> Simulation:
    """The trace with these prices."""
    trace = trace_of(
        builder.events,
        signatures=builder.signatures,
        storages=builder.storages,
        modules=builder.modules,
        compiled=True,
    )
    ms = np.zeros(len(builder.events))
    ms[[i for i, event in enumerate(builder.events) if hasattr(event, "signature")]] = operators_ms
    nobody = np.full(len(ms), -1, np.int16)
    prices = Pricing(event_ms=ms, source=(), event_source=nobody, event_rel_std=np.zeros(len(ms), np.float32))
    return Simulation(trace=trace, target=Target.of("h100-sxm-80gb", 1), other_prices=prices)


def microbatches(under_way: int, saved: int, backward_ms: float = 2.0) -> Simulation:
    """Four microbatches of a compiled unit that saves so many bytes of each, beside a result; so many are under way."""
    builder, prices = TraceBuilder(), list[float]()
    waiting: list[tuple[int, int]] = []
    for number in range(4):
        builder.phase = Phase.FORWARD
        builder.enter("layers.0")
        builder.op("a")
        held, result = builder.alloc(saved), builder.alloc(1000)
        builder.leave("layers.0")
        prices.append(1.0)
        waiting = [(held, result)] if not number % under_way else [*waiting, (held, result)]
        if len(waiting) == under_way:
            builder.phase, builder.module = Phase.BACKWARD, "layers.0"
            for pair in waiting:
                builder.op("b", pair[:1])
                builder.free(*pair)
                prices.append(backward_ms)
    return simulation_with(builder, prices)


@pytest.mark.parametrize("under_way", [1, 2, 4])
def test_microbatches_under_way(under_way: int) -> None:
    """A budget has to hold what all that are under way save; a plan states what one of them saves."""
    simulation = microbatches(under_way, saved=100)
    assert unit_costs(simulation, ("layers.0",)) == {"layers.0": (100 * under_way, 12.0)}
    assert kept_bytes(simulation.trace, ("layers.0",)) == {"layers.0": 100}


def test_a_plan_states_what_is_executed() -> None:
    """Bytes, share and time of a unit are those of the compiled step under the plan, whatever was expected of its policy."""
    expected = _policy("", 77).template
    assert expected is not None
    none, under = microbatches(2, saved=100), microbatches(2, saved=25, backward_ms=3.0)
    (unit,) = as_executed(Plan(made_for=MADE_FOR, units=(expected,)), under, none).units
    assert unit == replace(expected, kept_bytes=25, discard_fraction=0.75, recompute_ms=4.0)


def _policy(name: str, kept_bytes: int = 0, budget: float | None = None) -> CompiledPolicy:
    unit = Unit(
        fqn="layers.0",
        discard_fraction=0.0,
        kept_bytes=kept_bytes,
        recompute_ms=0.0,
        decisions=(),
        memory_budget=budget,
    )
    return CompiledPolicy(name=name, template=unit)


def test_policies_that_save_about_what_is_left_are_tried() -> None:
    """One policy and one memory budget on either side, a budget's bytes being its share of what the compiler saves."""
    kept = [_policy(f"keeps {nbytes}", nbytes) for nbytes in (0, 10, 20, 30, 40, 50)]
    budgets = [_policy(f"budget {k}", budget=k / 10) for k in (1, 2, 3, 4)]
    own = CompiledPolicy(name="own", template=None)
    group = UnitGroup(units=(), policies=(own, *kept, *budgets))
    chosen = [policy.name for policy in nearest(group, 25.0, Cost(100, 1.0))]
    assert chosen == ["keeps 20", "keeps 30", "budget 2", "budget 3"]
    assert [policy.name for policy in nearest(group, 5.0, Cost(100, 1.0))] == ["keeps 0", "keeps 10", "budget 1"]


def test_budgets_that_save_more_than_their_share() -> None:
    """What has been measured tells about others: 0.3 saves 60 of 100 bytes, so 0.1 and 0.2 are expected to save 20 and 40."""
    budgets = [_policy(f"budget {k}", budget=k / 10) for k in (1, 2, 3, 4)]
    group = UnitGroup(units=(), policies=(CompiledPolicy(name="own", template=None), *budgets))
    known = {budgets[2]: Cost(60, 1.0)}
    assert [policy.name for policy in nearest(group, 25.0, Cost(100, 1.0), known)] == ["budget 1", "budget 2"]
    assert [policy.name for policy in nearest(group, 65.0, Cost(100, 1.0), known)] == ["budget 3", "budget 4"]


@pytest.mark.capture
@pytest.mark.long
def test_each_layer_of_a_captured_job_runs_its_own_policy(tmp_path: Path, capture_server: CaptureServer) -> None:
    """TorchTitan's debug model, six layers under FSDP with three policies: equal policies cost the same, others do not."""
    observed = capture_server.capture(replace(REQUEST, observe=True))
    operators = [(c.op, c.occurrence) for c in observed.regions[0].calls if c.occurrence >= 0]
    assert observed.modules[observed.regions[0].module] == "layers.0"

    def unit(layer: int, kept: tuple[str, ...]) -> Unit:
        rows = tuple(Decision(op=op, occurrence=i, keep=op in kept, outputs=()) for op, i in operators)
        return Unit(fqn=f"layers.{layer}", discard_fraction=0.0, kept_bytes=0, recompute_ms=0.0, decisions=rows)

    products = ("aten.mm.default",)
    units = (unit(1, products), unit(2, ()), unit(3, products), unit(4, ()))
    plan = Plan(made_for=MADE_FOR, units=units)
    plan.save(tmp_path / "plan.json")
    trace = capture_server.capture(replace(REQUEST, checkpointing="plan", plan_file=str(tmp_path / "plan.json")))
    costs = unit_costs(simulation_of(trace, Target.of("h100-sxm-80gb", 8), plan), [f"layers.{i}" for i in range(6)])
    own, some, nothing = (costs[f"layers.{i}"] for i in (5, 1, 2))
    assert costs["layers.3"] == some and costs["layers.4"] == nothing
    assert own.nbytes > some.nbytes > nothing.nbytes and own.ms < some.ms < nothing.ms


@pytest.mark.capture
@pytest.mark.long
def test_layers_with_flexible_attention_follow_their_policies(tmp_path: Path, capture_server: CaptureServer) -> None:
    """Three layers of TorchTitan's debug model with flexible attention: the planner's own policies, from the one that keeps
    least to the one that keeps most, keep, compiled, the bytes that they say, to the byte, and Inductor makes every graph.
    """
    flexible = tuple("debugmodel_flex_attn" if word == "debugmodel" else word for word in JOB)
    request = replace(REQUEST, overrides=flexible, layers=3)
    target = Target.of("h100-sxm-80gb", 8)
    observed = simulation_of(capture_server.capture(replace(request, observe=True)), target)
    none = simulation_of(capture_server.capture(request), target)
    (group,) = groups_of(planner_for(observed, none, Goal(budget_bytes=1)).policies, none.trace)
    decided = [policy for policy in group.policies if policy.has_decisions]
    chosen = (decided[0], decided[len(decided) // 2], decided[-1])
    units = [policy.of(unit) for policy, unit in zip(chosen, group.units, strict=True)]
    plan = Plan(made_for=MADE_FOR, units=tuple(unit for unit in units if unit is not None))
    kept = [unit.kept_bytes for unit in plan.units]
    assert len(set(kept)) == len(group.units) == 3
    plan.save(tmp_path / "plan.json")
    trace = capture_server.capture(replace(request, checkpointing="plan", plan_file=str(tmp_path / "plan.json")))
    costs = unit_costs(simulation_of(trace, target, plan), [unit.fqn for unit in plan.units])
    assert trace.info.notes == () and [cost.nbytes for cost in costs.values()] == kept


def test_what_is_expected_of_a_policy() -> None:
    """Decisions cost their bytes and their recomputation, a memory budget its share of what the compiler saves by itself."""
    own = Cost(1000, 5.0)
    decided = replace(_policy("keeps 10", 10).template, recompute_ms=2.0)  # type: ignore[type-var]
    assert CompiledPolicy(name="own", template=None).expected(own) == own
    assert CompiledPolicy(name="keeps 10", template=decided).expected(own) == Cost(10, 7.0)
    assert _policy("budget", budget=0.3).expected(own) == Cost(300, 5.0)
