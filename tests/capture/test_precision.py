"""TF32 from a job's own settings to the prices of its operators: an eager step, and a job of TorchTitan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.estimator import load_hardware, price
from autosac.titan.version import has_python_jobs
from autosac.trace import Op, Trace

H100 = load_hardware("h100-sxm-80gb")
JOB = ("--model.name", "llama3", "--model.flavor", "debugmodel", "--training.mixed_precision_param", "float32")
SIZES = ("--training.local_batch_size", "16", "--training.seq_len", "2048")


@pytest.mark.parametrize("allowed", [False, True])
def test_an_eager_step(allowed: bool) -> None:
    """What the step says of TF32, in whichever way, is in the trace and decides what its float32 product costs."""

    def make_step(device: torch.device) -> Any:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = not allowed
        x = torch.randn(4096, 4096, device=device)
        return lambda: x @ x

    trace = capture_eager(make_step, EagerRequest())
    assert trace.info.matmul_allows_tf32 is allowed and trace.info.cudnn_allows_tf32 is not allowed
    took_ms = price(trace, H100).event_ms.max()
    assert bool(took_ms < 2 * 4096**3 / 67e12 * 1e3) is allowed  # at the peak rate of plain float32


def products(trace: Trace) -> tuple[float, float]:
    """The floating-point operations of a step's products of matrices, and their time in ms."""
    flops = took_ms = 0.0
    for event, ms in zip(trace.events, price(trace, H100).event_ms, strict=True):
        if isinstance(event, Op) and trace.signatures[event.signature].name == "aten.mm.default":
            (m, k), (_, n) = (meta.shape for meta in trace.signatures[event.signature].inputs)
            flops, took_ms = flops + 2 * m * k * n, took_ms + float(ms)
    return flops, took_ms


@pytest.mark.skipif(has_python_jobs(), reason="the job is one of TorchTitan 0.2")
def test_a_job_of_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the job's own module says of TF32 makes its float32 products faster than plain float32 ever is."""
    monkeypatch.chdir(tmp_path)
    traces = {}
    with CaptureServer() as server:
        for precision in ("highest", "high"):
            (tmp_path / f"own_{precision}.py").write_text(
                f"import torch\ntorch.set_float32_matmul_precision({precision!r})\n"
            )
            overrides = (*JOB, *SIZES, "--experimental.custom_import", f"own_{precision}")
            wanted = TitanRequest(config_file=None, overrides=overrides, checkpointing="none", layers=1)
            traces[precision] = server.capture(wanted)
    assert [trace.info.matmul_allows_tf32 for trace in traces.values()] == [False, True]
    (flops, plain_ms), (same_flops, tf32_ms) = map(products, traces.values())
    assert flops == same_flops > 0
    assert tf32_ms < flops / 67e12 * 1e3 < plain_ms  # at the peak rate of plain float32
