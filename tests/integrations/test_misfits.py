"""Plans that do not fit: fallbacks while running, refusals before. Real tensors on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from autosac.errors import PlanError
from autosac.integrations.eager import PlanMismatchWarning, apply
from autosac.plans import ANY_SIZE, Decision, Plan, Unit

FAST = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def applied(case: Any, plan: Plan) -> nn.Module:
    """A copy of the case's model under the plan."""
    return apply(copy.deepcopy(case.model), plan)


def keep_groups(lab: Any, case: Any, share: int) -> set[int]:
    """Positions of every so many groups; both layers run the same operators."""
    groups = lab.groups_of(case.calls["layers.0"])
    return {i for group in groups[::share] for i in group}


def _mutate(plan: Plan, change: Any) -> Plan:
    """The plan with the decisions of each unit changed."""
    units = tuple(dataclasses.replace(unit, decisions=tuple(change(list(unit.decisions)))) for unit in plan.units)
    return dataclasses.replace(plan, units=units)


def _other_shape(rows: list[Decision]) -> list[Decision]:
    middle = len(rows) // 2
    rows[middle] = dataclasses.replace(rows[middle], outputs=(((7, 7), "float32"),))
    return rows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_shape, "the plan has float32[7, 7]"),
        (lambda rows: rows[:-1], "runs more calls of"),
        (
            lambda rows: [*rows, Decision(op="aten.foo.default", occurrence=0, keep=True, outputs=())],
            "operators; the",
        ),
    ],
)
def test_a_difference_found_while_running_recomputes_everything_with_one_warning(
    lab: Any, case: Any, change: Any, words: str
) -> None:
    """A wrong fingerprint, a missing or a surplus operator: one warning a unit over three steps, gradients
    right.
    """
    everything = range(len(case.calls["layers.0"]))
    model = applied(case, _mutate(case.plan(everything, early_stop=False), change))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert lab.same(lab.step(model, case.tokens), case.reference)
        with lab.counting(model, case.calls) as ran:
            lab.step(model, case.tokens)
    messages = [str(w.message) for w in caught if w.category is PlanMismatchWarning]
    assert [m.split()[1] for m in messages] == ["layers.0", "layers.1"]
    assert all(any(word in m for word in words.split("|")) for m in messages)
    for fqn, calls in case.calls.items():
        assert ran[fqn] == [call.op for call in calls] * 2


def test_another_batch_shape_falls_back_and_the_planned_one_still_follows_the_plan(lab: Any, cases: Any) -> None:
    """A smaller last batch recomputes everything; the next full batch keeps everything again."""
    case = cases["llama"]
    model = applied(case, case.plan(range(1000)))
    short = case.tokens[:, :3]
    with pytest.warns(PlanMismatchWarning):
        result = lab.step(model, short)
    assert lab.same(result, lab.step(copy.deepcopy(case.model), short))
    with lab.counting(model, case.calls) as ran:
        assert lab.same(lab.step(model, case.tokens), case.reference)
    assert [len(ran[fqn]) for fqn in case.calls] == [len(calls) for calls in case.calls.values()]


def test_random_operators_torn_apart_fall_back(lab: Any, cases: Any) -> None:
    """Keeping the first dropout's mask only would shift the random stream of the others: fallback, right
    gradients.
    """
    case = cases["gpt"]
    groups = [
        g for g in lab.groups_of(case.calls["layers.0"]) if case.calls["layers.0"][g[0]].op.startswith("aten.empty")
    ]
    assert len(groups) == 1, "all dropouts of a block are one group"
    first_mask = set(groups[0][: len(groups[0]) // 3])
    with pytest.warns(PlanMismatchWarning, match="recomputes the random aten.bernoulli_"):
        assert lab.same(lab.step(applied(case, case.plan(first_mask)), case.tokens), case.reference)


def test_recomputing_dropout_without_rng_state_is_refused(lab: Any, cases: Any) -> None:
    """With preserve_rng_state = false a recomputed mask would be another one: an error, unless the plan keeps
    it.
    """
    case = cases["gpt"]
    kept = {i for i, c in enumerate(case.calls["layers.0"]) if c.op == "aten.softmax.int" or i == 0}
    with pytest.raises(RuntimeError, match="preserve_rng_state"):
        lab.step(applied(case, case.plan(kept, preserve_rng_state=False)), case.tokens)
    everything = case.plan(range(1000), preserve_rng_state=False)
    assert lab.same(lab.step(applied(case, everything), case.tokens), case.reference)


def test_keeping_a_tensor_but_recomputing_its_mutator_falls_back(lab: Any, cases: Any) -> None:
    """Each way to tear the group of `h = up(x); h.relu_()` apart is noticed, and named."""
    case = cases["inplace"]
    calls = case.calls["layers.0"]
    relu = next(i for i, c in enumerate(calls) if c.op == "aten.relu_.default")
    maker = next(i for i, c in enumerate(calls) if c.made & calls[relu].writes)
    for keep, words in (
        ({maker}, "changes in place what its plan keeps"),
        ({relu}, f"keeps aten.relu_.default but recomputes {calls[maker].op}"),
    ):
        with pytest.warns(PlanMismatchWarning, match=words):
            assert lab.same(lab.step(applied(case, case.plan(keep)), case.tokens), case.reference)


class Reader(nn.Module):
    """Reads a tensor before changing it in place: recomputed from the kept, final value it would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        with torch.no_grad():
            scale = torch.full((4,), 2.0)
            early = scale * 3
            scale.mul_(5)
        return torch.sin(self.linear(x) * early) * scale


def test_reading_a_kept_tensor_before_its_change_falls_back(lab: Any) -> None:
    """The creator and the mutator kept, the reader in between recomputed: PyTorch alone would give wrong
    gradients.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Reader())
    x = torch.randn(3, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        m.zero_grad()
        m(x).sum().backward()
        return tuple(p.grad.clone() for p in m.parameters())

    calls = lab.observed(model, ["0"], lambda m: m(x))["0"]
    ops = [c.op for c in calls]
    keep = {ops.index("aten.full.default"), ops.index("aten.mul_.Tensor")}
    reference = run(copy.deepcopy(model))
    torn = apply(copy.deepcopy(model), lab.plan_for(model, {"0": lab.decisions_from(calls, keep)}))
    with pytest.warns(PlanMismatchWarning, match="which reads memory that a kept operator changes later"):
        assert lab.same(run(torn), reference)
    whole = apply(
        copy.deepcopy(model),
        lab.plan_for(model, {"0": lab.decisions_from(calls, keep | {ops.index("aten.mul.Tensor")})}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lab.same(run(whole), reference)


def test_a_kept_output_changed_after_the_module_falls_back(lab: Any, cases: Any) -> None:
    """The next operation changes the module's kept output in place; the recomputation notices before it uses
    it.
    """

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).add_(1.0) * x

    torch.manual_seed(0)
    model = Outer(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    x = torch.randn(2, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        m(x).sum().backward()
        return tuple(p.grad for p in m.parameters())

    calls = lab.observed(model, ["inner"], lambda m: m(x))["inner"]
    plan = lab.plan_for(model, {"inner": lab.decisions_from(calls, range(len(calls)))})
    with pytest.warns(PlanMismatchWarning, match="changed in place after its forward"):
        assert lab.same(run(apply(copy.deepcopy(model), plan)), run(copy.deepcopy(model)))


class Flaky(nn.Module):
    """Runs another operator the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        self.calls += 1
        y = self.linear(x)
        return torch.sin(y) * y if self.calls % 2 else torch.cos(y) * y


def test_another_recomputation_than_forward_is_an_error(lab: Any) -> None:
    """A module that computes something else when recomputed stops with its name and the operator."""
    model = nn.Sequential(Flaky())
    x = torch.randn(2, 4)
    calls = lab.observed(model, ["0"], lambda m: m(x))["0"]
    plan = lab.plan_for(model, {"0": lab.decisions_from(calls, {1})})
    out = apply(model, plan)(x)
    with pytest.raises(RuntimeError, match=r"aten\.cos\.default runs in the recomputation of 0 where its forward ran"):
        out.sum().backward()


def test_a_second_backward_is_refused_as_pytorch_refuses_it(lab: Any, cases: Any) -> None:
    """What was kept is gone after the first backward."""
    case = cases["llama"]
    loss = applied(case, case.plan({3}))(case.tokens).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        loss.backward()


def test_state_dict_names_stay(cases: Any) -> None:
    """A checkpoint of the planned model loads into the bare one."""
    case = cases["llama"]
    model = applied(case, case.plan({1}))
    assert list(model.state_dict()) == list(case.model.state_dict())
    case.model.load_state_dict(model.state_dict())


def test_a_shared_module_is_wrapped_wherever_it_stands(lab: Any) -> None:
    """One block under two names: both are the wrapper."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.ModuleDict({"a": block, "b": block, "c": nn.Linear(4, 4)})
    calls = lab.observed(nn.Sequential(block), ["0"], lambda m: m(torch.randn(1, 4)))["0"]
    apply(model, lab.plan_for(model, {"a": lab.decisions_from(calls, {0})}))
    assert model["a"] is model["b"] is not block


def _replaced(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, units=tuple(dataclasses.replace(u, **changes) for u in plan.units))


def test_plans_for_other_models_are_refused_before_anything_is_changed(lab: Any, cases: Any) -> None:
    """Another depth, another width, a missing unit, wrong parameters of a unit: each names the first
    difference.
    """
    case = cases["llama"]
    plan = case.plan({1})
    deeper = lab.Stack(lambda: copy.deepcopy(case.model.layers[0]), 3, 16)
    with pytest.raises(PlanError, match=r"the model has a parameter layers\.2\.norm1\.weight, the plan's has not"):
        apply(deeper, plan)
    shallower = lab.Stack(lambda: copy.deepcopy(case.model.layers[0]), 1, 16)
    with pytest.raises(PlanError, match=r"the plan's has a parameter layers\.1\.norm1\.weight, the model has not"):
        apply(shallower, plan)
    wider = copy.deepcopy(case.model)
    wider.layers[1].w2 = nn.Linear(40, 16, bias=False)
    with pytest.raises(PlanError, match=r"layers\.1\.w2\.weight of the model is \[16, 40\], the plan's is \[16, 32\]"):
        apply(wider, plan)
    elsewhere = dataclasses.replace(plan, units=(dataclasses.replace(plan.units[0], fqn="blocks.0"),))
    with pytest.raises(PlanError, match=r"it checkpoints blocks\.0, which is not there"):
        apply(copy.deepcopy(case.model), elsewhere)
    model = copy.deepcopy(case.model)
    with pytest.raises(PlanError, match=r"weight of layers\.0 is"):
        apply(model, _replaced(plan, parameters=(("norm1.weight", (3,)),)))
    assert all(type(layer) is type(case.model.layers[0]) for layer in model.layers)


def test_wrapped_or_compiled_modules_are_refused(cases: Any) -> None:
    """A model that has checkpointing, or whose unit is compiled, says so."""
    case = cases["llama"]
    model = applied(case, case.plan({1}))
    with pytest.raises(PlanError, match="has activation checkpointing already"):
        apply(model, case.plan({1}))
    compiled = copy.deepcopy(case.model)
    compiled.layers[0] = torch.compile(compiled.layers[0])
    with pytest.raises(PlanError, match=r"layers\.0 is compiled already"):
        apply(compiled, case.plan({1}))


def test_one_plan_serves_the_parts_of_a_pipeline(lab: Any, cases: Any) -> None:
    """A part that has one of two planned layers takes its unit; a part with another shape is refused."""
    case = cases["llama"]
    plan = case.plan({1, 5})
    plan = dataclasses.replace(plan, made_for=dataclasses.replace(plan.made_for, pipeline_stages=2))
    part = nn.ModuleDict({"layers": nn.ModuleDict({"1": copy.deepcopy(case.model.layers[1])})})
    apply(part, plan)
    assert "context_fn" in part["layers"]["1"].checkpoint_fn.keywords
    other = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.Linear(2, 2)})})
    with pytest.raises(PlanError, match=r"a parameter layers\.1\.weight, the plan's has not"):
        apply(other, plan)


def test_a_plan_of_another_torch_is_applied_with_a_warning(cases: Any) -> None:
    """Operator sequences differ between torch versions, so it may fall back; it may not be wrong."""
    case = cases["llama"]
    plan = case.plan({1})
    plan = dataclasses.replace(plan, made_for=dataclasses.replace(plan.made_for, torch_version="1.0.0"))
    with pytest.warns(UserWarning, match=r"made with torch 1\.0\.0"):
        applied(case, plan)


def test_the_root_and_nested_units_are_refused(cases: Any) -> None:
    """A plan cannot hold the whole model as a unit, one unit inside another, or one twice."""
    case = cases["llama"]
    plan = case.plan({1})
    inner = dataclasses.replace(plan.units[0], fqn="layers.0.w1")
    for units, words in (
        ((dataclasses.replace(plan.units[0], fqn=""),), "the whole model as one unit"),
        ((*plan.units, inner), r"nests the unit layers\.0\.w1 in the unit layers\.0"),
        ((plan.units[0], plan.units[0]), r"names the unit layers\.0 twice"),
    ):
        with pytest.raises(PlanError, match=words):
            dataclasses.replace(plan, units=units)


def test_unit_is_a_value() -> None:
    """Two units made alike are equal, so that identical layers share their table in the file."""
    make = lambda: Unit(fqn="a", discard_fraction=0.0, kept_bytes=0, recompute_ms=0.0, decisions=())  # noqa: E731
    assert make() == make()


@pytest.mark.parametrize("share", [1, 2])
def test_sizes_that_the_plan_leaves_open_may_be_any(lab: Any, cases: Any, share: int) -> None:
    """With every size of 5 (the sequence) or 10 (all tokens) left open, a shorter batch follows the plan too."""
    case = cases["llama"]

    def opened(rows: list[Decision]) -> list[Decision]:
        def shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(ANY_SIZE if size in (5, 10) else size for size in sizes)

        return [
            dataclasses.replace(row, outputs=tuple((shape(sizes), dtype) for sizes, dtype in row.outputs))
            for row in rows
        ]

    model = applied(case, _mutate(case.plan(keep_groups(lab, case, share)), opened))
    short = case.tokens[:, :3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = lab.step(model, short)
        assert lab.same(lab.step(model, case.tokens), case.reference)
    assert lab.same(result, lab.step(copy.deepcopy(case.model), short))
