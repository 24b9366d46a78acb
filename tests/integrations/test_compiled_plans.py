"""Compiled models under plans: every unit does what the plan says of it. Real `torch.compile` on the CPU."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosac.errors import PlanError
from autosac.integrations.apply import PlanMismatchWarning, apply
from autosac.integrations.recompute.entries import Observer, TracedOperator, observer
from autosac.plans import Decision, Plan, Settings, Unit
from plans import MADE_FOR

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WIDTH, TOKENS = 16, 8
PRODUCTS = 3
ROW = TOKENS * WIDTH * 4  # bytes of one activation


class Block(nn.Module):
    """Three products, each under a sine: the backward needs every product, and the input of each."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(PRODUCTS)])

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        for weight in self.products:
            x = (x @ weight).sin()
        return x


class Model(nn.Module):
    """Equal blocks, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        for layer in self.layers:
            x = layer(x)
        return x


def unit(layer: int, kept: set[int] | None = None, budget: float | None = None) -> Unit:
    """A layer that keeps these of its products, or that the compiler is to decide for within a budget."""
    names = [("aten.mm.default", i) for i in range(PRODUCTS)]
    sines = [Decision(op="aten.sin.default", occurrence=i, keep=False, outputs=()) for i in range(PRODUCTS)]
    products = [Decision(op=op, occurrence=i, keep=i in (kept or ()), outputs=()) for op, i in names]
    return Unit(
        fqn=f"layers.{layer}",
        discard_fraction=0.0,
        kept_bytes=0,
        recompute_ms=0.0,
        decisions=() if budget is not None else (*products, *sines),
        memory_budget=budget,
    )


def run(units: tuple[Unit, ...], backend: Any, count: int, settings: Settings | None = None) -> tuple[list[int], Any]:
    """Of each layer the bytes of activations that it saves; then output and gradients."""
    torch.manual_seed(0)
    model, x = Model(count), torch.randn(TOKENS, WIDTH)
    apply(model, Plan(made_for=MADE_FOR, units=units, settings=settings or Settings()))
    saved: list[int] = []
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[-1] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in model.layers:
            saved.append(0)
            x = layer(x)
    x.sum().backward()
    return saved, [x.detach(), *(p.grad for p in model.parameters())]


class Counting:
    """A compiler that counts the graphs which it is given."""

    def __init__(self, backend: str) -> None:
        self._backend: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """The compiled graph."""
        self.graphs += 1
        return self._backend(graph, inputs)


@pytest.mark.parametrize(
    ("backend", "kept"),
    [
        ("aot_eager_decomp_partition", [{0, 1, 2}, {0, 1}, set(), {0, 1}]),
        ("inductor", [{0, 1}]),  # a graph takes the C++ compiler seconds
    ],
)
def test_each_layer_saves_what_its_policy_keeps(backend: str, kept: list[set[int]]) -> None:
    """Layers that keep all products, two, or none save as many rows beside their input; equal policies have one graph.
    The numbers are those of the model that is not compiled.
    """
    compiler = Counting(backend)
    saved, found = run(tuple(unit(i, keep) for i, keep in enumerate(kept)), compiler, len(kept))
    assert saved == [ROW * (1 + len(keep)) for keep in kept]
    assert compiler.graphs == len(set(map(frozenset, kept)))
    plain = run((), "eager", len(kept))[1]
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_are_bit_equal_where_the_compilers_own_are() -> None:
    """aot_eager runs PyTorch's operators one by one: no bit differs from the model that is neither planned nor compiled."""
    kept = [{0, 1, 2}, {1}, set()]
    found = run(tuple(unit(i, keep) for i, keep in enumerate(kept)), "aot_eager", len(kept))[1]
    for a, b in zip(found, run((), "eager", len(kept))[1], strict=True):
        assert torch.equal(a, b)


def test_more_policies_than_dynamo_compiles_for_one_code() -> None:
    """Twelve layers with policies of their own are twelve graphs, though Dynamo stops after eight of one code."""
    assert torch._dynamo.config.recompile_limit == 8
    policies = [unit(i, {j for j in range(PRODUCTS) if i >> j & 1}) for i in range(8)]
    budgets = [unit(8 + i, budget=budget) for i, budget in enumerate((0.0, 0.3, 0.6, 1.0))]
    compiler = Counting("aot_eager_decomp_partition")
    saved, _ = run((*policies, *budgets), compiler, 12)
    assert compiler.graphs == Plan(made_for=MADE_FOR, units=(*policies, *budgets)).graphs == 12
    assert saved[:8] == [ROW * (1 + i.bit_count()) for i in range(8)]


def test_budgets_of_layers() -> None:
    """A layer's budget holds for that layer: all is recomputed at 0, and what is saved rises with the budget to 1."""
    saved, _ = run(tuple(unit(i, budget=b) for i, b in enumerate((0.0, 0.5, 1.0))), "aot_eager_decomp_partition", 3)
    assert saved[0] == ROW < saved[1] < saved[2] == run((), "aot_eager_decomp_partition", 1)[0][0]


def test_the_budget_of_a_job() -> None:
    """A plan's budget for all that is compiled is the partitioner's own setting."""
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        saved, _ = run((), "aot_eager_decomp_partition", 2, Settings(memory_budget=0.0))
    assert saved == [ROW, ROW]


def test_a_unit_with_a_budget_that_is_not_compiled() -> None:
    """It is refused by name: only the compiler can obey."""
    model = apply(Model(1), Plan(made_for=MADE_FOR, units=(unit(0, budget=0.45),)))  # no other test compiles it
    with pytest.raises(PlanError, match=r"leaves layers\.0 to the compiler, but the module is not compiled"):
        model(torch.randn(TOKENS, WIDTH))


class Picky(Block):
    """Refuses other widths."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        if x.shape[-1] != WIDTH:
            raise ValueError("another width")
        return super().forward(x)


@pytest.mark.parametrize("reason", ["copy", "error", "shapes"])
def test_a_unit_with_a_budget_that_is_not_compiled_any_more(reason: str) -> None:
    """Dynamo has given it up, or it is a copy: it recomputes all, with one warning and the gradients of eager code."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"layers": nn.ModuleList([Picky()])})
    model = apply(copy.deepcopy(plain), Plan(made_for=MADE_FOR, units=(unit(0, budget=1.0),)))
    layer, x = model.get_submodule("layers.0"), torch.randn(TOKENS, WIDTH)
    layer.compile(backend="aot_eager", dynamic=False)
    layer(x)
    if reason == "copy":
        layer = copy.deepcopy(layer)
    with (
        torch._dynamo.config.patch(recompile_limit=2 if reason == "error" else 1),
        pytest.warns(PlanMismatchWarning, match="is not compiled now"),
    ):
        if reason == "error":
            with pytest.raises(ValueError, match="another width"):
                layer(torch.randn(TOKENS, WIDTH - 1))
        for each in (layer, plain.get_submodule("layers.0")):
            each(x[:-1] if reason == "shapes" else x).square().sum().backward()
    for found, wanted in zip(layer.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert torch.equal(found.grad, wanted.grad)


def test_a_unit_with_a_budget_that_breaks_its_graph() -> None:
    """PyTorch takes a budget for whole graphs only: one line says so."""

    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = nn.ModuleDict({"layers": nn.ModuleList([Broken()])})
    apply(model, Plan(made_for=MADE_FOR, units=(unit(0, budget=0.5),)))
    layer: nn.Module = model["layers"][0]  # type: ignore[index]
    layer.compile(backend="aot_eager_decomp_partition")
    with pytest.raises(
        PlanError, match=r"gives layers\.0 a memory budget of its own, but the module cannot be compiled in one piece"
    ):
        layer(torch.randn(TOKENS, WIDTH))


@pytest.mark.parametrize("budgets", [(0.3, 0.6), (0.3, 0.3), (0.3, None)])
def test_units_with_budgets_in_a_model_that_is_compiled_as_a_whole(budgets: tuple[float | None, ...]) -> None:
    """Two budgets, or one beside other code in the graph: one line says so, and what to do. One for a whole graph is taken."""
    units = tuple(unit(i, budget=budget) for i, budget in enumerate(budgets) if budget is not None)
    model = torch.compile(apply(Model(2), Plan(made_for=MADE_FOR, units=units)), backend="aot_eager_decomp_partition")
    x = torch.randn(TOKENS, WIDTH)
    if budgets[0] == budgets[1]:
        model(x)
    else:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
            model(x)
        assert isinstance(caught.value.inner_exception, PlanError)
        said = str(caught.value.inner_exception)
        assert re.match(
            r"modules have memory budgets of their own \(layers\.[01] for one\), but the compiler has more than", said
        )
        assert "compile each of them by itself (module.compile())" in said


def test_a_unit_that_makes_inference_tensors() -> None:
    """Compiled code under a plan may make them, whatever is kept; gradients are those without a plan."""

    class Inferring(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                scale = torch.ones(WIDTH) * 2
            return super().forward(x * (torch.ones(WIDTH) * scale.clone()))

    def gradients(*units: Unit) -> list[Any]:
        torch.manual_seed(0)
        model, x = nn.ModuleDict({"layers": nn.ModuleList([Inferring()])}), torch.randn(TOKENS, WIDTH)
        apply(model, Plan(made_for=MADE_FOR, units=units))
        layer: nn.Module = model["layers"][0]  # type: ignore[index]
        layer.compile(backend="aot_eager")
        layer(x).sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(), gradients(unit(0, {0}))))


class Late(Block):
    """Returns a generator, which computes when it is asked."""

    def forward(self, x: Tensor) -> Any:
        """With the product, from which that begins."""
        h = super().forward(x)
        return (x + t.sin() for t in (h,))


@pytest.mark.parametrize("compiled", ["layers", "model"])
def test_a_unit_that_returns_a_generator(compiled: str) -> None:
    """Dynamo cannot run the generator outside of what is checkpointed: the unit runs uncompiled, with the same gradients."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Late(), Late()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = next(layer(x))
            return x

    def gradients(*units: Unit) -> list[Any]:
        torch.manual_seed(0)
        model = apply(Net(), Plan(made_for=MADE_FOR, units=units))
        for part in (model,) if compiled == "model" else model.layers:
            part.compile(backend="aot_eager")
        model(torch.randn(TOKENS, WIDTH)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    for kept in (set(), {0, 1}):
        assert all(map(torch.equal, gradients(unit(0, kept), unit(1, kept)), plain))


def test_copies_keep_their_policies() -> None:
    """A deep copy of a planned model is compiled as the original is: of the same classes, one for each policy."""
    model = apply(Model(3), Plan(made_for=MADE_FOR, units=(unit(0, {0}), unit(1, set()), unit(2, {0}))))
    classes = [type(layer) for layer in model.layers]
    assert classes[0] is classes[2] is not classes[1]
    assert [type(layer) for layer in copy.deepcopy(model).layers] == classes


class Watching(Observer):
    """Remembers what the compiler traces."""

    def __init__(self) -> None:
        self.traced: dict[str, list[TracedOperator]] = {}

    def traces(self, fqn: str) -> list[TracedOperator]:
        """A unit is traced, perhaps once more."""
        self.traced[fqn] = []
        return self.traced[fqn]


def test_what_the_compiler_traces_is_reported() -> None:
    """The operators of the unit that is compiled first for each policy, with their results; views are none."""
    watching = Watching()
    before, observer[0] = observer[0], watching
    try:
        run((unit(0, {1}), unit(1, {0}), unit(2, {0})), "aot_eager_decomp_partition", 3)
    finally:
        observer[0] = before
    row = (((TOKENS, WIDTH), "float32"),)
    assert watching.traced == dict.fromkeys(
        ("layers.0", "layers.1"), [("aten.mm.default", row), ("aten.sin.default", row)] * PRODUCTS
    )


def test_a_budget_for_all_in_a_process_that_has_compiled_nothing() -> None:
    """The partitioner's settings are there before anything has imported the compiler."""
    program = """
import torch
from autosac.integrations.apply import PlanMismatchWarning, apply
from autosac.plans import Plan, Settings
from plans import MADE_FOR
apply(torch.nn.Linear(1, 1), Plan(made_for=MADE_FOR, units=(), settings=Settings(memory_budget=0.25)))
print(torch._functorch.config.activation_memory_budget)
"""
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0.25"
