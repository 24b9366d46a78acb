"""The recomputation of a unit computes float32 as its forward did, and leaves PyTorch's settings as it found them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autosac.integrations.apply import apply
from autosac.integrations.recompute import flags

Setting = tuple[str, str]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for setting in (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
        torch._C._set_fp32_precision_setter(*setting, "none")


def _new() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _old() -> None:
    torch.set_float32_matmul_precision("high")


def _everywhere() -> None:
    torch.backends.fp32_precision = "tf32"


@pytest.mark.parametrize("change", [_new, _old, _everywhere])
def test_float32_is_computed_as_in_the_forward(change: Callable[[], None]) -> None:
    """Set by the older or the newer interface before the backward: the recomputation does not see it, what follows does."""
    before = flags.present()
    change()
    after = flags.present()
    with flags.restored(before):
        assert torch.backends.cuda.matmul.fp32_precision in ("none", "ieee"), "which are the same"
    assert flags.present() == after != before


def test_what_is_taken_over_is_taken_over_again() -> None:
    """After a recomputation a setting for everything reaches matrix products, as it would without a plan."""
    before = flags.present()
    _everywhere()
    with flags.restored(before):
        pass
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


class Filled(nn.Module):
    """Has PyTorch fill new memory with NaN while it asks for deterministic algorithms, as `empty` does then."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The even columns' sine; zero in the odd ones."""
        torch.use_deterministic_algorithms(True)
        half = torch.empty_like(x)
        torch.use_deterministic_algorithms(False)
        half[:, ::2] = x[:, ::2]
        return torch.sin(torch.where(half.isnan(), torch.zeros(()), half) * self.scale)


def test_switches_that_a_unit_sets_are_those_of_its_operators_again(lab: Any) -> None:
    """In forwards that are looked at closely and in later ones; afterwards the switches are what they were."""
    plain = nn.Sequential()
    plain.add_module("body", Filled())
    model = copy.deepcopy(plain)
    plan, _ = lab.plan_keeping(model, lambda m: m(torch.randn(2, 4)), {"body": ()})
    apply(model, plan)
    for _ in range(4):
        x = torch.randn(64, 4)
        for one in (plain, model):
            one(x).sum().backward()
        assert torch.equal(model.body.scale.grad, plain.body.scale.grad)
        assert not torch.are_deterministic_algorithms_enabled()


def test_switches_that_nobody_sets_are_not_noted(lab: Any) -> None:
    """A unit's operators run again without any of them being set."""
    model = nn.Sequential()
    model.add_module("body", nn.Linear(4, 4))
    plan, _ = lab.plan_keeping(model, lambda m: m(torch.randn(2, 4)), {"body": ()})
    apply(model, plan)
    before = flags.present()
    written: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flags, "change", lambda *pair: written.append(pair))
        model(torch.randn(2, 4)).sum().backward()
    assert not written and flags.present() == before
