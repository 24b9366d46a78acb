"""Compiled units with flexible attention under plans. Real `torch.compile` on the CPU, without Inductor, which has no backward
of flexible attention there: AOTAutograd's graphs run as they are partitioned.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flexible

from autosac.integrations.apply import PlanMismatchWarning, apply
from autosac.plans import Decision, Plan, Unit
from plans import MADE_FOR

pytestmark = pytest.mark.usefixtures("fresh_compiler", "backward_on_the_cpu")
BATCH, HEADS, TOKENS, WIDTH = 2, 2, 32, 16
ROW = BATCH * TOKENS * HEADS * WIDTH * 4  # bytes of one activation
STATISTICS = BATCH * HEADS * TOKENS * 4  # the logarithm of each row's sum, in float32
PRODUCT, ATTENTION, NUMBER = "aten.mm.default", "flex_attention", "aten.new_zeros.default"


@pytest.fixture
def backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses gradients of flexible attention on the CPU, though the graph's operators have them."""
    monkeypatch.setattr(flexible, "_validate_device", lambda *_: None)


class Block(nn.Module):
    """Flexible attention of one projection with a bias of its own, between products."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width, width) / 8) for _ in range(2)])
        self.slopes = nn.Buffer(torch.rand(HEADS))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """The output."""
        shape = (BATCH, TOKENS, HEADS, WIDTH)
        heads = (x.view(-1, HEADS * WIDTH) @ self.weights[0]).view(shape).transpose(1, 2)

        def bias(score: Tensor, _: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score - self.slopes[head] * (row - column)

        mixed = flexible.flex_attention(heads, heads.sin(), heads.cos(), score_mod=bias, block_mask=mask)
        return (mixed.transpose(1, 2).reshape(-1, HEADS * WIDTH) @ self.weights[1]).view(x.shape)


def decisions(kept: set[tuple[str, int]]) -> tuple[Decision, ...]:
    """About the operators of a block as it is observed without compilation."""
    rows = [(PRODUCT, 0), (PRODUCT, 1), (ATTENTION, 0), ("aten.sin.default", 0), ("aten.cos.default", 0)]
    rows += [("aten.clone.default", i) for i in range(2)] + [("aten._unsafe_view.default", 0)]
    return tuple(Decision(op=op, occurrence=i, keep=(op, i) in kept, outputs=()) for op, i in rows)


def run(rows: tuple[Decision, ...] | None, backend: str) -> tuple[int, list[Tensor]]:
    """The bytes that a block saves beside parameters, masks and its input, and the gradients; None: no plan."""
    torch.manual_seed(0)
    block = Block()
    mask = flexible.create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device="cpu")
    if rows is not None:
        unit = Unit(fqn="block", discard_fraction=1.0, kept_bytes=0, recompute_ms=0.0, decisions=rows)
        apply(nn.ModuleDict({"block": block}), Plan(made_for=MADE_FOR, units=(unit,)))
    x = torch.randn(BATCH, TOKENS, HEADS * WIDTH, requires_grad=True)
    block.compile(backend=backend, fullgraph=True)
    outside = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers(), x)}
    outside |= {t.untyped_storage().data_ptr() for t in mask.as_tuple() if isinstance(t, Tensor)}
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 0 if tensor.untyped_storage().data_ptr() in outside else tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, mask)
    out.sum().backward()
    assert x.grad is not None
    return saved, [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("kept", "nbytes"),
    [
        (set(), 0),
        ({(ATTENTION, 0)}, ROW + STATISTICS),
        ({(PRODUCT, 0)}, ROW),
        ({(ATTENTION, 0), (PRODUCT, 0)}, 2 * ROW + STATISTICS),
    ],
    ids=["nothing", "attention", "a product", "both"],
)
def test_a_block_saves_what_its_policy_keeps(kept: set[tuple[str, int]], nbytes: int) -> None:
    """Attention's result with its statistics is kept or recomputed as planned, with no warning: the numbers and the bias that
    its tracing tries are not the block's. No bit of a gradient differs from the model without a plan.
    """
    backend = "aot_eager_decomp_partition"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanMismatchWarning)
        saved, found = run(decisions(kept), backend)
    assert saved == nbytes
    for a, b in zip(found, run(None, backend)[1], strict=True):
        assert torch.equal(a, b)


def test_a_unit_without_decisions_is_recomputed_as_a_whole() -> None:
    """There is nothing that it does not follow, so no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanMismatchWarning)
        assert run((), "aot_eager_decomp_partition")[0] == 0


def test_what_the_plan_does_not_know_is_recomputed_with_a_warning() -> None:
    """A plan without attention's operator, by the name that compiled code has for it."""
    rows = tuple(row for row in decisions({(PRODUCT, 0)}) if row.op != ATTENTION)
    with pytest.warns(PlanMismatchWarning, match=r"more calls of flex_attention than the plan's 0"):
        assert run(rows, "aot_eager_decomp_partition")[0] == ROW


def test_numbers_that_the_plan_decides_on_count() -> None:
    """Decisions on numbers are about calls in order, those of the tracing among them; that takes no memory either way."""
    made = tuple(Decision(op=NUMBER, occurrence=i, keep=False, outputs=(((), "float32"),)) for i in range(4))
    with pytest.warns(PlanMismatchWarning, match=r"more calls of aten.new_zeros.default than the plan's 4"):
        assert run((*decisions({(ATTENTION, 0)}), *made), "aot_eager_decomp_partition")[0] == ROW + STATISTICS
