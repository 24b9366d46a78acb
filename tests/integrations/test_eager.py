"""Applied plans: gradients, what runs again, what is held. Real tensors on the CPU."""

from __future__ import annotations

import copy
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

from autosac.integrations.apply import PlanMismatchWarning, apply
from autosac.plans import Plan

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
    """Keeping no group, every 2nd, every 3rd and all: loss and gradients bitwise equal, and of the rest exactly what
    leads to saved tensors runs again.
    """
    keep = keep_groups(lab, case, lambda number: share and number % share == 0)
    model = applied(case, case.plan(keep, early_stop=early_stop))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lab.counting(model, case.calls) as ran:
            assert lab.same(lab.step(model, case.tokens), case.reference)
    for fqn, calls in case.calls.items():
        assert ran.forward[fqn] == [call.op for call in calls]
        assert ran.again[fqn] == [calls[i].op for i in lab.must_run(calls, keep)]
        assert bool(ran.again[fqn]) == (share != 1)


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
    """Decisions that tear groups apart recompute exactly what is not there; the result stays bitwise the same,
    without a warning.
    """
    case = cases[data.draw(st.sampled_from(sorted(cases)))]
    size = len(case.calls["layers.0"])
    keep = {i for i, kept in enumerate(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))) if kept}
    model = applied(case, case.plan(keep))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lab.counting(model, case.calls) as ran:
            assert lab.same(lab.step(model, case.tokens), case.reference)
    for fqn, calls in case.calls.items():
        assert ran.again[fqn] == [calls[i].op for i in lab.must_run(calls, keep)]


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


@pytest.mark.parametrize("keeps", [True, False])
def test_what_backward_asks_for_lives_until_its_modules_backward(cases: Any, keeps: bool) -> None:
    """Everything kept: of what a layer made, what autograd saved is alive after the forward, and its output. Nothing
    kept: its output only. A layer's memory is gone when its backward is done, without garbage collection.
    """
    case = cases["llama"]
    model = applied(case, case.plan(range(1000) if keeps else set()))
    watch = _Watch()
    bounds: dict[int, list[int]] = {0: [], 1: []}
    alive_between: list[int] = []

    def between_layers(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: alive_between.extend([watch.alive(*bounds[i][:2]) for i in (1, 0)]))

    for i, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: bounds[i].append(len(watch.made)))
        layer.register_forward_hook(lambda *_, i=i: bounds[i].append(len(watch.made)))
    model.layers[0].register_forward_hook(between_layers)
    with watch:
        loss = model(case.tokens).sum()
        forward = [watch.alive(*bounds[i]) for i in (0, 1)]
        loss.backward()
    asked = []
    for calls in case.calls.values():
        made = set().union(*(call.made - call.reads for call in calls))
        asked.append(len((({storage for storage, _ in calls.saved} if keeps else set()) & made) | calls.returned))
    assert forward == asked
    assert asked == ([17, 17] if keeps else [1, 1])
    assert alive_between[0] <= 1, "of layer 1 at most its output is left, which the loss's backward still holds"
    assert alive_between[1] == asked[0] - 1, "the output of layer 0 was only held by layer 1"
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
    """A number that was read to the host is not read again, kept or not; an in-place list operator that returns
    nothing runs again on all of its lists, if it is not kept with them.
    """
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
    assert ran.again["0"] == [ops[i] for i in lab.must_run(calls, keep)]
    assert "aten._local_scalar_dense.default" not in ran.again["0"]


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
