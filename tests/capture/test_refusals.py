"""Types and shapes that kernels refuse: the errors against those of real operators on the CPU, and of a simulated step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autosac.capture.device.refusals import refuse
from autosac.errors import CaptureError

aten = torch.ops.aten
WIDE, NARROW = torch.ones(8, 8), torch.ones(8, 8, dtype=torch.bfloat16)
ROW, PLACES = torch.zeros(8, dtype=torch.int64), torch.ones(1, 8, 8, 2, dtype=torch.bfloat16)
SAME_AS_THE_CPU: dict[Any, tuple[Any, ...]] = {
    aten.addmm.default: (WIDE[0], NARROW, NARROW),
    aten.mv.default: (WIDE, NARROW[0]),
    aten.index_put.default: (WIDE, (ROW,), NARROW),
    aten.index_add.default: (WIDE, 0, ROW, NARROW),
    aten.index_copy.default: (WIDE, 0, ROW, NARROW),
    aten.index_add_.default: (WIDE.clone(), 0, ROW, torch.ones(8, 5)),
    aten.index_put_.default: (WIDE.clone(), (ROW,), torch.ones(7, 8)),
    aten.nll_loss_forward.default: (WIDE, ROW.int(), None, 1, -100),
    aten.binary_cross_entropy.default: (WIDE, NARROW),
    aten.grid_sampler_2d.default: (WIDE[None, None], PLACES, 0, 0, False),
    aten.scaled_dot_product_attention.default: (NARROW[None, None], WIDE[None, None], WIDE[None, None]),
}
CUDA: dict[Any, tuple[tuple[Any, ...], str]] = {
    aten.mm.default: ((WIDE, NARROW), "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"),
    aten.convolution.default: (
        (WIDE[None], NARROW[:, :, None], None, [1], [0], [1], False, [0], 1),
        "Input type (float) and weight type (c10::BFloat16) should be the same",
    ),
    aten.native_layer_norm.default: (
        (WIDE, [8], NARROW[0], None, 1e-5),
        "expected scalar type Float but found BFloat16",
    ),
}


@pytest.mark.parametrize("func", SAME_AS_THE_CPU, ids=str)
def test_the_error_is_that_of_the_operator(func: Any) -> None:
    """Word for word as the real operator on the CPU."""
    arguments = SAME_AS_THE_CPU[func]
    with pytest.raises(RuntimeError) as real:
        func(*arguments)
    with pytest.raises(RuntimeError) as ours:
        refuse(func, arguments, {}, True)
    assert str(ours.value) == str(real.value).splitlines()[0]


@pytest.mark.parametrize("func", CUDA, ids=str)
def test_what_cuda_says(func: Any) -> None:
    """Its own words, where the CPU has others; equal types pass."""
    arguments, words = CUDA[func]
    with pytest.raises(RuntimeError) as ours:
        refuse(func, arguments, {}, True)
    assert str(ours.value) == words
    refuse(func, tuple(x.float() if isinstance(x, torch.Tensor) else x for x in arguments), {}, True)


def test_norms_on_the_cpu_take_parameters_in_float32() -> None:
    """So the real one does."""
    arguments = (NARROW, [8], WIDE[0], WIDE[0], 1e-5)
    aten.native_layer_norm.default(*arguments)
    refuse(aten.native_layer_norm.default, arguments, {}, False)
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        refuse(aten.native_layer_norm.default, arguments, {}, True)


def _make_step(run: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> Any:
    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
        model = nn.Linear(8, 8, device=device, dtype=torch.bfloat16)

        def step() -> None:
            run(model, torch.randn(4, 8, device=device)).float().sum().backward()

        return model, step

    return make_step


def test_a_step_that_mixes_types_ends_as_on_a_gpu(capture: Any) -> None:
    """A linear layer in bfloat16 with an input in float32; under autocast the step runs."""
    with pytest.raises(CaptureError, match="mat1 and mat2 must have the same dtype, but got Float and BFloat16"):
        capture(_make_step(lambda model, x: model(x)))

    def cast(model: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return F.layer_norm(model(x), (8,), model.bias)

    reading = capture(_make_step(cast))
    assert any("addmm" in reading.signature(op).name for op in reading.operators())
