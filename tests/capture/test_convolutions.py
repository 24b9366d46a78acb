"""Layouts of convolutions' results, as cuDNN returns them."""

from __future__ import annotations

import pytest
import torch

from autosac.capture.jobs.eager import EagerRequest, capture_eager


@pytest.mark.parametrize(
    ("dtype", "inputs", "weights", "stride"),
    [
        (torch.float32, torch.contiguous_format, torch.contiguous_format, (1024, 256, 16, 1)),
        (torch.float32, torch.channels_last, torch.contiguous_format, (1024, 1, 64, 4)),
        (torch.bfloat16, torch.contiguous_format, torch.channels_last, (1024, 1, 64, 4)),
        (torch.float64, torch.channels_last, torch.channels_last, (1024, 256, 16, 1)),
    ],
)
def test_a_convolution_returns_cudnns_layout(
    dtype: torch.dtype, inputs: torch.memory_format, weights: torch.memory_format, stride: tuple[int, ...]
) -> None:
    """Two images of 16 x 16 to four channels: channels last where the input or the weight is, but not in float64."""

    def make_step(device: torch.device) -> object:
        x = torch.randn(2, 8, 16, 16, device=device, dtype=dtype).to(memory_format=inputs)
        model = torch.nn.Conv2d(8, 4, 3, padding=1, device=device, dtype=dtype).to(memory_format=weights)

        def step() -> None:
            model(x).sum().backward()

        return model, step

    trace = capture_eager(make_step, EagerRequest())
    (signature,) = (each for each in trace.signatures if each.name == "aten.convolution.default")
    assert (signature.outputs[0].shape, signature.outputs[0].stride) == ((2, 4, 16, 16), stride)
