"""Changes that make a recomputation another one: each is an error that names the module. Real tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_upper_left

from autosac.integrations.apply import RecomputationError, apply


def under(lab: Any, module: nn.Module, x: torch.Tensor, keep: Any = ()) -> nn.Module:
    """The module as a unit called `body`."""
    model = nn.Sequential()
    model.add_module("body", module)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"body": keep})
    return apply(model, plan)


class Sine(nn.Module):
    """Saves a sum with its input, which autograd itself does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return torch.sin(x + self.shift)


def _tracked(x: torch.Tensor) -> None:
    x.add_(1)


def _data(x: torch.Tensor) -> None:
    x.data.add_(1)


def _numpy(x: torch.Tensor) -> None:
    x.numpy()[:] += 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _tracked,
            r"body cannot be recomputed: a tensor that it reads \(torch.float32 \[2, 4\]\) was changed in place",
        ),
        (_data, "the module body does not give the same values when it is recomputed"),
        (_numpy, "the module body does not give the same values when it is recomputed"),
    ],
)
def test_an_input_that_is_changed_before_the_backward(
    lab: Any, change: Callable[[torch.Tensor], None], words: str
) -> None:
    """In sight of autograd, through `.data` and through numpy: no gradient is made."""
    x = torch.randn(2, 4)
    model = under(lab, Sine(), x)
    out = model(x)
    change(x)
    with pytest.raises(RecomputationError, match=words):
        out.sum().backward()
    assert model.body.shift.grad is None


class Watched(nn.Module):
    """Its sigmoid saves its result, which the module leaves in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        self.seen[:] = [torch.sigmoid(x + self.shift)]
        return self.seen[0] * 2


@pytest.mark.parametrize("change", [_data, lambda y: _numpy(y.detach())])
@pytest.mark.parametrize("keep", [(), {"aten.sigmoid.default"}])
def test_a_result_that_others_hold_and_change_is_the_changed_one(lab: Any, change: Any, keep: Any) -> None:
    """What an attribute holds is given to the backward as it is then, without a plan and with one: s (1 - s) of s + 1."""
    x = torch.randn(2, 4)
    model = under(lab, Watched(), x, keep)
    model(x).sum().backward()
    model.zero_grad()
    out = model(x)
    s = model.body.seen[0].detach() + 1
    change(model.body.seen[0])
    out.sum().backward()
    assert torch.equal(model.body.shift.grad, (2 * (1 - s) * s).sum(0))


def test_a_result_that_others_hold_and_change_in_sight_is_made_again(lab: Any) -> None:
    """Without a plan autograd stops; the recomputation gives the result as it was saved."""
    x = torch.randn(2, 4)
    model = under(lab, Watched(), x)
    out = model(x)
    s = model.body.seen[0].detach().clone()
    with torch.no_grad():
        model.body.seen[0].add_(1)
    out.sum().backward()
    assert torch.equal(model.body.shift.grad, (2 * (1 - s) * s).sum(0))


@pytest.mark.parametrize("change", [_tracked, _data, _numpy])
def test_an_input_that_is_not_needed_may_be_changed(lab: Any, change: Callable[[torch.Tensor], None]) -> None:
    """With the sum kept, nobody reads the input again."""
    x = torch.zeros(2, 4)
    model = under(lab, Sine(), x, {"aten.add.Tensor"})
    out = model(x)
    change(x)
    out.sum().backward()
    assert torch.equal(model.body.shift.grad, 2 * torch.ones(4).cos())


@pytest.mark.parametrize("change", [_data, _numpy])
def test_a_parameter_that_is_changed_before_the_backward(lab: Any, change: Callable[[torch.Tensor], None]) -> None:
    """As an optimizer that steps too early, out of sight of autograd."""
    x = torch.randn(2, 4)
    model = under(lab, Sine(), x)
    out = model(x)
    change(model.body.shift.detach())
    with pytest.raises(RecomputationError, match="the module body does not give the same values"):
        out.sum().backward()


class _Numpy(torch.autograd.Function):
    """Writes with numpy to new memory: PyTorch sees the memory only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.numpy()[:] = x.detach().numpy() * 2
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Hidden(nn.Module):
    """Uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return torch.sin(_Numpy.apply(x + self.shift))


@pytest.mark.parametrize("keep", [(), {"aten.empty_like.default"}])
def test_memory_that_is_written_out_of_sight(lab: Any, keep: Any) -> None:
    """It was only allocated as far as operators say, so that its content is held, whatever the plan says."""
    x = torch.zeros(2, 4)
    model = under(lab, Hidden(), x, keep)
    model(x).sum().backward()
    assert torch.equal(model.body.shift.grad, 2 * (torch.full((4,), 2.0).cos() * 2))


class Scaled(Hidden):
    """Changes that memory in place before anything else reads it, as `torch.quasirandom` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        out = torch.empty_like(x)
        out.numpy()[:] = 2
        return torch.sin(out.mul_(3) * self.shift)


@pytest.mark.parametrize("keep", [(), {"aten.empty_like.default"}])
def test_memory_that_is_written_out_of_sight_and_then_in_sight(lab: Any, keep: Any) -> None:
    """The change reads what was written: sin 6 s has the derivative 6 cos 6 s."""
    x = torch.zeros(2, 4)
    model = under(lab, Scaled(), x, keep)
    model(x).sum().backward()
    assert torch.equal(model.body.shift.grad, torch.full((4,), 6.0).cos() * 12)


class Saving(Hidden):
    """Changes with numpy what it has saved: autograd sees the change, a recomputation would not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = x * self.shift
        early = torch.sin(h)
        h.detach().numpy()[:] = 0
        return early + (torch.cos(h) if x.shape[0] > 1 else h)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_saved_result_that_is_changed_out_of_sight(lab: Any, rows: int) -> None:
    """Nobody holds it when the backward begins, and yet the change is noticed where it is read, or saved, again. The plan that
    keeps it gives what autograd gives: 1 + cos 0, or cos 0 for each of two rows.
    """
    x = torch.ones(rows, 4)
    model = under(lab, Saving(), x)
    with pytest.raises(
        RecomputationError, match=r"the module body reads a tensor .* before and after it is changed out of"
    ):
        model(x)
    kept = under(lab, Saving(), x, {"aten.mul.Tensor"})
    kept(x).sum().backward()
    assert torch.equal(kept.body.shift.grad, torch.full((4,), 2.0))


def test_a_changed_custom_result_cannot_be_made_again(lab: Any) -> None:
    """A custom operator's result that is changed in place after it was read: its first content is nowhere."""

    @torch.library.custom_op("autosac_test::copy", mutates_args=())
    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = copy(x.detach())
            early = mask * 2
            mask.mul_(3)
            return (x * self.weight * early).sin() * mask

    x = torch.randn(2, 4)
    model = under(lab, Body(), x)
    with pytest.raises(
        RecomputationError, match=r"the operator autosac_test\.copy\.default returned, which cannot run"
    ):
        model(x).sum().backward()


class Biased(Hidden):
    """Attention with a mask that is a subclass of Tensor, made from two sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        q, bias = torch.sin(x * self.shift)[None], causal_upper_left(len(x), len(x))
        assert type(bias) is CausalBias
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)[0]


def test_tensors_of_subclasses_that_are_made_from_sizes(lab: Any) -> None:
    """PyTorch makes none under a dispatch mode. Under a plan they are made, and the gradient is the one without a plan."""
    x = torch.randn(2, 4)
    plain = Biased()
    plain(x).sum().backward()
    model = nn.Sequential()
    model.add_module("body", Biased())
    model = apply(model, lab.plan_for(model, {"body": ()}))
    model(x).sum().backward()
    assert torch.equal(model.body.shift.grad, plain.shift.grad)


class Discarding(Hidden):
    """Frees the memory of a result that it has saved, and fills it when its gradient is needed, as Megatron-Core does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = x * self.shift
        y = torch.sin(h)
        z = y * y
        y.untyped_storage().resize_(0)

        def refill(_: torch.Tensor) -> None:
            y.untyped_storage().resize_(h.untyped_storage().nbytes())
            y.data.copy_(torch.sin(h.detach()))

        z.register_hook(refill)
        return torch.exp(z) * 2


@pytest.mark.parametrize("keep", [(), {"aten.sin.default"}])
def test_a_result_whose_memory_is_freed_is_made_again(lab: Any, keep: Any) -> None:
    """It was kept, and is empty when the exponential is asked for: the gradient is the one without a plan."""
    x = torch.randn(2, 4)
    plain = Discarding()
    plain(x).sum().backward()
    model = under(lab, Discarding(), x, keep)
    model(x).sum().backward()
    assert torch.equal(model.body.shift.grad, plain.shift.grad)
