"""What runs again and what does not, in one backward and in several. Real tensors on the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosac.integrations.apply import apply
from benchmarks.fuzz.families.custom import scaled_sine


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients of one step."""
    torch.manual_seed(1)
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return (out.detach(), *(p.grad for p in model.parameters() if p.grad is not None))


def test_dead_operators_do_not_run_again(lab: Any, cases: Any) -> None:
    """A Llama block that keeps q, k and v, both rotations, attention and the first residual: both norms run again, and the
    feed-forward up to its last product's argument. The projections to q, k and v, out and down do not: nobody saved
    their results.
    """
    case = cases["llama"]
    calls = case.calls["layers.0"]
    rotations = [i for i, call in enumerate(calls) if call.outputs[0][1] == "complex64"]
    attention = next(i for i, call in enumerate(calls) if "attention" in call.op)
    qkv = next(i for i, call in enumerate(calls) if call.op == "aten.mm.default")
    residual = next(i for i, call in enumerate(calls) if call.op == "aten.add.Tensor")
    assert len(rotations) == 2
    model = apply(copy.deepcopy(case.model), case.plan({qkv, *rotations, attention, residual}))
    with warnings.catch_warnings(), lab.counting(model, case.calls) as ran:
        warnings.simplefilter("error")
        assert lab.same(lab.step(model, case.tokens), case.reference)
    norm = [
        "aten.pow.Tensor_Scalar",
        "aten.mean.dim",
        "aten.add_.Scalar",
        "aten.rsqrt.default",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
    ]
    up, gate, product = ["aten.mm.default", "aten.silu.default"], ["aten.mm.default"], ["aten.mul.Tensor"]
    assert ran.again == {fqn: [*norm, *norm, *up, *gate, *product] for fqn in case.calls}


def test_a_second_backward_equals_that_of_the_plain_model(lab: Any, case: Any) -> None:
    """With retain_graph=True twice, and then once without: gradients add up bitwise as without a plan, and a fourth
    backward is refused as PyTorch refuses it.
    """

    def run(model: nn.Module) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        loss = model(case.tokens).square().mean()
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return tuple(p.grad for p in model.parameters())

    groups = lab.groups_of(case.calls["layers.0"])
    for keep in (set(), {i for group in groups[::2] for i in group}, set(range(1000))):
        assert lab.same(run(apply(copy.deepcopy(case.model), case.plan(keep))), run(copy.deepcopy(case.model)))


def test_a_second_backward_recomputes_everything(lab: Any) -> None:
    """What is kept serves the first backward; the second one makes it again, from the input."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    plan, again = lab.plan_keeping(model, lambda m: m(x), {"0": {"aten.sigmoid.default"}})
    apply(model, plan)
    with lab.counting(model, ["0"]) as ran:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        assert ran.again == again == {"0": []}
        loss.backward()
    assert ran.again == {"0": ["aten.addmm.default", "aten.sigmoid.default"]}


class _Foreign(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return scaled_sine(x * 2, 1.5).sigmoid() * 3


def test_a_second_backward_asks_for_nothing_that_cannot_run_again(lab: Any) -> None:
    """A sigmoid that is kept, so that the custom operator's result before it need not be: it is there for both backwards."""

    def run(model: nn.Module) -> torch.Tensor:
        x = torch.linspace(-1, 1, 8).requires_grad_()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        return x.grad

    model = nn.Sequential(_Foreign())
    plan, _ = lab.plan_keeping(copy.deepcopy(model), run, {"0": {"aten.sigmoid.default"}})
    assert torch.equal(run(apply(copy.deepcopy(model), plan)), run(model))


class _ReadOften(torch.autograd.Function):
    """A product and its sine, with a backward that asks for its saved tensors one by one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The output."""
        product = x @ weight
        ctx.save_for_backward(x, weight, product)
        return product.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients."""
        inner = gradients[0] * ctx.saved_tensors[2].cos()
        return inner @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ inner


def test_a_function_that_reads_its_saved_tensors_several_times(lab: Any) -> None:
    """Each backward recomputes them once: the sine before the product, and the product. Gradients add up bitwise."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = _ReadOften.apply(x.sin(), self.weight)
            return result

    model = nn.Sequential(Product())
    planned = apply(copy.deepcopy(model), lab.plan_for(model, {"0": ()}))
    with lab.counting(planned, ["0"]) as ran:
        for each in (model, planned):
            loss = each(torch.ones(2, 4)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert ran.again == {"0": ["aten.sin.default", "aten.mm.default"] * 2}
    assert torch.equal(*(each.get_parameter("0.weight").grad for each in (model, planned)))


@pytest.mark.parametrize("keep", [set(), {"aten.addmm.default"}, {"aten.tanh.default", "aten.mul.Tensor"}])
def test_double_backward_equals_that_of_the_plain_model(lab: Any, keep: set[str]) -> None:
    """The gradient of a gradient penalty (create_graph=True) through a unit."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.up(x))
            return self.down(h * h.sin())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Body(), nn.Linear(4, 1))
    x = torch.randn(3, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(inputs).sum(), inputs, create_graph=True)
        (m(inputs).mean() + slope.square().sum()).backward()
        return (slope.detach(), inputs.grad, *(p.grad for p in m.parameters()))

    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"1": keep})
    assert lab.same(run(apply(copy.deepcopy(model), plan)), run(copy.deepcopy(model)))


def _changes_result(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return y.add_(1)


def _changes_argument(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.sin()
    y.add_(1)
    return z + y


def _changes_input(x: torch.Tensor) -> torch.Tensor:
    z = x.sin()
    x.mul_(2)
    return z


@pytest.mark.parametrize("keep", [set(), set(range(100))])
@pytest.mark.parametrize("body", [_changes_result, _changes_argument, _changes_input])
def test_saved_tensors_that_a_unit_changes_in_place_are_an_error_as_without_a_plan(
    lab: Any, body: Callable[[torch.Tensor], torch.Tensor], keep: set[int]
) -> None:
    """A result, an argument and an input that autograd saved: the same RuntimeError, with and without a plan."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(x * self.weight if body is not _changes_input else x)

    model = nn.Sequential(nn.Linear(4, 4), Body())
    x = torch.randn(2, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"1": keep})
    planned = apply(copy.deepcopy(model), plan)
    for m in (model, planned):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            m(x).sum().backward()


@pytest.mark.parametrize("keep", [set(), set(range(100))])
def test_a_returned_tensor_that_is_changed_in_place_is_an_error_as_without_a_plan(lab: Any, keep: set[int]) -> None:
    """A unit's output that its tanh saved is changed by its caller."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).mul_(2)

    model = Outer()
    x = torch.randn(2, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"inner": keep})
    planned = apply(copy.deepcopy(model), plan)
    for m in (model, planned):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            m(x).sum().backward()


def test_custom_operators_are_kept_and_run_once(lab: Any) -> None:
    """Nothing is known of an operator of another library: although no plan keeps it, it does not run a second time."""
    runs: list[int] = []

    @torch.library.custom_op("autosac_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(self.linear(x)).sin().exp().sum(-1)

    torch.manual_seed(0)
    model = nn.Sequential(Body())
    x = torch.randn(2, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": set()})
    wanted = gradients(copy.deepcopy(model), x)
    runs.clear()
    planned = apply(copy.deepcopy(model), plan)
    with warnings.catch_warnings(), lab.counting(planned, ["0"]) as ran:
        warnings.simplefilter("error")
        assert lab.same(gradients(planned, x), wanted)
    assert runs == [1]
    assert ran.again == {"0": ["aten.sin.default", "aten.exp.default"]}


@pytest.mark.parametrize("keep", [set(), {"aten.sin.default"}])
def test_a_generator_of_its_own(lab: Any, keep: set[str]) -> None:
    """A module that draws from its own torch.Generator: the recomputed numbers are those of the forward, and the
    generator has moved on once for each forward.
    """

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.rand(x.shape, generator=self.generator).bernoulli_(0.5, generator=self.generator)
            return (self.linear(x) * mask).sin() * torch.randn(4, generator=self.generator)

    torch.manual_seed(0)
    model = nn.Sequential(Noisy())
    x = torch.randn(2, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": keep})
    planned, plain = copy.deepcopy(model), copy.deepcopy(model)
    for m in (planned, plain):
        m[0].generator = torch.Generator().manual_seed(7)
    apply(planned, plan)
    for _ in range(2):
        assert lab.same(gradients(planned, x), gradients(plain, x))
        assert torch.equal(planned[0].generator.get_state(), plain[0].generator.get_state())


def test_kernels_that_ask_whether_gradients_are_enabled(lab: Any) -> None:
    """The LSTM of oneDNN returns its workspace for the backward if they are; parts of it are bytes that nobody has written."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.LSTM(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale, _ = self.cells(x)
            return x + self.out(self.cells(x)[0].sin() * scale)

    torch.manual_seed(0)
    model = nn.Sequential(Recurrent())
    x = torch.randn(5, 3, 8)
    plan, again = lab.plan_keeping(model, lambda m: m(x), {"0": set()})
    assert again["0"].count("aten.mkldnn_rnn_layer.default") == 2
    planned, plain = apply(copy.deepcopy(model), plan), copy.deepcopy(model)
    assert lab.same(gradients(planned, x), gradients(plain, x))
