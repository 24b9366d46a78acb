"""What is recorded of toy programs, each derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from autosac.trace import (
    Alloc,
    Free,
    Label,
    ModuleEnter,
    ModuleExit,
    Phase,
)

Capture = Callable[..., Any]
FLOAT = 4  # bytes


class Toy(nn.Module):
    """Two linear layers, 8 to 16 to 4, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()) * self.scale


def make_plain(device: torch.device) -> Any:
    """Forward, backward and Adam on a batch of 2 that comes from the host."""
    with device:
        model = Toy()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        batch = torch.zeros(2, 8).to(device)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def plain(capture: Capture) -> Any:
    """Of `make_plain`."""
    return capture(make_plain)


def test_operators_phases_and_modules(plain: Any) -> None:
    """Every operator of a step is recorded with its phase and module, those of the backward with the module that made them."""
    assert plain.placed() == [
        ("other", "", "_to_copy"),
        ("forward", "a", "mm"),
        ("forward", "", "relu"),
        ("forward", "b", "mm"),
        ("forward", "", "mul"),
        ("forward", "", "sum"),
        ("forward", "", "ones_like"),
        ("backward", "", "mul"),
        ("backward", "b", "mm"),
        ("backward", "b", "mm"),
        ("backward", "", "threshold_backward"),
        ("backward", "a", "mm"),
        *(
            ("optimizer", "", name)
            for name in (
                "_foreach_lerp_",
                "_foreach_mul_",
                "_foreach_addcmul_",
                "_foreach_sqrt",
                "_foreach_div_",
                "_foreach_add_",
                "_foreach_addcdiv_",
            )
        ),
    ]


def test_module_events(plain: Any) -> None:
    """Modules are entered and left in the forward as they are called, in the backward in reverse."""
    names = plain.trace.modules
    found = [(type(e) is ModuleEnter, names[e.module], e.phase) for e in plain.of(ModuleEnter, ModuleExit)]
    forward = [(True, "a"), (False, "a"), (True, "b"), (False, "b")]
    backward = [(True, "b"), (False, "b"), (True, "a"), (False, "a")]
    assert found == [(*e, Phase.FORWARD) for e in forward] + [(*e, Phase.BACKWARD) for e in backward]


def test_module_table(plain: Any) -> None:
    """The trace names all modules, their parents and classes."""
    trace = plain.trace
    assert trace.modules == ("", "a", "b")
    assert trace.module_parents == (-1, 0, 0)
    assert trace.module_classes == ("Toy", "Linear", "Linear")


def test_source_lines(plain: Any) -> None:
    """Forward and backward operators carry the line of this file that issued the forward one; Adam's its own."""
    here = Path(Toy.forward.__code__.co_filename)
    lines = Path(__file__).read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if "self.b(self.a(x).relu())" in line)
    for name in ("mm", "relu", "threshold_backward", "mul"):
        for operator in plain.operators(name):
            assert plain.trace.sources[operator.source] == f"{'/'.join(here.parts[-2:])}:{number}"
    (square_root,) = plain.operators("_foreach_sqrt")
    assert plain.trace.sources[square_root.source].startswith("optim/adam.py:")


def test_labels_of_residents(plain: Any) -> None:
    """Parameters, buffers and both states of Adam are resident; gradients are not, they were set to None."""
    assert sorted(plain.labelled(Label.PARAMETER)) == [16 * 4 * FLOAT, 8 * 16 * FLOAT]
    assert plain.labelled(Label.BUFFER) == [4 * FLOAT]
    assert sorted(plain.labelled(Label.OPTIMIZER_STATE)) == [256, 256, 512, 512]
    assert plain.labelled(Label.GRADIENT) == [] and len(plain.trace.residents()) == 7


def test_labels_within_the_step(plain: Any) -> None:
    """The batch is an input, the parameters' gradients are gradients, the rest has no label."""
    allocated = [event.storage for event in plain.of(Alloc)]
    assert plain.labelled(Label.INPUT, allocated) == [2 * 8 * FLOAT]
    assert plain.labelled(Label.GRADIENT, allocated) == [256, 512]
    assert len(plain.labelled(Label.NONE, allocated)) == len(allocated) - 3


def test_lifetimes(plain: Any) -> None:
    """What autograd saves lives until its backward has run; what it does not save dies at once; gradients live on."""
    relu, threshold = plain.operators("relu")[0], plain.operators("threshold_backward")[0]
    first, second = plain.operators("mm")[:2]
    events = plain.trace.events
    # relu's backward uses its result: the result of the first layer dies as soon as relu has been computed.
    assert events.index(relu) < plain.life(first.outputs[0])[1] < events.index(second)
    _, end = plain.life(relu.outputs[0])
    assert events.index(threshold) < end < events.index(plain.operators("_foreach_lerp_")[0])
    # The product with the buffer is needed by nobody: autograd keeps the buffer, not the second layer's result.
    assert plain.life(second.outputs[0])[1] == events.index(plain.operators("mul", Phase.FORWARD)[0]) + 1
    gradient = plain.operators("mm", Phase.BACKWARD)[-1].outputs[0]
    assert plain.life(gradient)[1] > events.index(plain.operators("_foreach_addcdiv_")[0])


def test_every_allocation_is_released_once(plain: Any) -> None:
    """Allocations and releases alternate for each storage, the prologue included."""
    alive: set[int] = set()
    for event in (*plain.trace.prologue, *plain.trace.events):
        if type(event) is Alloc:
            assert event.storage not in alive
            alive.add(event.storage)
        elif type(event) is Free:
            alive.remove(event.storage)
    assert sum(plain.trace.storages[s].nbytes for s in alive) == 768 + 16 + 2 * 768  # nothing but what is resident


def test_mutated_arguments(plain: Any) -> None:
    """In-place operators name the inputs that they write to."""
    (update,) = plain.operators("_foreach_addcdiv_")
    assert plain.signature(update).mutates == (0, 1) and len(update.inputs) == 6
    assert {plain.trace.storages[s].label for s in update.inputs[:2]} == {Label.PARAMETER}
    assert all(plain.signature(o).mutates == () for o in plain.operators("mm"))


def test_optimizer_temporary_of_foreach(plain: Any, capture: Capture) -> None:
    """Adam's foreach form on the GPU makes one temporary as large as all gradients; the CPU's for-loop form does not."""
    (square_root,) = plain.operators("_foreach_sqrt")
    assert sum(plain.trace.storages[s].nbytes for s in square_root.outputs) == 768
    on_cpu = capture(make_plain, target="cpu")
    assert not on_cpu.operators("_foreach_sqrt")
    roots = on_cpu.operators("sqrt", Phase.OPTIMIZER)
    assert [on_cpu.trace.storages[o.outputs[0]].nbytes for o in roots] == [512, 256]
    assert on_cpu.life(roots[0].outputs[0])[1] < on_cpu.life(roots[1].outputs[0])[0]


# ---- recomputation --------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block of two layers that is checkpointed, as a module or as a function, between two layers."""

    def __init__(self, as_function: bool, use_reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Softplus())
        self.last = nn.Linear(8, 8, bias=False)
        self.as_function, self.use_reentrant = as_function, use_reentrant

    def work(self, x: torch.Tensor) -> torch.Tensor:
        """The same without a module of its own around it."""
        return torch.sin(self.block[2](torch.cos(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        function = self.work if self.as_function else self.block
        return self.last(checkpoint(function, self.first(x), use_reentrant=self.use_reentrant))


def make_checkpointed(early_stop: bool, **arguments: Any) -> Any:
    """One forward and backward."""

    def make_step(device: torch.device) -> Any:
        with device:
            model, x = Checkpointed(**arguments), torch.zeros(2, 8)

        def step() -> None:
            with set_checkpoint_early_stop(early_stop):
                model(x).sum().backward()
            model.zero_grad()

        return model, step

    return make_step


BACKWARD_OF_BLOCK = [
    ("backward", "block.3", "softplus_backward"),
    ("backward", "block.2", "mm"),
    ("backward", "block.2", "mm"),
    ("backward", "block.1", "tanh_backward"),
    ("backward", "block.0", "mm"),
    ("backward", "block.0", "mm"),
    ("backward", "first", "mm"),
]
RECOMPUTATION = [
    ("recompute", "block.0", "mm"),
    ("recompute", "block.1", "tanh"),
    ("recompute", "block.2", "mm"),
    ("recompute", "block.3", "softplus"),
]


@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputed_module(capture: Capture, early_stop: bool) -> None:
    """A checkpointed module runs again before its backward; early stop skips what nothing needs: the last operator."""
    reading = capture(make_checkpointed(early_stop, as_function=False))
    backward = reading.placed()[8:]
    assert reading.placed()[:8] == [
        ("forward", "first", "mm"),
        ("forward", "block.0", "mm"),
        ("forward", "block.1", "tanh"),
        ("forward", "block.2", "mm"),
        ("forward", "block.3", "softplus"),
        ("forward", "last", "mm"),
        ("forward", "", "sum"),
        ("forward", "", "ones_like"),
    ]
    recomputed = RECOMPUTATION[:-1] if early_stop else RECOMPUTATION
    assert backward == [("backward", "last", "mm"), ("backward", "last", "mm"), *recomputed, *BACKWARD_OF_BLOCK]


def test_module_events_balance_under_early_stop(capture: Capture) -> None:
    """Modules that an early stop leaves by an exception are left in the trace, too."""
    reading = capture(make_checkpointed(True, as_function=False))
    open_modules: list[tuple[int, Phase]] = []
    for event in reading.of(ModuleEnter, ModuleExit):
        if type(event) is ModuleEnter:
            open_modules.append(tuple(event))
        else:
            assert open_modules.pop() == tuple(event)
    assert not open_modules


def test_recomputed_function(capture: Capture) -> None:
    """Operators of a checkpointed function are recomputation, outside of any module that it calls, too."""
    reading = capture(make_checkpointed(False, as_function=True))
    assert [place for place in reading.placed() if place[0] == "recompute"] == [
        ("recompute", "", "cos"),
        ("recompute", "block.2", "mm"),
        ("recompute", "", "sin"),
    ]
    assert [place for place in reading.placed() if place[0] == "backward"] == [
        ("backward", "last", "mm"),
        ("backward", "last", "mm"),
        ("backward", "", "cos"),
        ("backward", "", "mul"),
        ("backward", "block.2", "mm"),
        ("backward", "block.2", "mm"),
        ("backward", "", "sin"),
        ("backward", "", "neg"),
        ("backward", "", "mul"),
        ("backward", "first", "mm"),
    ]


def test_reentrant_checkpoint(capture: Capture) -> None:
    """The older, re-entrant form recomputes and then runs a backward inside of the backward."""
    reading = capture(make_checkpointed(False, as_function=False, use_reentrant=True))
    assert reading.placed()[10:] == [*RECOMPUTATION, *BACKWARD_OF_BLOCK]


# ---- gradients ------------------------------------------------------------------------------------------------------


def make_shared(device: torch.device) -> Any:
    """One tensor is used by two layers and a residual connection; two microbatches."""
    with device:
        model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
        embedding, data = nn.Parameter(torch.zeros(4, 8)), torch.zeros(4, 8)
    model.register_parameter("embedding", embedding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(2):
            x = embedding * data
            (model["a"](x) + model["b"](x) + x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def shared(capture: Capture) -> Any:
    """Of `make_shared`."""
    return capture(make_shared)


def test_engine_adds_gradients_in_place(shared: Any) -> None:
    """Of the two additions of x's three gradients, the first is into new memory (the loss's gradient is an expanded
    scalar that others use), and the second into the sum of the first, as autograd's engine does.
    """
    additions = [o for o in shared.operators("add", Phase.BACKWARD) if shared.signature(o).outputs[0].shape == (4, 8)]
    assert len(additions) == 4  # two in each microbatch
    for first, second in (additions[:2], additions[2:]):
        assert first.outputs[0] not in first.inputs
        assert second.outputs[0] == second.inputs[0] == first.outputs[0]


def test_accumulated_gradients(shared: Any) -> None:
    """The second microbatch adds to the first's gradients in place; they are released after the optimizer's step."""
    (update,) = shared.operators("_foreach_add_", Phase.OPTIMIZER)
    gradients = update.inputs[3:]
    assert shared.labelled(Label.GRADIENT, gradients) == [128, 256, 256]
    for gradient in gradients:
        begin, end = shared.life(gradient)
        assert begin < shared.trace.events.index(update) < end
    accumulated = [o for o in shared.operators("add_") if o.phase is Phase.BACKWARD]
    assert {o.inputs[0] for o in accumulated} == set(gradients)
    assert all(shared.signature(o).mutates == (0,) and o.outputs == o.inputs[:1] for o in accumulated)


def test_optimizer_within_the_backward_and_closures(capture: Capture) -> None:
    """An optimizer that steps in a gradient's hook, or that calls forward and backward itself, keeps all phases apart."""

    def make_step(device: torch.device) -> Any:
        with device:
            model, x = Toy(), torch.zeros(2, 8)
        inner = torch.optim.SGD([model.b.weight], lr=0.1)
        outer = torch.optim.SGD([model.a.weight], lr=0.1)

        def hook(parameter: torch.Tensor) -> None:
            inner.step()
            parameter.grad = None

        model.b.weight.register_post_accumulate_grad_hook(hook)

        def closure() -> torch.Tensor:
            outer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            return loss

        return model, lambda: outer.step(closure)

    assert capture(make_step).placed() == [
        ("forward", "a", "mm"),
        ("forward", "", "relu"),
        ("forward", "b", "mm"),
        ("forward", "", "mul"),
        ("forward", "", "sum"),
        ("forward", "", "ones_like"),
        ("backward", "", "mul"),
        ("backward", "b", "mm"),
        ("backward", "b", "mm"),
        ("optimizer", "", "_foreach_add_"),
        ("backward", "", "threshold_backward"),
        ("backward", "a", "mm"),
        ("optimizer", "", "_foreach_add_"),
    ]


def test_operators_that_autograd_would_take_apart(capture: Capture) -> None:
    """In inference mode `to` arrives whole, with a tensor of the host; what is recorded is the copy that it consists of."""

    def make_step(device: torch.device) -> Any:
        x = torch.zeros(2, device=device)

        def step() -> None:
            with torch.inference_mode():
                x.add_(torch.arange(2.0).to(device))

        return step

    assert [name for _, _, name in capture(make_step).placed()] == ["_to_copy", "add_"]


def test_views_that_have_to_copy(capture: Capture) -> None:
    """Where operators arrive whole, as in tensor subclasses, what needs another layout or type is recorded as its copy."""

    def make_step(device: torch.device) -> Any:
        x = torch.zeros(2, 4, device=device)

        def step() -> None:
            with torch._C._AutoDispatchBelowAutograd():
                x.contiguous()  # is so already
                x.t().contiguous()
                x.t().reshape(8)
                x.to(torch.float16)

        return step

    reading = capture(make_step)
    assert [op for _, _, op in reading.placed()] == ["clone", "clone", "_to_copy"]


def test_double_backward(capture: Capture) -> None:
    """A backward that creates a graph is a backward, not a recomputation, although gradients are enabled in it."""

    def make_step(device: torch.device) -> Any:
        with device:
            model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()), torch.zeros(2, 8)
        x.requires_grad_()

        def step() -> None:
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            gradient.sum().backward()
            model.zero_grad()
            x.grad = None

        return model, step

    reading = capture(make_step)
    assert {phase for phase, _, _ in reading.placed()} == {"forward", "backward", "other"}
    (first,) = reading.operators("tanh_backward")[:1]
    assert first.phase is Phase.BACKWARD and reading.trace.modules[first.module] == "1"


def test_gradients_within_a_forward(capture: Capture) -> None:
    """A module that asks for gradients in its forward, as tracing for a compiler does too, goes on with its forward: in the
    first step as in the recorded one.
    """

    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x).sum()
            (slope,) = torch.autograd.grad(y, self.inner.weight, create_graph=True)
            return y + slope.exp().sum()

    def make_step(device: torch.device) -> Any:
        with device:
            model, x = Penalized(), torch.zeros(2, 8)
        return model, lambda: model(x).backward()

    reading = capture(make_step)
    assert [phase for phase, _, op in reading.placed() if op in ("exp", "add")] == ["forward", "forward"]
    storages, trace = reading.trace.storages, reading.trace
    made = [storages[e.storage] for part in (trace.prologue, trace.events) for e in part if type(e) is Alloc]
    assert [found.phase for found in made if found.op == "aten.exp.default"] == [Phase.FORWARD] * 2
