"""Applied plans: gradients, what runs again, memory, fallbacks, refusals. Real tensors on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosac.errors import PlanError
from autosac.integrations.eager import PlanMismatchWarning, apply
from autosac.plan import Decision, Plan, Unit

FAST = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def applied(case: Any, plan: Plan) -> nn.Module:
    """A copy of the case's model under the plan."""
    return apply(copy.deepcopy(case.model), plan)


def keep_groups(lab: Any, case: Any, choose: Any) -> set[int]:
    """Positions of the groups for which `choose(number)` holds; both layers run the same operators."""
    groups = lab.groups_of(case.calls["layers.0"])
    return {i for number, group in enumerate(groups) if choose(number) for i in group}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("share", [0, 2, 3, 1])
def test_gradients_and_recomputed_operators_are_those_of_the_plan(
    lab: Any, case: Any, share: int, early_stop: bool
) -> None:
    """Keeping no group, every 2nd, every 3rd and all: loss and gradients bitwise equal, and exactly the rest
    runs again.
    """
    keep = keep_groups(lab, case, lambda number: share and number % share == 0)
    model = applied(case, case.plan(keep, early_stop=early_stop))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lab.counting(model, case.calls) as ran:
            assert lab.same(lab.step(model, case.tokens), case.reference)
    for fqn, calls in case.calls.items():
        forward, again = ran[fqn][: len(calls)], ran[fqn][len(calls) :]
        planned = [call.op for i, call in enumerate(calls) if i not in keep]
        assert forward == [call.op for call in calls]
        assert again == (planned[: len(again)] if early_stop else planned)


@FAST
@given(data=st.data())
def test_any_group_wise_plan_gives_the_same_gradients_without_a_warning(
    lab: Any, cases: dict[str, Any], data: st.DataObject
) -> None:
    """Whatever groups are kept in each layer, the result is bitwise that of no checkpointing."""
    case = cases[data.draw(st.sampled_from(sorted(cases)))]
    rows = {}
    for fqn, calls in case.calls.items():
        groups = lab.groups_of(calls)
        kept = data.draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups)))
        positions = {i for group, keep in zip(groups, kept, strict=True) if keep for i in group}
        rows[fqn] = lab.decisions_from(calls, positions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = apply(copy.deepcopy(case.model), lab.plan_for(case.model, rows))
        assert lab.same(lab.step(model, case.tokens), case.reference)


@FAST
@given(data=st.data())
def test_no_plan_however_wrong_changes_a_gradient(lab: Any, cases: dict[str, Any], data: st.DataObject) -> None:
    """Decisions that tear groups apart fall back where they must; the result stays bitwise the same."""
    case = cases[data.draw(st.sampled_from(sorted(cases)))]
    size = len(case.calls["layers.0"])
    keep = {i for i, kept in enumerate(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))) if kept}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanMismatchWarning)
        assert lab.same(lab.step(applied(case, case.plan(keep)), case.tokens), case.reference)


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


class _Watch(TorchDispatchMode):
    """Weak references to the memory that operators make (not to what they get), in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self.made.append(StorageWeakRef(leaf.untyped_storage()))
        return out

    def alive(self, first: int = 0, last: int | None = None) -> int:
        """How many of them live."""
        return sum(not reference.expired() for reference in self.made[first:last])


@pytest.mark.parametrize("early_stop", [True, False])
def test_what_is_kept_lives_until_its_modules_backward(cases: Any, early_stop: bool) -> None:
    """Everything kept: alive after the forward; a layer's gone when its backward is done, without garbage
    collection.
    """
    case = cases["llama"]
    model = applied(case, case.plan(range(1000), early_stop=early_stop))
    watch = _Watch()
    bounds: dict[int, list[int]] = {0: [], 1: []}
    alive_between: list[int] = []

    def between_layers(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: alive_between.extend([watch.alive(*bounds[i][:2]) for i in (1, 0)]))

    for i, layer in enumerate(model.layers):
        inner = layer._checkpoint_wrapped_module
        inner.register_forward_pre_hook(lambda *_, i=i: bounds[i].append(len(watch.made)))
        inner.register_forward_hook(lambda *_, i=i: bounds[i].append(len(watch.made)))
    model.layers[0].register_forward_hook(between_layers)
    with watch:
        loss = model(case.tokens).sum()
        forward = [watch.alive(*bounds[i]) for i in (0, 1)]
        loss.backward()
    makers = [sum(len(c.made - c.reads) for c in calls) for calls in case.calls.values()]
    assert forward == [bounds[i][1] - bounds[i][0] for i in (0, 1)] == makers
    assert alive_between[0] <= 1, "of layer 1 at most its output is left, which the loss's backward still holds"
    assert alive_between[1] == makers[0]
    assert watch.alive(*bounds[0][:2]) == 0


def test_nothing_is_kept_without_gradients(cases: Any) -> None:
    """Under no_grad the modules run as they are, and hold nothing."""
    case = cases["llama"]
    model = applied(case, case.plan(range(1000)))
    with torch.no_grad(), _Watch() as watch:
        out = model(case.tokens)
    assert len(watch.made) > 20
    assert watch.alive() == 1
    assert torch.equal(out, case.model(case.tokens))


def test_a_unit_that_keeps_nothing_is_checkpointed_plainly(cases: Any) -> None:
    """No dispatch mode, so no host time for each operator."""
    case = cases["llama"]
    model = applied(case, case.plan(set()))
    assert "context_fn" not in model.layers[0].checkpoint_fn.keywords


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


@pytest.mark.parametrize("share", [2, 1])
def test_a_planned_module_may_be_compiled(lab: Any, cases: Any, share: int) -> None:
    """Compiled after `apply`, a block obeys the same decisions: bitwise what it computes compiled without a
    plan.
    """
    case = cases["llama"]

    def compiled(model: nn.Module) -> nn.Module:
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
        return model

    keep = keep_groups(lab, case, lambda number: number % share == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanMismatchWarning)
        result = lab.step(compiled(applied(case, case.plan(keep))), case.tokens)
    assert lab.same(result, lab.step(compiled(copy.deepcopy(case.model)), case.tokens))


class Odd(nn.Module):
    """Results that are no tensors: a number read to the host, none at all, a list changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        size = int((x > -9).sum().item()) // x.shape[0]
        with torch.no_grad():
            scales = [torch.zeros(size), torch.ones(size)]
            torch._foreach_add_(scales, 0.5)
        return torch.relu(self.linear(x)[:, :size] * scales[0]) * scales[1]


@pytest.mark.parametrize("share", [1, 2, 3])
def test_results_that_are_no_single_tensor(lab: Any, share: int) -> None:
    """A kept `.item()` is not read again; an in-place list operator that returns nothing is kept with its lists."""
    torch.manual_seed(0)
    model = nn.Sequential(Odd())
    x = torch.randn(3, 6)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        m(x).square().sum().backward()
        return tuple(p.grad for p in m.parameters())

    calls = lab.observed(model, ["0"], lambda m: m(x))["0"]
    ops = [c.op for c in calls]
    assert {"aten._local_scalar_dense.default", "aten._foreach_add_.Scalar"} < set(ops)
    groups = lab.groups_of(calls)
    keep = {i for number, group in enumerate(groups) if number % share == 0 for i in group}
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"0": lab.decisions_from(calls, keep)}, early_stop=False))
    with warnings.catch_warnings(), lab.counting(planned, ["0"]) as ran:
        warnings.simplefilter("error")
        assert lab.same(run(planned), run(copy.deepcopy(model)))
    assert ran["0"][len(calls) :] == [op for i, op in enumerate(ops) if i not in keep]


@pytest.mark.parametrize("passes", [1, 2])
def test_autocast_and_modules_run_twice(lab: Any, cases: Any, passes: int) -> None:
    """Under autocast a second pass finds the weights' casts in a cache: it falls back, and gradients stay bitwise."""
    case = cases["llama"]

    def run(model: nn.Module) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            x = model.embedding(case.tokens)
            for layer in [*model.layers] * passes:
                x = layer(x)
            loss = model.head(x).float().square().mean()
        loss.backward()
        return (loss.detach(), *(p.grad for p in model.parameters()))

    def forward(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(case.tokens)

    calls = lab.observed(case.model, list(case.calls), forward)
    groups = lab.groups_of(calls["layers.0"])
    keep = {i for group in groups[::2] for i in group}
    plan = lab.plan_for(case.model, {fqn: lab.decisions_from(rows, keep) for fqn, rows in calls.items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(apply(copy.deepcopy(case.model), plan))
    assert lab.same(result, run(copy.deepcopy(case.model)))
    assert len([w for w in caught if w.category is PlanMismatchWarning]) == (passes - 1) * len(case.calls)
