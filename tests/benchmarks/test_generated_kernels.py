"""The comparison of generated kernels with a trace that names their tensors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from autosac.trace import Op, Phase, Signature, TensorMeta
from benchmarks.generated_kernels import compared, measured

NAME, OTHER = "triton_poi_fused_mul_0", "triton_red_fused_sum_1"


def _call(name: str, dims: list[list[int]], kinds: list[str]) -> dict[str, Any]:
    return {"cat": "cpu_op", "name": name, "args": {"Input Dims": [*dims, []], "Input type": [*kinds, "Scalar"]}}


def _kernel(name: str, us: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "dur": us}


@pytest.fixture
def times(tmp_path: Path) -> Any:
    """One kernel ran three times, another one with two kinds of tensors, a third one was not generated."""
    events = [
        _call(NAME, [[64, 8], [8]], ["c10::BFloat16", "float"]),
        _call(OTHER, [[64, 8]], ["float"]),
        _call(OTHER, [[64, 9]], ["float"]),
        _call("aten::mm", [[64, 8]], ["float"]),
        *(_kernel(NAME, us) for us in (3.0, 1.0, 2.0)),
        _kernel(OTHER, 5.0),
        _kernel("nvjet_gemm", 7.0),
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return measured(path)


def test_times_are_those_of_kernels_whose_tensors_are_known(times: Any) -> None:
    """A name that has had two kinds of tensors says nothing."""
    assert times == {("pointwise", (((8,), "float32"), ((64, 8), "bfloat16"))): [3.0, 1.0, 2.0]}


def test_a_kernel_with_the_same_tensors_is_compared(times: Any) -> None:
    """In any order of its tensors; the median counts; 2**30 instructions take 32 us, without them it takes its launch."""
    metas = (TensorMeta((8,), (1,), "float32"), TensorMeta((64, 8), (8, 1), "bfloat16"))
    signature = Signature(
        "triton.triton_poi_fused_add_7", metas, (), arguments=(("nbytes", 0), ("single", 2**30), ("double", 0))
    )

    class Capture:
        signatures = (signature,)

        def operators(self) -> Any:
            return [(0, Op(0, 0, 0, Phase.FORWARD, 0, (), ()))]

    (kernel,) = compared(times, Capture())  # type: ignore[arg-type]
    assert (kernel.launches, kernel.measured_us) == (3, 2.0)
    assert kernel.priced_us - kernel.bytes_us == pytest.approx(2**30 / 33.5e6)
