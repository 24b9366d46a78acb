"""Plans that do not fit: what is recomputed while running, refusals before. Real tensors on the CPU."""

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
from autosac.integrations.apply import Checkpointed, PlanMismatchWarning, apply
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


def _one_call_less(rows: list[Decision]) -> list[Decision]:
    """The plan does not know the last call of an operator."""
    lost = max(i for i, row in enumerate(rows) if row.op == rows[len(rows) // 3].op)
    return rows[:lost] + rows[lost + 1 :]


@pytest.mark.parametrize(
    ("change", "words", "lost"),
    [
        (_other_shape, "the plan has float32[7, 7]", "nothing"),
        (_one_call_less, "runs more calls of", "last call"),
        (
            lambda rows: [*rows, Decision(op="aten.foo.default", occurrence=0, keep=True, outputs=())],
            "operators; the",
            "nothing",
        ),
    ],
)
def test_a_difference_found_while_running_recomputes_what_the_plan_does_not_know_with_one_warning(
    lab: Any, case: Any, change: Any, words: str, lost: str
) -> None:
    """A wrong fingerprint, a missing or a surplus operator: one warning a unit over three steps, gradients right,
    and what the plan knows is kept.
    """
    calls = case.calls["layers.0"]
    everything = range(len(calls))
    unknown = {
        "last call": max(i for i, call in enumerate(calls) if call.op == calls[len(calls) // 3].op),
        "nothing": -1,
    }[lost]
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
        assert ran.forward[fqn] == [call.op for call in calls]
        assert ran.again[fqn] == [calls[i].op for i in lab.must_run(calls, set(everything) - {unknown})]


@pytest.mark.parametrize("rows", [3, 8])
def test_another_batch_follows_the_plan_with_one_warning(lab: Any, case: Any, rows: int) -> None:
    """Of a smaller batch the same operators are kept as of the planned one: all ranks recompute the same ones, whatever the
    sizes of their batches.
    """
    keep = keep_groups(lab, case, 2)
    model = applied(case, case.plan(keep))
    short = case.tokens[:, :rows]
    with warnings.catch_warnings(record=True) as caught, lab.counting(model, case.calls) as ran:
        warnings.simplefilter("always")
        result = lab.step(model, short)
    assert lab.same(result, lab.step(copy.deepcopy(case.model), short))
    warned = [w for w in caught if w.category is PlanMismatchWarning]
    assert len(warned) == (0 if short.shape == case.tokens.shape else len(case.calls))
    for fqn, calls in case.calls.items():
        assert ran.again[fqn] == [calls[i].op for i in lab.must_run(calls, keep)]


def test_random_operators_torn_apart(lab: Any, cases: Any) -> None:
    """Keeping one dropout's mask only does not shift the random numbers of the others: no warning, right gradients."""
    case = cases["gpt"]
    calls = case.calls["layers.0"]
    groups = [g for g in lab.groups_of(calls) if calls[g[0]].op.startswith("aten.empty")]
    assert len(groups) == 3, "each dropout of a block is a group"
    for group in groups:
        follows_the_plan(lab, case, set(group))


@pytest.mark.parametrize("kept", ["everything", "nothing", "softmax"])
def test_dropout_is_recomputed_without_rng_state(lab: Any, cases: Any, kept: str) -> None:
    """With preserve_rng_state = false a recomputed mask is the same one all the same: its operator's generator is noted."""
    case = cases["gpt"]
    calls = case.calls["layers.0"]
    softmax = {i for i, c in enumerate(calls) if c.op == "aten._softmax.default"}
    keep = {"everything": set(range(len(calls))), "nothing": set(), "softmax": softmax}[kept]
    follows_the_plan(lab, case, keep, preserve_rng_state=False)


def follows_the_plan(lab: Any, case: Any, keep: set[int], **settings: bool) -> None:
    """Bitwise right, no warning, and exactly what is not kept and leads to saved tensors runs again."""
    model = applied(case, case.plan(keep, **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lab.counting(model, case.calls) as ran:
            assert lab.same(lab.step(model, case.tokens), case.reference)
    for fqn, calls in case.calls.items():
        assert ran.again[fqn] == [calls[i].op for i in lab.must_run(calls, keep)]


def test_a_tensor_and_its_mutator_torn_apart(lab: Any, cases: Any) -> None:
    """Only the last writer's decision counts for `h = up(x); h.relu_()`: with `relu_` kept neither runs again, with
    only the product kept both do.
    """
    case = cases["inplace"]
    calls = case.calls["layers.0"]
    relu = next(i for i, c in enumerate(calls) if c.op == "aten.relu_.default")
    maker = next(i for i, c in enumerate(calls) if c.made & calls[relu].writes)
    assert {maker, relu} <= set(lab.must_run(calls, {maker}))
    assert not {maker, relu} & set(lab.must_run(calls, {relu}))
    for keep in ({maker}, {relu}):
        follows_the_plan(lab, case, keep)


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


@pytest.mark.parametrize(("reader", "again"), [("recomputed", ["aten.full.default", "aten.mul.Tensor"]), ("kept", [])])
def test_reading_a_kept_tensor_before_its_change(lab: Any, reader: str, again: list[str]) -> None:
    """The creator and the mutator kept, the reader in between recomputed: what it read is made again, as the kept
    value is another one by now (PyTorch alone would give wrong gradients). If the reader is kept, only the product
    and its sine's argument run again.
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
    assert ops == [
        "aten.full.default",
        "aten.mul.Tensor",
        "aten.mul_.Tensor",
        "aten.addmm.default",
        "aten.mul.Tensor",
        "aten.sin.default",
        "aten.mul.Tensor",
    ]
    keep = {0, 2} | ({1} if reader == "kept" else set())
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"0": lab.decisions_from(calls, keep)}))
    with warnings.catch_warnings(), lab.counting(planned, ["0"]) as ran:
        warnings.simplefilter("error")
        assert lab.same(run(planned), run(copy.deepcopy(model)))
    assert ran.again["0"] == [*again, "aten.addmm.default", "aten.mul.Tensor"]


class Outer(nn.Module):
    """Changes in place, or not, the first of the two results of its module."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.inner, self.changes = Two(), changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        first, second = self.inner(x)
        if self.changes:
            first.add_(1.0)
        return first + second


class Two(nn.Module):
    """Returns a product, which autograd does not save, and something that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both."""
        y = self.linear(x)
        return y, torch.sin(y * 2)


@pytest.mark.parametrize("changes", [False, True])
def test_a_kept_output_changed_after_the_module(lab: Any, changes: bool) -> None:
    """The sine's argument is recomputed from the kept output, or, if that is another one by now, from the input."""
    torch.manual_seed(0)
    model = Outer(changes)
    x = torch.randn(2, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        out = m(x)
        out.sum().backward()
        return (out.detach(), *(p.grad for p in m.parameters()))

    plan, again = lab.plan_keeping(model, lambda m: m(x), {"inner": {"aten.addmm.default"}})
    assert again["inner"] == ["aten.mul.Tensor"]
    planned = apply(copy.deepcopy(model), plan)
    with warnings.catch_warnings(), lab.counting(planned, ["inner"]) as ran:
        warnings.simplefilter("error")
        assert lab.same(run(planned), run(copy.deepcopy(model)))
    assert ran.again["inner"] == ["aten.addmm.default"] * changes + ["aten.mul.Tensor"]


class Flaky(nn.Module):
    """Would run another operator the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        self.calls += 1
        y = self.linear(x)
        return torch.sin(y) * y if self.calls % 2 else torch.cos(y) * y


def test_a_module_that_counts_its_calls(lab: Any) -> None:
    """Its code does not run a second time: the sine of the forward is recomputed, and the next forward is the second
    call. That one runs a cosine, which its plan does not know.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Flaky())
    x = torch.randn(2, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        m.zero_grad()
        m(x).sum().backward()
        return tuple(p.grad for p in m.parameters())

    plan, again = lab.plan_keeping(model, lambda m: m(x), {"0": {"aten.addmm.default"}})
    plain, planned = copy.deepcopy(model), apply(model, plan)
    with warnings.catch_warnings(), lab.counting(planned, ["0"]) as ran:
        warnings.simplefilter("error")
        assert lab.same(run(planned), run(plain))
    assert ran.again == again == {"0": ["aten.sin.default"]}
    with pytest.warns(PlanMismatchWarning, match=r"runs more calls of aten\.cos\.default"):
        assert lab.same(run(planned), run(plain))
    assert planned[0].calls == plain[0].calls == 2


def test_state_dict_names_stay(cases: Any) -> None:
    """A checkpoint of the planned model loads into the bare one."""
    case = cases["llama"]
    model = applied(case, case.plan({1}))
    assert list(model.state_dict()) == list(case.model.state_dict())
    case.model.load_state_dict(model.state_dict())


def test_a_shared_module_is_a_unit_wherever_it_stands(lab: Any) -> None:
    """One block under two names: both are the same module as before, which is checkpointed now."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.ModuleDict({"a": block, "b": block, "c": nn.Linear(4, 4)})
    calls = lab.observed(nn.Sequential(block), ["0"], lambda m: m(torch.randn(1, 4)))["0"]
    apply(model, lab.plan_for(model, {"a": lab.decisions_from(calls, {0})}))
    assert model["a"] is model["b"] is block and isinstance(block, Checkpointed)


def _replaced(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, units=tuple(dataclasses.replace(u, **changes) for u in plan.units))


def test_plans_for_other_models_are_refused_before_anything_is_changed(lab: Any, cases: Any) -> None:
    """Another depth, another width, a missing unit, wrong parameters of a unit: each names the first
    difference.
    """
    case = cases["llama"]
    plan = case.plan({1})
    deeper = lab.Stack(lambda: copy.deepcopy(case.model.layers[0]), 3, 16)
    with pytest.raises(
        PlanError, match=r"the model has a parameter layers\.2\.norm1\.weight, the plan's model does not"
    ):
        apply(deeper, plan)
    shallower = lab.Stack(lambda: copy.deepcopy(case.model.layers[0]), 1, 16)
    with pytest.raises(
        PlanError, match=r"the plan's model has a parameter layers\.1\.norm1\.weight, the model does not"
    ):
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
    assert [name for name, module in part.named_modules() if isinstance(module, Checkpointed)] == ["layers.1"]
    other = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.Linear(2, 2)})})
    with pytest.raises(PlanError, match=r"a parameter layers\.1\.weight, the plan's model does not"):
        apply(other, plan)


def test_a_plan_of_another_torch_is_applied_with_a_warning(cases: Any) -> None:
    """Operator sequences differ between torch versions, so it may recompute more; it may not be wrong."""
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
