"""Kernels that a program compiles from CUDA source."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.capture.patches.kernels import written_parameters

SOURCE = """
extern "C"
__launch_bounds__(256, 2)
__global__ void scaled(const float* __restrict__ x, float const* scale, float *out, int count)
{
  int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < count) out[i] = scale[0] * x[i];
}
"""


def test_what_a_kernel_may_write_to() -> None:
    """Pointers that are not to const; nobody knows of a kernel that the source lacks."""
    assert written_parameters(SOURCE, "scaled") == (2,)
    assert written_parameters(SOURCE, "other") is None


@pytest.mark.skipif(not hasattr(torch.cuda, "_compile_kernel"), reason="this torch compiles no CUDA sources")
def test_its_launches_are_recorded() -> None:
    """Each is an operator that reads and writes its tensors, in the step that launches it."""

    def make_step(device: torch.device) -> Any:
        kernel = torch.cuda._compile_kernel(SOURCE, "scaled")  # type: ignore[attr-defined]
        kernel.set_shared_memory_config(2**16)
        x, scale = torch.ones(1024, device=device), torch.ones(1, device=device)

        def step() -> None:
            out = torch.empty_like(x)
            kernel(grid=(4, 1, 1), block=(256, 1, 1), args=[x, scale, out, x.numel()])

        return step

    trace = capture_eager(make_step, EagerRequest())
    (launch,) = (op for _, op in trace.operators() if "scaled" in trace.signatures[op.signature].name)
    signature = trace.signatures[launch.signature]
    assert signature.name == "triton.scaled"
    assert [tensor.shape for tensor in signature.inputs] == [(1024,), (1,), (1024,)]
