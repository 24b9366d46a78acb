"""Float8 linear layers, forward and backward: ``python -m benchmarks.float8_linears [--casts | --shards | --shape ...]``.

torchao's documentation has a table of how much faster a layer norm, a linear layer and a sigmoid are with row-wise scaled
float8 than in bf16, compiled, by the sizes of the product: the sum of all kernels' times on an H100 (pytorch/ao, fdddb2cfa,
``docs/static/fp8-rowwise-perf.png``, PyTorch 2.8). The same module is simulated here, in both, for some of these sizes.
Nothing was fitted to them. Needs torchao.

``--casts``: a linear layer of 4,096 x 4,096 with one scale for a tensor and a squared loss, eager and compiled. torchao's
float8nocompile (pytorch/ao, pull request 1459 of December 2024) published the sum of the kernels' times on an H100, by rows
of the input. The layer casts as it did then (``torchtitan_published/float8.py``).

``--shards``: linear layers of Llama 70B as tensor parallelism of degree 8 leaves them, row-wise scaled, and the sum as loss:
pytorch/ao, pull request 2185 of May 2025, which published both times on an H100 (compiled, fast accumulation).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from typing import Any

import torch
from torch import nn

import autosac
from autosac.errors import UsageError
from autosac.estimator import price
from autosac.estimator.hardware import load_hardware
from autosac.trace import Op
from benchmarks.ending import exit_code
from benchmarks.torchtitan_published.former_products import models_of
from benchmarks.torchtitan_published.inductor import reorder_loops

_GPU = "h100-sxm-96gb-meta"
# Rows, width of the input, width of the output: speed in float8, relative to bf16.
_PUBLISHED = {
    (4096, 4096, 4096): 0.84,
    (8192, 4096, 1024): 0.52,
    (8192, 4096, 4096): 1.00,
    (8192, 4096, 16384): 1.17,
    (8192, 16384, 4096): 1.03,
    (16384, 1024, 8192): 0.86,
    (32768, 4096, 4096): 1.04,
    (8192, 8192, 8192): 1.20,
    (32768, 8192, 8192): 1.41,
    (8192, 16384, 16384): 1.37,
    (16384, 16384, 16384): 1.42,
}
# Rows: microseconds of all kernels, eager and compiled.
_CASTS = {
    16: (649.3, 409.5),
    256: (684.3, 421.2),
    4096: (1827.7, 1066.8),
    65536: (22343.4, 12675.7),
}
# Rows, width of the input, width of the output: milliseconds in bf16 and in float8.
_SHARDS = {
    (16384, 8192, 1280): (1.954, 1.757),
    (16384, 1024, 8192): (1.701, 1.193),
    (16384, 8192, 7168): (9.871, 5.707),
    (16384, 3584, 8192): (5.192, 3.034),
}
_PUBLISHED_MADE, _CASTS_MADE, _SHARDS_MADE = "2025-08", "2024-12", "2025-05"
_WIDTH = 4096
_LARGE = 8192  # products take most of the time


class Layer(nn.Module):
    """What torchao's `float8_roofline.py` measures."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width, elementwise_affine=False)
        self.fc = nn.Linear(width, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm, product, sigmoid."""
        return torch.sigmoid(self.fc(self.ln(x)))


def make_step(device: torch.device, *, shape: tuple[int, int, int], float8: bool) -> Any:
    """A forward and a backward, compiled."""
    rows, width, out = shape
    with device:
        model: nn.Module = Layer(width, out).to(torch.bfloat16)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
    compiled = torch.compile(model)
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    gradient = torch.empty(rows, out, dtype=torch.bfloat16, device=device)

    def step() -> None:
        compiled(x).backward(gradient)
        x.grad = None
        model.zero_grad()

    return model, step


def make_shard_step(device: torch.device, *, shape: tuple[int, int, int], float8: bool) -> Any:
    """What torchao's `bench_linear_float8.py` measures."""
    rows, width, out = shape
    with device:
        model: nn.Module = nn.Sequential(nn.Linear(width, out, bias=False)).to(torch.bfloat16)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
    compiled = torch.compile(lambda x: model(x).sum())  # so that no gradient of ones is copied to memory
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=device, requires_grad=True)

    def step() -> None:
        compiled(x).backward()
        x.grad = None
        model.zero_grad()

    return model, step


def make_cast_step(device: torch.device, *, rows: int, compiled: bool) -> Any:
    """What torchao's benchmark of float8nocompile measures."""
    from torchao.float8 import convert_to_float8_training

    from benchmarks.torchtitan_published import float8

    with device:
        layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False))
    model = convert_to_float8_training(layers)
    x = torch.empty(rows, _WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    forward = torch.compile(model, fullgraph=True) if compiled else float8.put_back(model, float8.Once)

    def step() -> None:
        out = forward(x)
        nn.functional.mse_loss(out, torch.zeros_like(out)).backward()

    return model, step


def kernels_ms(step: Any, made: str) -> float:
    """The sum of the kernels' times, with the float8 products of the month `made` and Inductor's fusions of that year."""
    reorder_loops(False)
    simulation = autosac.simulate(step, gpu=_GPU)
    trace, hardware = simulation.trace, load_hardware(_GPU)
    prices = price(trace, hardware, models=models_of(made, trace.info, hardware))
    pairs = zip(trace.events, prices.event_ms, strict=True)
    return float(sum(ms for event, ms in pairs if type(event) is Op))


def run_casts() -> None:
    """Simulate the layers of `_CASTS` and print them."""
    print("rows of the input            simulated (us)   published    error", flush=True)
    for way in (0, 1):
        for rows, published in _CASTS.items():
            us = 1e3 * kernels_ms(functools.partial(make_cast_step, rows=rows, compiled=bool(way)), _CASTS_MADE)
            name = f"{('eager', 'compiled')[way]}, {rows:,}"
            print(f"{name:<28} {us:14,.0f} {published[way]:11,.0f} {us / published[way] - 1:+8.1%}", flush=True)


def run_shards() -> None:
    """Simulate the layers of `_SHARDS` and print them."""
    print("rows x width x output       bf16 ms  published    error  float8 ms  published    error", flush=True)
    for shape, published in _SHARDS.items():
        figures = ""
        for float8, known in zip((False, True), published, strict=True):
            ms = kernels_ms(functools.partial(make_shard_step, shape=shape, float8=float8), _SHARDS_MADE)
            figures += f" {ms:10.2f} {known:10.2f} {ms / known - 1:+8.1%}"
        print(f"{' x '.join(f'{n:,}' for n in shape):<24}{figures}", flush=True)


def run(options: argparse.Namespace) -> None:
    """Simulate the shapes that were asked for and print them."""
    wanted = [tuple(int(n) for n in text.split("x")) for text in options.shape or ()]
    for shape in wanted:
        if shape not in _PUBLISHED:
            raise UsageError(f"--shape: give one of {', '.join('x'.join(map(str, known)) for known in _PUBLISHED)}")
    print("rows x width x output       bf16 ms  float8 ms     speed  published    error", flush=True)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for shape, published in _PUBLISHED.items():
        if wanted and shape not in wanted:
            continue
        steps = [functools.partial(make_step, shape=shape, float8=float8) for float8 in (False, True)]
        plain, narrow = (kernels_ms(step, _PUBLISHED_MADE) for step in steps)
        error, large = plain / narrow / published - 1, min(shape) >= _LARGE
        errors[large].append(abs(error))
        name = " x ".join(f"{n:,}" for n in shape)
        figures = f"{plain:8.2f} {narrow:10.2f} {plain / narrow:9.2f} {published:10.2f} {error:+8.1%}"
        print(f"{name:<26} {figures}", flush=True)
    for large, found in errors.items():
        if found:
            print(
                f"mean error of {f'sizes of {_LARGE:,} and more' if large else 'the others'}: {statistics.fmean(found):.1%}"
            )


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.float8_linears",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--casts", action="store_true", help="one layer, eager and compiled, by rows of its input")
    parser.add_argument("--shards", action="store_true", help="layers of 70B under tensor parallelism of degree 8")
    parser.add_argument("--shape", action="append", help="only these sizes, as 8192x4096x4096 (may be repeated)")
    options = parser.parse_args()
    if options.casts or options.shards:
        return exit_code(run_casts if options.casts else run_shards)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
