"""Observation: the same sequence as a policy sees, nested modules, and nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autosac.errors import PlanError
from autosac.integrations.observe import observe


def test_an_observed_model_computes_the_same(lab: Any, case: Any) -> None:
    """Loss and gradients are bitwise those of the bare model."""
    model = observe(copy.deepcopy(case.model), ["layers.0", "layers.1"], lab.Log())
    assert lab.same(lab.step(model, case.tokens), case.reference)


def test_kernels_that_make_conjugates_are_observed_as_they_are(lab: Any) -> None:
    """A pseudo-inverse of complex numbers: a dispatch mode leaves out what resolves conjugates inside of its kernel."""

    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.linalg.pinv(x)
            return result

    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.complex64, requires_grad=True)
    found = []
    for model in (nn.Sequential(Inverse()), observe(nn.Sequential(Inverse()), ["0"], lab.Log())):
        out = model(x)
        found.append((out, *torch.autograd.grad(out.abs().sum(), x)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_inner_and_outer_modules_are_both_observed(lab: Any, cases: Any) -> None:
    """The operators of layers.0.w1 (a linear layer: transpose and product) appear in both regions, each with
    its numbers.
    """
    case = cases["llama"]
    log = lab.Log()
    model = observe(copy.deepcopy(case.model), ["layers.0", "layers.0.w1", "layers.0.w3"], log)
    model(case.tokens)
    assert log.begun == ["layers.0", "layers.0.w1", "layers.0.w3"]
    inner, other, outer = (log.calls[name] for name in ("layers.0.w1", "layers.0.w3", "layers.0"))
    assert [(c.op, c.occurrence) for c in outer] == [(c.op, c.occurrence) for c in case.calls["layers.0"]]
    assert [c.op for c in inner] == [c.op for c in other]
    products = [c.occurrence for c in outer if c.op == "aten.mm.default"]
    assert products == list(range(len(products)))
    assert [c.occurrence for c in inner if c.op == "aten.mm.default"] == [0]


def test_detach_profiler_and_metadata_calls_do_not_count(lab: Any) -> None:
    """Of a view, sin, detach, cos and a product in a profiler range, view, detach and range have no number."""

    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("range"):
                return x.view(-1).sin().detach().cos() * x.size(0)

    log = lab.Log()
    observe(nn.Sequential(Noisy()), ["0"], log)(torch.ones(2, requires_grad=True))
    assert [c.op for c in log.calls["0"]] == ["aten.sin.default", "aten.cos.default", "aten.mul.Tensor"]


def test_nothing_is_observed_without_gradients(lab: Any, cases: Any) -> None:
    """A checkpointed module under no_grad runs plainly, so it is no region."""
    log = lab.Log()
    model = observe(copy.deepcopy(cases["llama"].model), ["layers.0"], log)
    with torch.no_grad():
        model(cases["llama"].tokens)
    assert log.begun == []


def test_an_unknown_module_is_refused(lab: Any, cases: Any) -> None:
    """The name that is not there is named."""
    with pytest.raises(PlanError, match=r"no module layers\.7"):
        observe(copy.deepcopy(cases["llama"].model), ["layers.7"], lab.Log())


def test_a_slice_of_an_observed_module(lab: Any) -> None:
    """A slice of an observed nn.Sequential is made by its class and is not observed: it runs as it is."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    log = lab.Log()
    seen = observe(model, ["0"], log)
    assert torch.equal(seen[0][:2](x), plain[0][:2](x))
    assert log.begun == []


class Gated(nn.Module):
    """A compiled product between eager operators; it may change what it is given."""

    def __init__(self, *, adds: bool = False) -> None:
        super().__init__()
        self.linear, self.weight, self.adds = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4)), adds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = self.linear(x).sigmoid()
        return gate(h, self.weight, self.adds).cos()


@torch.compile(backend="aot_eager")
def gate(h: torch.Tensor, weight: torch.Tensor, adds: bool) -> torch.Tensor:
    """Three operators, and a fourth."""
    out = (h @ weight.detach()).exp() + h  # no gradient needs h
    if adds:
        h.detach().add_(1)
    return out


@pytest.mark.parametrize("adds", [False, True])
def test_a_compiled_graph_is_one_thing(lab: Any, adds: bool) -> None:
    """Its operators are none of the modules around it, whose regions each see one graph, and what it changed."""
    log = lab.Log()
    model = observe(nn.Sequential(nn.Sequential(Gated(adds=adds))), ["0", "0.0"], log)
    seen: list[Any] = []
    begin = log.begin
    log.begin = lambda *args: (seen.append(begin(*args)), seen[-1])[1]
    model(torch.ones(2, 4))
    for name in ("0", "0.0"):
        names = ["aten.addmm.default", "aten.sigmoid.default", "compiled", "aten.cos.default"]
        assert [c.op for c in log.calls[name]] == names
    assert [(region.graphs, region.changed) for region in seen] == [(1, adds), (1, adds)]
