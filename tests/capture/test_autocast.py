"""Autocast on the simulated device casts what CUDA's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

Capture = Callable[..., Any]


def make_cast(device: torch.device) -> Any:
    """Operators of every autocast list, with arguments in half precision, single and double."""
    half = torch.zeros(4, 4, device=device, dtype=torch.bfloat16)
    single, double = torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device, dtype=torch.float64)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            single @ single
            torch.exp(half)
            torch.sum(half, 0)
            torch.sum(double, 0)
            torch.addcmul(half, half, single)
            torch.ops.aten.norm.Scalar(half)
            torch.ops.aten.norm.ScalarOpt_dim(half, 2, [0])

    return step


def test_autocast_rules(capture: Capture) -> None:
    """Each list casts as CUDA's autocast does; doubles are left alone."""
    reading = capture(make_cast)
    found = [
        (name, *(meta.dtype for meta in reading.signature(operator).outputs))
        for (_, _, name), operator in zip(reading.placed(), reading.operators(), strict=True)
    ]
    cast, up = ("_to_copy", "bfloat16"), ("_to_copy", "float32")
    norms = [entry for entry in found[10:] if entry != up]
    assert found[:10] == [
        cast,
        cast,
        ("mm", "bfloat16"),
        up,
        ("exp", "float32"),
        ("sum", "float32"),
        ("sum", "float64"),
        up,
        up,
        ("addcmul", "float32"),
    ]
    assert {dtype for _, dtype in norms} == {"float32"}


def test_unsafe_loss_is_refused(capture: Capture) -> None:
    """binary_cross_entropy raises under autocast, as on CUDA."""

    def make_step(device: torch.device) -> Any:
        x = torch.zeros(4, device=device)

        def step() -> None:
            with torch.autocast(device.type):
                F.binary_cross_entropy(x, x)

        return step

    with pytest.raises(Exception, match="unsafe to autocast"):
        capture(make_step)


def make_flexible(device: torch.device) -> Any:
    """Compiled flexible attention of one projection, under autocast."""
    projection = nn.Linear(16, 16, bias=False, device=device)
    x = torch.zeros(1, 2, 128, 16, device=device)
    attend = torch.compile(flex_attention)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            attend(x, projection(x), x.relu()).float().sum().backward()
        projection.weight.grad = None

    return projection, step


def test_flexible_attention_under_autocast(capture: Capture) -> None:
    """All three operands are cast, as CUDA's rule does it: TorchTitan's jobs on one GPU run under autocast."""
    trace = capture(make_flexible).trace
    (attention,) = (op for _, op in trace.operators() if trace.signatures[op.signature].name == "flex_attention")
    assert [meta.dtype for meta in trace.signatures[attention.signature].inputs[:3]] == ["bfloat16"] * 3
