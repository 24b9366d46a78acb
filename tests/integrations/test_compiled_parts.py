"""Compiled modules inside a unit that runs eagerly. Real tensors on the CPU, without a code generator."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.output_graph import OutputGraph
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autosac.integrations.apply import PlanMismatchWarning, RecomputationError, apply
from autosac.integrations.recompute import compiled_parts


class Part(nn.Module):
    """Saves results of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(4, 8), nn.Linear(8, 4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = self.up(x).sin()
        return self.down(self.inner(h.exp() * h))


class Block(nn.Module):
    """Eager operators around the part."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(4, 4), Part(inner or nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return x + self.part(self.before(x).sigmoid()).sin()


class Backend:
    """Compiles nothing, and remembers the memory that forward graphs make: their outputs are results and saved tensors."""

    def __init__(self) -> None:
        self.runs = 0
        self.made: list[StorageWeakRef] = []

    def forward(self, graph: Any, _: Any) -> Any:
        """A compiled forward."""

        def run(*args: Any) -> Any:
            given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
            self.runs += 1
            out = graph(*args)
            storages = [t.untyped_storage() for t in out if isinstance(t, torch.Tensor)]
            self.made += [StorageWeakRef(storage) for storage in storages if storage._cdata not in given]
            return out

        return make_boxed_func(run)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile."""
        backward = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
        return aot_autograd(fw_compiler=self.forward, bw_compiler=backward)(graph, inputs)

    def alive(self) -> int:
        """How much of that memory lives."""
        return sum(not reference.expired() for reference in self.made)


def compiled(model: nn.Module, how: str, backend: Any) -> nn.Module:
    """The model with its part compiled."""
    if how == "replaced":
        model[0].part = torch.compile(model[0].part, backend=backend, fullgraph=True)
    else:
        model[0].part.compile(backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize("how", ["replaced", "in place"])
@pytest.mark.parametrize("keep", [set(), {"aten.sigmoid.default"}])
def test_a_compiled_part_is_recomputed(lab: Any, keep: set[str], how: str) -> None:
    """`torch.compile(part)` and `part.compile()` after the plan: two steps bitwise those without a plan. All that
    the part makes is alive after a forward without a plan, none of it after one with the plan: the part runs a
    second time in the backward.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": keep})

    def steps(m: nn.Module, backend: Backend) -> tuple[list[torch.Tensor], list[int]]:
        found, alive = [], []
        for _ in range(2):
            m.zero_grad()
            backend.made.clear()
            out = m(x)
            alive += [len(backend.made), backend.alive()]
            out.square().sum().backward()
            found += [out.detach(), *(p.grad.clone() for p in m.parameters())]
        return found, alive

    backends = Backend(), Backend()
    torch._dynamo.reset()
    plain = compiled(copy.deepcopy(model), how, backends[0])
    wanted, alive = steps(plain, backends[0])
    planned = compiled(apply(copy.deepcopy(model), plan), how, backends[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanMismatchWarning)  # the plan was made of the model before it was compiled
        found, alive_planned = steps(planned, backends[1])
    assert lab.same(tuple(found), tuple(wanted))
    assert alive[0] >= 3 and alive == [alive[0]] * 4
    assert alive_planned == [alive[0], 0] * 2
    assert (backends[0].runs, backends[1].runs) == (2, 4)


class Calling(nn.Module):
    """Eager operators around a compiled function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.weight, self.function = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        out: torch.Tensor = self.function(self.linear(x).sigmoid(), self.weight).sin()
        return out


@pytest.mark.parametrize("kept", [False, True])
def test_a_compiled_function_is_kept_or_runs_again(lab: Any, kept: bool) -> None:
    """A plan decides about its graph as about an operator. Kept, all that the graph made stays, and it runs once; else it runs
    twice, and nothing stays. Both are bitwise as without a plan.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    backend = Backend()
    function = torch.compile(lambda h, weight: ((h @ weight).exp() * h).tanh(), backend=backend)
    model = nn.Sequential(Calling(function), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"0": {"compiled"} if kept else set()})
    assert [d.keep for unit in plan.units for d in unit.decisions if d.op == "compiled"] == [kept]
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    planned = apply(model, plan)
    backend.runs = 0
    backend.made.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanMismatchWarning)
        out = planned(x)
        made, alive = len(backend.made), backend.alive()
        out.square().sum().backward()
    assert made >= 3 and alive == (made if kept else 0)
    assert backend.runs == (1 if kept else 2)
    assert lab.same(tuple(p.grad for p in planned.parameters()), tuple(wanted))


@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_a_compiled_part_with_dropout_under_autocast(lab: Any, how: str) -> None:
    """The part's random numbers and autocast state are those of its forward."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.Dropout(0.5)), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    plan = lab.plan_for(model, {"0": ()})

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        out.float().square().sum().backward()
        return (out.detach(), torch.rand(1), *(p.grad for p in m.parameters()))

    torch._dynamo.reset()
    planned = compiled(apply(copy.deepcopy(model), plan), how, "aot_eager")
    assert lab.same(run(planned), run(compiled(copy.deepcopy(model), how, "aot_eager")))


class _CheckpointedPart(Block):
    """A block that has its part under a checkpoint of its own, and reads the part's result twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        y = checkpoint(self.part, self.before(x).sigmoid(), use_reentrant=False)
        return x + (y * 2).tanh().sin()


def test_a_compiled_part_under_a_checkpoint_of_the_modules_own(lab: Any) -> None:
    """What the part saves is the checkpoint's; its result is made again like others: bits as without a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(_CheckpointedPart(), nn.Linear(4, 4))
    plan = lab.plan_for(model, {"0": ()})

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        out = m(torch.linspace(-1, 1, 12).view(3, 4))
        out.square().sum().backward()
        return (out.detach(), *(p.grad for p in m.parameters()))

    torch._dynamo.reset()
    planned = compiled(apply(copy.deepcopy(model), plan), "in place", "aot_eager")
    assert lab.same(run(planned), run(compiled(copy.deepcopy(model), "in place", "aot_eager")))


def experts(w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Two products of groups after one another, as TorchTitan's experts: Inductor uses the memory of one weight for both."""
    x, first, second = x.bfloat16(), w1.bfloat16().transpose(-2, -1), w2.bfloat16().transpose(-2, -1)
    h = torch._grouped_mm(x, first, offs=ends).sin()
    return torch._grouped_mm(h, second, offs=ends).float()


class Experts(nn.Module):
    """Calls `experts`, or what is made of it."""

    run: Any = staticmethod(experts)

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.randn(4, 16, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The output."""
        return type(self).run(self.w1, self.w2, x, ends)


class Mixture(nn.Module):
    """As TorchTitan's, with 16 more rows than tokens, which no group has."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(16, 16), Experts()
        self.register_buffer("ends", torch.tensor([8, 16, 32, 32], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        rows = torch.cat([torch.arange(32), torch.full((16,), 32)])
        h = self.before(x).sigmoid()
        h = torch.vstack((h, h.new_zeros(16)))
        y = self.part(h[rows], self.ends)
        out = y.new_empty(h.shape)
        out[rows] = y
        return x + out[:-1].sin()


def scribble() -> None:
    """Leave other contents in free memory."""
    for _ in range(2):
        scraps = [torch.full((48, 16), 3.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32) for _ in range(9)]
        scraps.clear()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["replaced", "in place", "function", "run before"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_experts_are_recomputed(lab: Any, monkeypatch: pytest.MonkeyPatch, backend: str, how: str) -> None:
    """Experts compiled as a module, or as a function that a module calls, which may have run before the plan was applied:
    gradients are bit for bit those without a plan, whatever is in rows that no group has, and in memory that a compiled graph
    uses twice.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), nn.Linear(16, 16))
    x = torch.randn(32, 16)
    plan = lab.plan_for(model, {"0": ()})
    if how in ("function", "run before"):
        monkeypatch.setattr(Experts, "run", staticmethod(torch.compile(experts, backend=backend, fullgraph=True)))

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        found = []
        for _ in range(3):
            scribble()
            out = m(x)
            scribble()
            out.square().sum().backward()
            found.append(out.detach())
        return (*found, *(p.grad for p in m.parameters()))

    of_model = (lambda m: compiled(m, how, backend)) if how in ("replaced", "in place") else (lambda m: m)
    if how != "run before":
        planned = run(of_model(apply(copy.deepcopy(model), plan)))
        torch._dynamo.reset()
        assert lab.same(planned, run(of_model(copy.deepcopy(model))))
    else:
        original = OutputGraph.call_user_compiler
        monkeypatch.setattr(OutputGraph, "call_user_compiler", getattr(original, "__wrapped__", original))
        plain = run(copy.deepcopy(model))
        assert lab.same(run(apply(copy.deepcopy(model), plan)), plain)


def sines(x: torch.Tensor) -> torch.Tensor:
    """For a compiler."""
    return x.sin().sin()


def cosines(x: torch.Tensor) -> torch.Tensor:
    """For another one."""
    return x.cos().cos()


@pytest.mark.usefixtures("fresh_compiler")
def test_graphs_made_before_the_plan_stay_operators_if_they_were_made_so() -> None:
    """Of two graphs that Dynamo made before, that which is an operator for dispatch modes (as TorchTitan compiles flexible
    attention) stays one, so that plans may keep it; the other becomes an entry of the tape.
    """
    before = set(globals())
    x = torch.ones(2, requires_grad=True)
    torch.compile(sines, options={"wrap_inductor_compiled_regions": True})(x)
    (region,) = {name for name in set(globals()) - before if name.startswith("__compiled_fn_")}
    torch.compile(cosines, backend="aot_eager")(x)
    (graph,) = {name for name in set(globals()) - before - {region} if name.startswith("__compiled_fn_")}
    made = compiled_parts.made_as_operators()
    assert region in made and graph not in made


def counted(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Changes what it is given."""
    h = x.tanh()
    total.add_(h.detach().mean())
    return h * total.sin()


class Counted(nn.Module):
    """Changes its buffer, or a tensor of its own, in compiled code."""

    run: Any = staticmethod(counted)

    def __init__(self, *, of_its_own: bool) -> None:
        super().__init__()
        self.before, self.of_its_own = nn.Linear(4, 4), of_its_own
        self.register_buffer("total", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = self.before(x).sigmoid()
        total = h.detach().mean() if self.of_its_own else self.total
        return type(self).run(h, total) * total


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("of_its_own", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_that_changes_its_input_runs_once(
    lab: Any, monkeypatch: pytest.MonkeyPatch, backend: str, of_its_own: bool
) -> None:
    """A compiled function adds to a tensor in place, which the unit has made or which is its buffer: outputs, gradients and
    the buffer are those without a plan.
    """
    monkeypatch.setattr(Counted, "run", staticmethod(torch.compile(counted, backend=backend, fullgraph=True)))
    torch.manual_seed(0)
    model = nn.Sequential(Counted(of_its_own=of_its_own), nn.Linear(4, 4))
    x = torch.randn(3, 4)

    def run(m: nn.Module) -> tuple[torch.Tensor, ...]:
        found = []
        for _ in range(2):
            out = m(x)
            out.square().sum().backward()
            found.append(out.detach())
        return (*found, *(p.grad for p in m.parameters()), *m.buffers())

    assert lab.same(run(apply(copy.deepcopy(model), lab.plan_for(model, {"0": ()}))), run(copy.deepcopy(model)))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_part_with_a_hidden_state_stops(lab: Any) -> None:
    """A backend whose forward counts its calls gives other values when the part is recomputed: RecomputationError."""
    calls = [0]

    def forward(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            calls[0] += 1
            return tuple(t + calls[0] if isinstance(t, torch.Tensor) else t for t in graph(*args))

        return make_boxed_func(run)

    model = nn.Sequential(Block(), nn.Linear(4, 4))
    plan = lab.plan_for(model, {"0": ()})
    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    planned = compiled(apply(model, plan), "in place", backend)
    with pytest.raises(RecomputationError, match="made by a compiled part"):
        planned(torch.randn(3, 4)).square().sum().backward()
