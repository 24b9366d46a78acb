"""Memory budgets of PyTorch's partitioner, by real `torch.compile` on the CPU: gradients are those of eager code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config, partitioners
from torch.distributed import _functional_collectives
from torch.utils.checkpoint import checkpoint
from uncompiled import inductor

import autosac
from autosac.integrations.apply import apply
from autosac.integrations.partitioner import unrepeatable
from autosac.plans import Plan, Settings, Unit
from plans import MADE_FOR

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WIDTH, TOKENS = 16, 64


class Block(nn.Module):
    """Two products around something that a recomputation must not do again."""

    def __init__(self, between: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, WIDTH))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        result: Tensor = self.down(self.between(self, torch.nn.functional.gelu(self.up(x))))
        return x + result


def dropout(_: Block, x: Tensor) -> Tensor:
    """Half of it."""
    return nn.functional.dropout(x, 0.5)


@torch.library.custom_op("autosac_test::drawn", mutates_args=())
def _drawn(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


@_drawn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_drawn.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def custom(_: Block, x: Tensor) -> Tensor:
    """An operator of another library, which draws and does not say so."""
    return torch.sin(_drawn(x))


def depth(_: Block, x: Tensor) -> Tensor:
    """Stochastic depth."""
    return x * (torch.rand(TOKENS, 1) < 0.5)


def normalised(block: Block, x: Tensor) -> Tensor:
    """A scale that is read, and then changed."""
    y = (x * block.scale.exp()).tanh()
    block.scale.mul_(0.5)
    return y


def averaged(block: Block, x: Tensor) -> Tensor:
    """A moving average that is changed, and then read."""
    block.scale.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return (x * block.scale.sigmoid()).tanh()


def chosen(_: Block, x: Tensor) -> Tensor:
    """Branches, of which one draws random numbers."""
    result: Tensor = torch.cond(x.sum() > 0, lambda z: nn.functional.dropout(z.sin(), 0.5), lambda z: z.cos(), (x,))
    return result


def nested(_: Block, x: Tensor) -> Tensor:
    """Dropout that the model itself checkpoints: PyTorch restores its generator."""
    result: Tensor = checkpoint(lambda z: nn.functional.dropout(z.sin(), 0.5), x, use_reentrant=False)
    return result


def noisy(_: Block, x: Tensor) -> Tensor:
    """A gradient to which the backward adds noise, as private training does."""
    y = x.sin()
    y.register_hook(lambda gradient: gradient + torch.rand(()))
    return y


def gathered(_: Block, x: Tensor) -> Tensor:
    """The rows of all ranks, as under tensor parallelism."""
    rows: Tensor = _functional_collectives.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD)
    return rows.exp().tanh()


KINDS = (custom, dropout, depth, normalised, averaged, chosen, nested, noisy)


def gradients(kind: Callable[[Block, Tensor], Tensor], budget: float | None, **options: Any) -> list[Tensor]:
    """Of a compiled block under a plan with this budget for all; of one that is not compiled for None."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block, x = Block(kind), torch.randn(TOKENS, WIDTH)
    run: Callable[[Tensor], Tensor] = block
    if budget is not None:
        apply(block, Plan(made_for=MADE_FOR, units=(), settings=Settings(memory_budget=budget)))
        run = torch.compile(block, **options)
    with torch._functorch.config.patch(activation_memory_budget=budget or 0.0):
        (run(x) * torch.rand(TOKENS, 1)).square().sum().backward()  # the loss draws, between forward and backward
    return [p.grad for p in block.parameters() if p.grad is not None]


@pytest.mark.parametrize("budget", [0.0, 0.4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_eager_code(kind: Callable[[Block, Tensor], Tensor], budget: float) -> None:
    """To the bit. They were off by up to a factor of two where the partitioner drew again, or read a changed buffer."""
    found, wanted = gradients(kind, budget, backend="aot_eager"), gradients(kind, None)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [dropout, averaged], ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:a compiled graph saves")
def test_budgets_in_bytes(kind: Callable[[Block, Tensor], Tensor]) -> None:
    """Inductor under the smallest budget has the gradients that it has by itself."""
    wanted = gradients(kind, 1.0, backend=inductor())
    found = gradients(kind, 1.0, backend=inductor(autosac.compile_options(budget="1KiB")))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def saved_shapes(kind: Callable[[Block, Tensor], Tensor]) -> list[tuple[int, ...]]:
    """What the graph saves for its backward under a budget of 0, beside what exists anyway."""
    torch.manual_seed(0)
    block, shapes = Block(kind), list[tuple[int, ...]]()
    x = torch.randn(TOKENS, WIDTH)
    there = {t.untyped_storage().data_ptr() for t in (x, *block.parameters(), *block.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in there:
            shapes.append(tuple(tensor.shape))
        return tensor

    apply(block, Plan(made_for=MADE_FOR, units=(), settings=Settings(memory_budget=0.0)))
    with (
        torch._functorch.config.patch(activation_memory_budget=0.0),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        torch.compile(block, backend="aot_eager")(x)
    return shapes


def test_only_what_changes_is_saved() -> None:
    """Under a budget of 0: the random numbers, and what was made of the changed buffer; nothing of the products."""
    assert saved_shapes(depth) == [(TOKENS, 1)]
    assert saved_shapes(normalised) == [(WIDTH,)]


class Tables(nn.Module):
    """Factors whose types come from the default dtype: made by factories, of whole numbers, of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        factors = (torch.linspace(0, 1, WIDTH), torch.full((WIDTH,), 0.1), torch.arange(WIDTH) / 7, (x > 0) * 1.1)
        y = self.up(x)
        for factor in factors:
            y = torch.sin(y * torch.sin(factor.to(x.dtype)))
        return y


def tables_gradient(units: tuple[Unit, ...]) -> Tensor:
    """Of the weights, by a forward under float64 as the default dtype and a backward under float32."""
    torch.manual_seed(0)
    model = apply(nn.Sequential(Tables()), Plan(made_for=MADE_FOR, units=units, settings=Settings()))
    model.get_submodule("0").compile(backend="aot_eager")
    torch.set_default_dtype(torch.float64)
    try:
        out = model(torch.randn(TOKENS, WIDTH, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    return torch.autograd.grad(out.sum(), model.get_parameter("0.up.weight"))[0]


@pytest.mark.compiled_plan
def test_the_default_dtype_is_that_of_the_forward() -> None:
    """aot_eager computes tables of the default dtype again as the forward did."""
    unit = Unit(fqn="0", discard_fraction=1.0, kept_bytes=0, recompute_ms=0.0, decisions=())
    assert torch.equal(tables_gradient((unit,)), tables_gradient(()))


@pytest.mark.usefixtures("mesh")
def test_a_budget_of_zero_gathers_again() -> None:
    """PyTorch marks collectives as kept, but for this budget: what a layer gathers under tensor parallelism is large."""
    assert saved_shapes(gathered) == saved_shapes(lambda _, x: x.sin().exp().tanh())
    found, wanted = gradients(gathered, 0.0, backend="aot_eager"), gradients(gathered, None)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_attention_draws_only_with_dropout() -> None:
    """PyTorch marks it as random either way."""
    graph = torch.fx.Graph()
    x, gradient = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    plain = graph.call_function(attention, (x, x, x, 0.0))
    dropped = graph.call_function(attention, (x, x, x, 0.1))
    backward = graph.call_function(torch.ops.aten.mul.Tensor, (gradient, plain))
    backward = graph.call_function(torch.ops.aten.mul.Tensor, (backward, dropped))

    class Info:
        tangents_closure = required_bw_nodes = list(graph.nodes)[1:2] + list(graph.nodes)[-2:]

        @staticmethod
        def is_required_fw(node: torch.fx.Node) -> bool:
            return True

    assert unrepeatable(graph, Info, [x]) == [dropped]


def test_the_compilers_caches_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's graph under its own budget, with wrong gradients, is on the disk: a plan with that budget does not run it."""
    # The mode "lite" calls PyTorch's operators: no C++ is compiled.
    for name in ("choose_saved_values_set", "classify_nodes"):  # as before the process's first plan
        monkeypatch.setattr(partitioners, name, inspect.unwrap(getattr(partitioners, name)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def trained(own: float, plan: Plan | None) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        block, x = Block(dropout), torch.randn(TOKENS, WIDTH)
        settings = {"activation_memory_budget": own, "enable_autograd_cache": True}
        if hasattr(
            config, "unsafe_treat_script_objects_as_zero_size"
        ):  # plans set it: the caches' keys would differ by it
            settings["unsafe_treat_script_objects_as_zero_size"] = True
        with config.patch(settings):
            if plan is not None:
                apply(block, plan)
            torch.compile(block, mode="lite")(x).square().sum().backward()
        return [p.grad for p in block.parameters() if p.grad is not None]

    with torch.compiler.config.patch(cache_key_tag=""):
        without, own = trained(1.0, None), trained(0.4, None)
        assert len(list(tmp_path.glob("aotautograd/*"))) == 2
        planned = trained(1.0, Plan(made_for=MADE_FOR, units=(), settings=Settings(memory_budget=0.4)))
    assert not all(map(torch.equal, own, without))
    torch.testing.assert_close(planned, without, rtol=0, atol=0)
