"""Power, clock and speed of operators that last: ``python -m benchmarks.gpu.power --out DIR`` on a CUDA device.

`autosac.estimator.power` says which clock a mix of matrix products and memory traffic leaves under a GPU's power. Here each of
some mixes runs for a second or so after a rest. Every twentieth of a second or so, the time of one round, the energy
counter, the clock and the temperature are read; the queue is never empty meanwhile. Writes ``power.json``: for every mix the
first time of a round (what a short benchmark sees), the last ones, and watts and clock while they ran. ``--seconds`` is the
length of one. Needs nvidia-ml-py. Nothing of the GPU is set.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.common import write_result
from benchmarks.gpu.products import product as scaled_product

_BLOCK_MS, _REST_S = 50.0, 0.35
_MIB = 2**20
Run = Callable[[], Any]


def product(
    m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, transposed: bool = True
) -> Run:
    """A matrix product of random numbers; `scale` 0 multiplies zeros."""
    a = (scale * torch.randn(m, k, device="cuda")).to(dtype)
    b = torch.randn(n, k, device="cuda").to(dtype).t() if transposed else torch.randn(k, n, device="cuda").to(dtype)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def scaled(kind: str, m: int, k: int, n: int, *, fast: bool = True) -> Run:
    """A float8 product of `benchmarks.gpu.products`."""
    made: Run = scaled_product(kind, m, k, n, fast=fast)(torch.device("cuda"))
    return made


def attention(*, backward: bool, backend: Any, length: int = 8192, heads: int = 32, size: int = 128) -> Run:
    """Causal attention of one sequence."""
    from torch.nn.attention import sdpa_kernel

    q, k, v = (
        torch.randn(1, heads, length, size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not backward:
        return lambda: forward().detach()
    out = forward()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def copy(mib: int = 512) -> Run:
    """Reads and writes so much."""
    source = torch.randn(mib * _MIB // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def silu(mib: int = 512) -> Run:
    """An elementwise function of so much."""
    source = torch.randn(mib * _MIB // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return lambda: torch.ops.aten.silu.out(source, out=target)


def rest(ms: float) -> Run:
    """The GPU waits."""
    return lambda: torch.cuda._sleep(int(ms * 1.7e6))


def mixes() -> Iterator[tuple[str, list[tuple[Run, int]]]]:
    """Names, and what one round runs how often."""
    from torch.nn.attention import SDPBackend

    up = (8192, 4096, 14336)
    for m, k, n in (
        (8192, 4096, 4096),
        up,
        (8192, 14336, 4096),
        (8192, 8192, 8192),
        (2048, 4096, 4096),
        (1024, 8192, 8192),
    ):
        yield f"bf16 {m} x {k} x {n}", [(product(m, k, n), 1)]
    yield "bf16 8192 x 4096 x 14336, NN", [(product(*up, transposed=False), 1)]
    yield "bf16 8192 x 4096 x 14336, small numbers", [(product(*up, scale=0.02), 1)]
    yield "bf16 8192 x 4096 x 14336, zeros", [(product(*up, scale=0.0), 1)]
    yield "fp16 8192 x 4096 x 14336", [(product(*up, dtype=torch.float16), 1)]
    yield "fp32 4096 x 4096 x 4096", [(product(4096, 4096, 4096, torch.float32), 1)]
    for m, k, n in (up, (8192, 8192, 8192), (8192, 4096, 4096), (8192, 8192, 1024)):
        for rowwise in (False, True):
            kind = f"float8 by {'row' if rowwise else 'tensor'}"
            yield f"{kind} {m} x {k} x {n}", [(scaled(kind, m, k, n), 1)]
    yield "float8 by tensor 8192 x 4096 x 14336, exact sums", [(scaled("float8 by tensor", *up, fast=False), 1)]
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        for backward in (False, True):
            yield (
                f"{name} attention{', backward' if backward else ''}",
                [(attention(backward=backward, backend=backend), 1)],
            )
    yield "copy", [(copy(), 1)]
    yield "silu", [(silu(), 1)]
    # A round of the product takes 1.4 ms or so, a copy 0.35.
    for times, copies in ((1, 1), (1, 3), (2, 1), (4, 1), (1, 8)):
        yield f"{times} bf16 products, {copies} copies", [(product(*up), times), (copy(), copies)]
        yield (
            f"{times} float8 products, {copies} copies",
            [(scaled("float8 by tensor", *up), times), (copy(), copies)],
        )
    yield "1 bf16 product, 1 silu", [(product(*up), 1), (silu(), 1)]
    for ms in (0.2, 0.5, 1.5):
        yield f"1 bf16 product, {ms} ms of rest", [(product(*up), 1), (rest(ms), 1)]


class Board:
    """What the GPU says of itself."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())

    def read(self) -> dict[str, float]:
        """Joules since the driver was loaded, MHz, degrees, and why the clock is what it is (NVML's bits)."""
        nvml, gpu = self._nvml, self._gpu
        return {
            "at_s": time.perf_counter(),
            "joules": self._asked(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3),
            "watts": self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            "mhz": self._asked(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "celsius": self._asked(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "reasons": self._asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
        }

    def _asked(self, question: Callable[[], float]) -> float:
        try:
            return question()
        except self._nvml.NVMLError:
            return -1.0  # not told

    def limits(self) -> dict[str, float]:
        """Watts and MHz that the GPU may reach."""
        nvml, gpu = self._nvml, self._gpu
        return {
            "watts": self._asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
            "most_mhz": self._asked(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        }


def _timed(rounds: Sequence[tuple[Run, int]], times: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        for run, repeats in rounds:
            for _ in range(repeats):
                run()
    last.record()
    return first, last


def sustain(rounds: Sequence[tuple[Run, int]], seconds: float, board: Board) -> dict[str, Any]:
    """Run rounds for so long after a rest."""
    torch.cuda.synchronize()
    time.sleep(_REST_S)
    for run, _ in rounds:
        run()
    first, last = _timed(rounds, 3)
    last.synchronize()
    short_ms = first.elapsed_time(last) / 3
    times = max(1, round(_BLOCK_MS / short_ms))
    blocks, readings = [_timed(rounds, times)], [board.read()]
    while readings[-1]["at_s"] - readings[0]["at_s"] < seconds:
        blocks.append(_timed(rounds, times))
        blocks[-2][1].synchronize()
        readings.append(board.read())
    torch.cuda.synchronize()
    block_ms = [first.elapsed_time(last) / times for first, last in blocks]
    half = len(readings) // 2
    late = readings[half:]
    watts = (late[-1]["joules"] - late[0]["joules"]) / max(late[-1]["at_s"] - late[0]["at_s"], 1e-9)
    return {
        "short_ms": short_ms,
        "sustained_ms": statistics.median(block_ms[half:]),
        "watts": watts,
        "board_watts": statistics.median(r["watts"] for r in late),
        "mhz": statistics.median(r["mhz"] for r in late),
        "celsius": late[-1]["celsius"],
        "reasons": sorted({int(r["reasons"]) for r in late}),
        "block_ms": [round(ms, 5) for ms in block_ms],
        "block_mhz": [r["mhz"] for r in readings],
        "block_joules": [round(r["joules"] - readings[0]["joules"], 2) for r in readings],
    }


def alone_ms(run: Run) -> float:
    """One run of a part, measured shortly: how a mix divides."""
    run()
    first, last = _timed([(run, 1)], 5)
    last.synchronize()
    return first.elapsed_time(last) / 5


def main() -> None:
    """Run all mixes, write after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--first", type=int, default=10**6, help="so many mixes only")
    parser.add_argument("--minutes", type=float, default=3.0)
    options = parser.parse_args()
    board, until = Board(), time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = [{"mix": "limits", **board.limits()}]
    for name, rounds in itertools.islice(mixes(), options.first):
        if time.monotonic() > until:
            break
        try:
            parts = [alone_ms(run) * repeats for run, repeats in rounds]
            rows.append({"mix": name, "parts_ms": parts, **sustain(rounds, options.seconds, board)})
        except RuntimeError as e:
            rows.append({"mix": name, "error": str(e)[:200]})
        shown = {k: v for k, v in rows[-1].items() if not k.startswith("block")}
        print(shown, flush=True)
        write_result(options.out / "power.json", "cuda", rows)
        del rounds
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
