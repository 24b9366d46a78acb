"""The instructions that are counted of a generated kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosac.capture.compiler.arithmetic import Instructions, arithmetic
from autosac.capture.jobs.eager import EagerRequest, capture_eager

ROWS, WIDTH = 64, 256
FLAT = """
@triton.jit
def Placeholder.KERNEL_NAME(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x2 = xindex
    x1 = xindex // 256
    tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + (x1), None)
    tmp2 = tmp1.to(tl.float64)
    tmp3 = tl.full([1], 448.0, tl.float64)
    tmp4 = (tmp3 / tmp2)
    tmp5 = tmp4.to(tl.float32)
    tmp6 = libdevice.exp2(tmp5)
    tmp7 = tmp0 * tmp6
    tmp8 = tmp7.to(tl.bfloat16)
    tl.store(out_ptr0 + (x2), tmp8, None)
"""
ROWWISE = """
@triton_heuristics.reduction(size_hints={}, reduction_hint=ReductionHint.%s)
@triton.jit
def Placeholder.KERNEL_NAME(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    x0 = xindex
    _tmp4 = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 256*x0), None)
        tmp1 = tl.load(in_ptr1 + (r0_1), None)
        tmp2 = tl_math.log(tmp1)
        tmp3 = tmp0 * tmp2
        tmp5 = _tmp4 + tmp3
        _tmp4 = tl.where(r0_mask, tmp5, _tmp4)
    tmp4 = tl.sum(_tmp4, 1)[:, None]
    tmp6 = (tmp4 / 256.0)
    tl.store(out_ptr0 + (x0), tmp6, None)
"""


def test_a_kernel_that_does_not_walk_rows_divides_for_each_element() -> None:
    """Two loads, a store, exp2, a product, a rounding to 16 bits and what a double division takes in single precision: 18
    instructions an element; 12 in double precision; exp2, the division and two conversions on the special units.
    """
    assert arithmetic(FLAT, {"x": ROWS * WIDTH}) == Instructions(18 * ROWS * WIDTH, 4 * ROWS * WIDTH, 12 * ROWS * WIDTH)


@pytest.mark.parametrize(("hint", "blocks"), [("INNER", ROWS), ("DEFAULT", ROWS // 8)])
def test_what_is_the_same_for_all_rows_runs_once_for_each_block_of_them(hint: str, blocks: int) -> None:
    """A row at a time, or eight: the column's load and logarithm take 10 instructions and a special one. An element's load,
    product, sum and choice take 5, a row's division and store 10 and a special one.
    """
    found = arithmetic(ROWWISE % hint, {"x": ROWS, "r0_": WIDTH})
    assert found == Instructions(5 * ROWS * WIDTH + 10 * blocks * WIDTH + 10 * ROWS, blocks * WIDTH + ROWS, 0)


ADDING = """
def triton_poi_fused_scatter_add(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x0 = (xindex % 256)
    x1 = xindex // 256
    x2 = xindex
    tmp0 = tl.load(in_ptr0 + (x1), None)
    tmp1 = tl.load(in_ptr1 + (x2), None)
    tl.atomic_add(out_ptr0 + (x0 + 256*tmp0), tmp1, None, sem='relaxed')
"""


def test_additions_that_others_make_too_are_counted_apart() -> None:
    """Each element is added to a place that an index says: one atomic addition."""
    assert arithmetic(ADDING, {"x": ROWS * WIDTH}).atomic == ROWS * WIDTH


def _make(device: torch.device) -> tuple[nn.Module, Any]:
    @torch.compile(fullgraph=True)
    def scaled(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return x * (448.0 / largest.to(torch.float64)).to(torch.float32)

    def step() -> None:
        scaled(torch.ones(ROWS, WIDTH, device=device), torch.ones(ROWS, 1, device=device))

    return nn.Module(), step


def test_inductor_divides_for_each_element() -> None:
    """It fuses a row's scale into the product and so divides 64 x 256 times, not 64 times; other kernels have no doubles."""
    pytest.importorskip("triton")
    trace = capture_eager(_make, EagerRequest())
    found = [dict(trace.signatures[op.signature].arguments) for _, op in trace.operators()]
    assert [work["double"] for work in found if work.get("double")] == [13 * ROWS * WIDTH]  # 448 times a reciprocal
