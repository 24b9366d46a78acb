"""Results that wait in host memory: gradients, what is let go and when. Real tensors on the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autosac.errors import PlanError
from autosac.integrations.apply import PlanMismatchWarning, apply
from autosac.integrations.recompute import offload
from autosac.integrations.recompute.offload import Offloader, Parcel
from autosac.plans import Plan


def offloading(plan: Plan, choose: Any = lambda _: True) -> Plan:
    """The plan that offloads all that it keeps, or those positions of it that are chosen."""
    return replace(
        plan,
        units=tuple(
            replace(
                unit,
                decisions=tuple(
                    replace(decision, offload=decision.keep and choose(i)) for i, decision in enumerate(unit.decisions)
                ),
            )
            for unit in plan.units
        ),
    )


@pytest.fixture(autouse=True, scope="module")
def nothing_is_small() -> Iterator[None]:
    """The models here are tiny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SMALLEST_OFFLOAD_BYTES", 0)
        yield


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Parcel]:
    """Every parcel that is sent during the test."""
    found: list[Parcel] = []
    original = Offloader.send

    def send(self: Offloader, value: Any) -> Any:
        out = original(self, value)
        if isinstance(out, Parcel):
            found.append(out)
        return out

    monkeypatch.setattr(Offloader, "send", send)
    return found


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("share", [1, 2, 3])
def test_gradients_are_exact(lab: Any, case: Any, sent: list[Parcel], share: int, early_stop: bool) -> None:
    """Everything or a part offloaded: loss and gradients of two steps bitwise those without a plan, and no warning."""
    groups = lab.groups_of(case.calls["layers.0"])
    keep = {i for number, group in enumerate(groups) if number % share == 0 for i in group}
    model = apply(copy.deepcopy(case.model), offloading(case.plan(keep, early_stop=early_stop)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert lab.same(lab.step(model, case.tokens), case.reference)
    assert len(sent) >= 2 * len(case.calls)


def run(model: nn.Module, batches: list[torch.Tensor], order: list[int]) -> tuple[torch.Tensor, ...]:
    """The gradients of these batches; negative numbers are backwards (-1: of the first batch)."""
    torch.manual_seed(1)
    model.zero_grad()
    losses: dict[int, torch.Tensor] = {}
    for number in order:
        if number > 0:
            losses[number] = model(batches[number - 1]).square().mean()
        else:
            losses.pop(-number).backward()
    return tuple(p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["gpt", "inplace"])
@pytest.mark.parametrize("order", [[1, -1, 2, -2], [1, 2, -2, -1], [1, 2, -1, -2], [1, 2, -1, 3, -2, -3], [1, 2, -2]])
def test_microbatches_in_any_order(lab: Any, cases: Any, name: str, order: list[int]) -> None:
    """Backwards right after their forwards, last first, first first, interleaved, and one that never comes."""
    case = cases[name]
    batches = [case.tokens, case.tokens.flip(0), case.tokens.roll(1, 1)]
    groups = lab.groups_of(case.calls["layers.0"])
    plan = offloading(case.plan({i for group in groups[::2] for i in group}))
    model = apply(copy.deepcopy(case.model), plan)
    plain = copy.deepcopy(case.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert lab.same(run(model, batches, order), run(plain, batches, order))


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_choice_is_exact(lab: Any, cases: Any, data: st.DataObject) -> None:
    """Any groups kept, any of the kept results offloaded, in each layer others: gradients stay bitwise."""
    case = cases[data.draw(st.sampled_from(sorted(cases)))]
    groups = lab.groups_of(case.calls["layers.0"])
    kept = [i for group in groups if data.draw(st.booleans()) for i in group]
    gone = data.draw(st.sets(st.sampled_from(kept or [0])))
    plan = case.plan(set(kept), early_stop=data.draw(st.booleans()))
    first, second = offloading(plan, gone.__contains__), offloading(plan, lambda i: i not in gone)
    mixed = replace(plan, units=(first.units[0], second.units[1]))
    model = apply(copy.deepcopy(case.model), mixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lab.same(lab.step(model, case.tokens), case.reference)


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Squares() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        for layer in self.layers:
            x = layer(x)
        return x


class Squares(nn.Module):
    """A product, its sine, the cosine of that, and the output. The backward asks for the first two; the output is
    the next layer's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        product = x * self.weight
        self.product = product.detach()
        return product.sin().cos().exp()


def chain(
    lab: Any, depth: int, offload: Any, plain: tuple[int, ...] = (), wrong: int | None = None
) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Chain under a plan that keeps everything and offloads in these layers, the same without a plan, and an input.

    `plain` layers keep nothing; of the product of the layer `wrong` the plan has another shape.
    """
    model = Chain(depth)
    x = torch.linspace(-1, 1, 6)
    calls = lab.observed(model, [f"layers.{i}" for i in range(depth)], lambda m: m(x))
    rows = {
        fqn: lab.decisions_from(c, set() if i in plain else set(range(len(c))))
        for i, (fqn, c) in enumerate(calls.items())
    }
    plan = lab.plan_for(model, rows)
    units = [
        offloading(replace(plan, units=(unit,))).units[0] if i in offload else unit for i, unit in enumerate(plan.units)
    ]
    if wrong is not None:
        first, *rest = units[wrong].decisions
        units[wrong] = replace(units[wrong], decisions=(replace(first, outputs=(((7,), "float32"),)), *rest))
    return apply(copy.deepcopy(model), replace(plan, units=tuple(units))), model, x


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of the sum of the output."""
    model.zero_grad()
    model(x).sum().backward()
    return tuple(p.grad for p in model.parameters())


@pytest.mark.parametrize("plain", [(), (1,)])
def test_results_leave_when_the_next_unit_has_run(lab: Any, sent: list[Parcel], plain: tuple[int, ...]) -> None:
    """Three layers: after the forward those of all but the last are gone, also if the one between keeps nothing;
    those of the last are given as they are.
    """
    model, _, x = chain(lab, 3, {0, 2}, plain)
    out = model(x)
    assert [parcel.has_left for parcel in sent] == [True] * 2 + [False] * 2
    out.sum().backward()
    assert [parcel.is_fetched for parcel in sent] == [True] * 2 + [False] * 2


def test_copies_back_begin_one_unit_ahead(lab: Any, sent: list[Parcel]) -> None:
    """When the last of three layers begins its backward those of the second are asked for, those of the first not yet."""
    model, _, x = chain(lab, 3, {0, 1, 2})
    seen = []

    def look(_: torch.Tensor) -> None:
        seen.append([parcel.is_fetched for parcel in sent])

    model.layers[1].register_forward_hook(lambda _, __, out: out.register_hook(look) and None)
    model(x).sum().backward()
    assert seen == [[False] * 2 + [True] * 2 + [False] * 2]


def test_buffers_are_used_again(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further steps take the buffers of the first."""
    addresses: list[int] = []
    original = Parcel.__init__

    def init(self: Parcel, *args: Any) -> None:
        original(self, *args)
        assert self._buffer is not None
        addresses.append(self._buffer.data_ptr())

    monkeypatch.setattr(Parcel, "__init__", init)
    model, plain, x = chain(lab, 3, {0, 1, 2})
    for _ in range(3):
        assert lab.same(gradients(model, x), gradients(plain, x))
    assert len(addresses) == 18 and len(set(addresses)) == 6


def test_nothing_stays_of_a_graph_that_is_thrown_away(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward without a backward leaves no parcel, and the next step is right."""
    alive: list[int] = []
    original, end = Parcel.__init__, Parcel.__del__
    monkeypatch.setattr(Parcel, "__init__", lambda self, *args: (alive.append(1), original(self, *args))[1])
    monkeypatch.setattr(Parcel, "__del__", lambda self: (alive.pop(), end(self))[1])
    model, plain, x = chain(lab, 3, {0, 1, 2})
    out = model(x)
    assert len(alive) == 6
    del out
    assert not alive
    assert lab.same(gradients(model, x), gradients(plain, x))
    assert not alive


def test_a_backward_that_ends_early(lab: Any) -> None:
    """Gradients of the last layer only: the copies back of the one before were begun in vain."""
    model, plain, x = chain(lab, 3, {0, 1, 2})
    for _ in range(2):
        found, wanted = (torch.autograd.grad(m(x).sum(), list(m.parameters())[-1:]) for m in (model, plain))
        assert lab.same(found, wanted)
    assert lab.same(gradients(model, x), gradients(plain, x))


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_result_that_is_changed_in_place(lab: Any, is_copied: bool) -> None:
    """Changed while it is copied: what its layer offloads is computed again, as it was. Changed after it has left:
    the host has what it was. No warning, as the plan is followed.
    """
    model, plain, x = chain(lab, 2, {0, 1})

    def change(*_: Any) -> None:
        model.layers[0].product.add_(1.0)

    if is_copied:
        model.layers[1].register_forward_pre_hook(change)
    else:
        model.layers[1].register_forward_hook(change)
    with warnings.catch_warnings(), lab.counting(model, ["layers.0", "layers.1"]) as ran:
        warnings.simplefilter("error")
        found = gradients(model, x)
    assert lab.same(found, gradients(plain, x))
    again = ["aten.mul.Tensor", "aten.sin.default"]
    assert ran.again == {"layers.0": again if is_copied else [], "layers.1": []}


@pytest.mark.parametrize("unit", [0, 1])
def test_another_shape_is_kept_on_the_device(lab: Any, sent: list[Parcel], unit: int) -> None:
    """A plan for another batch, as to the product: its layer keeps it, everything else leaves as planned."""
    model, plain, x = chain(lab, 2, {0, 1}, wrong=unit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with lab.counting(model, ["layers.0", "layers.1"]) as ran:
                assert lab.same(gradients(model, x), gradients(plain, x))
            assert ran.again == {"layers.0": [], "layers.1": []}
    assert len([w for w in caught if w.category is PlanMismatchWarning]) == 1
    assert len(sent) == 2 * 3


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0)[::2],
        torch.zeros(1, 3).expand(2, 3),
        torch.zeros(0),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        3,
        None,
    ],
)
def test_what_is_no_plain_tensor_stays(value: Any) -> None:
    """Gaps, elements that share memory, nothing at all, other layouts, lazily conjugated numbers, no tensor."""
    assert Offloader().send(value) is value


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 64 KiB on they leave."""
    monkeypatch.setattr(offload, "SMALLEST_OFFLOAD_BYTES", 2**16)
    assert isinstance(Offloader().send(torch.zeros(2**14)), Parcel)
    assert isinstance(Offloader().send(torch.zeros(2**14 - 1)), torch.Tensor)


def test_a_tensor_of_any_dense_strides_comes_back_alike() -> None:
    """A transposed tensor keeps its strides."""
    value = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    parcel = Offloader().send(value)
    parcel.leave()
    assert torch.equal(parcel.tensor(), value) and parcel.tensor().stride() == value.stride()


def test_the_tensor_inside_of_a_dtensor_is_offloaded(mesh: Any) -> None:
    """It comes back with its placement, needing no gradient, and a result that is still being communicated stays."""
    value = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    parcel = Offloader().send(value)
    parcel.leave()
    back = parcel.tensor()
    assert isinstance(back, DTensor) and back.placements == value.placements and not back.requires_grad
    assert torch.equal(back.to_local(), value.to_local()) and back.to_local() is not value.to_local()
    waiting = AsyncCollectiveTensor(torch.ones(2))
    assert Offloader().send(waiting) is waiting


def test_a_compiled_module_is_refused(cases: Any) -> None:
    """The compiler knows of no offloading: one line that says so."""
    case = cases["llama"]
    model = apply(copy.deepcopy(case.model), offloading(case.plan({0})))
    model.layers[0] = torch.compile(model.layers[0], backend="aot_eager")
    with pytest.raises(Exception, match=r"layers\.0 is compiled and its plan offloads to host memory"):
        model(case.tokens)


def test_only_what_is_kept_can_be_offloaded(cases: Any) -> None:
    """A plan that says otherwise is none."""
    plan = cases["llama"].plan({0})
    unit = plan.units[0]
    wrong = replace(unit, decisions=tuple(replace(d, offload=True) for d in unit.decisions))
    with pytest.raises(PlanError, match=r"offloads aten.*of layers\.0, which it does not keep"):
        replace(plan, units=(wrong,))
