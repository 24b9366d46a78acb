"""What signatures do not say enough for, to be called again: each ends with a line that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosac.estimator.calibration.calls import NotReplayable, build_call

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("mm", 2, "aten.mm is not an operator of PyTorch's dispatcher"),
        ("mm.default", 1, "a tensor that the operator needs is missing in the signature"),
        (
            "mm.default",
            3,
            "aten.mm.default: 1 of its tensors have no place in aten::mm(Tensor self, Tensor mat2) -> Tensor",
        ),
        ("transpose.int", 1, "aten.transpose.int: its argument dim0 is not in the signature"),
    ],
)
def test_calls_that_do_not_follow(
    op: Callable[..., Any], meta: Callable[..., Any], name: str, inputs: int, message: str
) -> None:
    """A name without overload, a tensor too few or too many, a number that has no default."""
    with pytest.raises(NotReplayable, match=f"^{re.escape(message)}$"):
        build_call(op(name, [meta((2, 2))] * inputs, [meta((2, 2))]), CPU)


def test_a_type_that_pytorch_does_not_have(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """It is named, beside PyTorch's version."""
    with pytest.raises(NotReplayable, match=f"^this PyTorch \\({re.escape(torch.__version__)}\\) has no type float5$"):
        build_call(op("relu.default", [meta((2, 2), "float5")], [meta((2, 2), "float5")]), CPU)


def test_what_may_be_left_out_has_its_default(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """Lists are empty and numbers those of the operator's own: the sum of all elements, in their type."""
    ones = torch.ones(2, 2)
    call = build_call(op("sum.dim_IntList", [meta((2, 2))], [meta(())], dim=(0, 1)), CPU)
    call.args[0].copy_(ones)
    assert call.run().item() == 4.0
    kept = build_call(op("sum.dim_IntList", [meta((2, 2))], [meta((1, 2))], dim=(0,), keepdim=True), CPU)
    assert kept.run().shape == (1, 2)
