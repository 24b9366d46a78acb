"""Attention kernels one by one beside their prices: FlashAttention-2, cuDNN's, PyTorch's memory-efficient, flexible attention.

    python -m benchmarks.gpu.attention measure --out DIR                        # on the GPU
    python -m benchmarks.gpu.attention predict --out DIR [--gpu PROFILE]        # anywhere

Sizes form a grid (16,384 tokens in 2,048 columns, heads of 64 to 256, 512 to 16,384 positions, with and without a causal
mask), and some were drawn at random. `measure` times each call with the device's own clock, forward and backward, and
writes ``attention.json``; `predict` prices the same calls at full clock and prints the errors by kind.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autosac.estimator.hardware import load_hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.power import uncapped
from autosac.estimator.pricing import default_models
from autosac.trace import Scalar, Signature, TensorMeta
from benchmarks.gpu.common import measure_or_predict, write_result
from benchmarks.gpu.products import timed_alone

_TOKENS, _COLUMNS = 16384, 2048
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_TILE = 128
_SIZES = (64, 96, 128, 192, 256)
_BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


class Shape(NamedTuple):
    """One attention. `window`: of flexible attention, in positions; 0 for none."""

    kernel: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    kv_length: int
    head_size: int
    causal: bool
    dropout: float = 0.0
    bias: bool = False
    window: int = 0


def shapes() -> Iterator[Shape]:
    """All shapes: those of the grid, then others."""
    for size in _SIZES:
        for length in _LENGTHS:
            batch, heads = _TOKENS // length, _COLUMNS // size
            for causal in (False, True):
                for kernel in ("flash", "cudnn"):
                    yield Shape(kernel, batch, heads, heads, length, length, size, causal)
    for length in (1024, 4096):
        for size in (64, 128):
            heads = _COLUMNS // size
            for kernel in ("flash", "cudnn", "efficient"):
                yield Shape(kernel, _TOKENS // length, heads, heads, length, length, size, True, dropout=0.1)
            for kernel in ("cudnn", "efficient"):
                yield Shape(kernel, _TOKENS // length, heads, heads, length, length, size, False, bias=True)
            for causal in (False, True):
                yield Shape("efficient", _TOKENS // length, heads, heads, length, length, size, causal)
    yield from _drawn()
    yield from _flexible()


def _drawn() -> Iterator[Shape]:
    draw = random.Random(29)
    for kernel in ("flash", "cudnn"):
        for _ in range(24):
            length = draw.choice((77, 197, 256, 577, 640, 1500, 2304, 3072, 6144, 12288))
            other = length if draw.random() < 0.7 else draw.choice((128, 1024, 4096))
            size, heads = draw.choice((40, 64, 80, 112, 128, 160, 256)), draw.choice((1, 4, 12, 25, 40))
            batch = max(1, draw.choice((4096, 16384, 65536)) // length)
            yield Shape(kernel, batch, heads, heads, length, other, size, length == other and draw.random() < 0.5)


def _flexible() -> Iterator[Shape]:
    for size in (64, 128, 192, 256):
        for length in (1024, 8192):
            batch, heads = _TOKENS // length, _COLUMNS // size
            yield Shape("flex", batch, heads, heads, length, length, size, True)
            if size <= 128:
                yield Shape("flex", batch, heads, heads // 4, length, length, size, True, window=256)
                yield Shape("flex", batch, heads, heads, length, length, size, False)


# ---- on the GPU --------------------------------------------------------------------------------------------------------


def _tensors(shape: Shape, device: torch.device) -> list[torch.Tensor]:
    def one(heads: int, length: int) -> torch.Tensor:
        flat = torch.randn(shape.batch, length, heads, shape.head_size, device=device, dtype=torch.bfloat16)
        return flat.transpose(1, 2)

    keys = (one(shape.kv_heads, shape.kv_length) for _ in range(2))
    return [one(shape.heads, shape.length), *keys]


def forward_of(shape: Shape, device: torch.device) -> Callable[..., torch.Tensor]:
    """A function of query, key and value."""
    if shape.kernel == "flex":
        return _flex(shape, device)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backend = getattr(SDPBackend, _BACKENDS[shape.kernel])
    bias = None
    if shape.bias:
        bias = torch.randn(shape.batch, 1, shape.length, shape.kv_length, device=device, dtype=torch.bfloat16)
        bias = bias.expand(-1, shape.heads, -1, -1)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                query, key, value, attn_mask=bias, dropout_p=shape.dropout, is_causal=shape.causal
            )

    return attend


def _flex(shape: Shape, device: torch.device) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window = shape.window or shape.length

    def causal(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query - key < window)

    mask = create_block_mask(causal, None, None, shape.length, shape.length, device) if shape.causal else None
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = shape.heads != shape.kv_heads

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = compiled(query, key, value, block_mask=mask, enable_gqa=grouped)
        return found

    return attend


def measure(out: Path) -> None:
    """Time all calls, write after every few."""
    device, rows = torch.device("cuda"), []
    for shape in shapes():
        row: dict[str, Any] = shape._asdict()
        try:
            given = _tensors(shape, device)
            attend = forward_of(shape, device)
            with torch.no_grad():
                row["forward_us"] = timed_alone(lambda: attend(*given)).ms * 1e3  # noqa: B023
            for tensor in given:
                tensor.requires_grad_()
            with torch.enable_grad():
                result = attend(*given)
            gradient = torch.randn_like(result)
            differentiated = timed_alone(lambda: torch.autograd.grad(result, given, gradient, retain_graph=True))  # noqa: B023
            row["backward_us"] = differentiated.ms * 1e3
        except Exception as e:
            row["error"] = (str(e).splitlines() or [type(e).__name__])[0][:200]
        rows.append(row)
        given, attend, result, gradient = [], None, None, None  # type: ignore[assignment]
        if len(rows) % 20 == 0:
            write_result(out / "attention.json", "cuda", rows)
    write_result(out / "attention.json", "cuda", rows)
    print(len(rows), "shapes,", sum("error" in row for row in rows), "failed")


# ---- anywhere ----------------------------------------------------------------------------------------------------------


def signature_of(shape: Shape, *, backward: bool) -> Signature:
    """The call as traces have it."""

    def tensor(heads: int, length: int) -> TensorMeta:
        row = heads * shape.head_size
        strides = (length * row, shape.head_size, row, 1)
        return TensorMeta((shape.batch, heads, length, shape.head_size), strides, "bfloat16")

    query, key = tensor(shape.heads, shape.length), tensor(shape.kv_heads, shape.kv_length)
    suffix = "_backward" if backward else ""
    if shape.kernel == "flex":
        share = _computed(shape)
        arguments: tuple[tuple[str, Scalar], ...] = () if share == 0.5 else (("computed", share),)
        return Signature(f"flex_attention{suffix}", (query, key, key), (query,), arguments)
    inputs = [query, query, key, key, query] if backward else [query, key, key]  # the gradient first, the output last
    if shape.bias:
        four = (shape.batch, shape.heads, shape.length, shape.kv_length)
        inputs.append(TensorMeta(four, (shape.length * shape.kv_length, 0, shape.kv_length, 1), "bfloat16"))
    outputs = (query, key, key) if backward else (query,)
    name = f"aten._scaled_dot_product_{shape.kernel}_attention{suffix}.default"
    return Signature(name, tuple(inputs), outputs, (("dropout_p", shape.dropout), ("is_causal", shape.causal)))


def _computed(shape: Shape) -> float:
    """What a block mask leaves of the pairs: 0.5 stands for all tiles at and below the diagonal."""
    tiles = -(-shape.length // _TILE)
    lines = min(tiles, -(-(shape.window - 1) // _TILE) + 1) if shape.window else tiles
    computed = sum(min(i + 1, lines) for i in range(tiles)) if shape.causal else tiles**2
    return computed / (tiles * (tiles + 1))


def full_clock_us(gpu: str, signatures: Sequence[Signature]) -> list[float]:
    """Prices of calls without a limit of power."""
    found = first_estimates(default_models(uncapped(load_hardware(gpu))).operators, signatures)
    return [1e3 * estimate.ms for estimate in found]


def kind_of(shape: Shape) -> str:
    """What is counted together."""
    words = [word for word in ("causal", "dropout", "bias", "window") if getattr(shape, word)]
    return ", ".join([shape.kernel, *words, *(["drawn"] if shape in set(_drawn()) else [])])


def predict(out: Path, gpu: str) -> None:
    """Print every kind's errors."""
    rows = json.loads((out / "attention.json").read_text())["rows"]
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    measured = [Shape(*(row[name] for name in Shape._fields)) for row in rows]
    for direction in ("forward", "backward"):
        signatures = [signature_of(shape, backward=direction == "backward") for shape in measured]
        for row, shape, us in zip(rows, measured, full_clock_us(gpu, signatures), strict=True):
            if f"{direction}_us" in row:
                errors[kind_of(shape), direction].append(us / row[f"{direction}_us"] - 1)
    print("| kind | direction | calls | median error | mean | worst |")
    print("|---|---|--:|--:|--:|--:|")
    for (kind, direction), found in sorted(errors.items()):
        sizes = [abs(error) for error in found]
        worst = max(found, key=abs)
        middle, mean = statistics.median(sizes), statistics.mean(sizes)
        print(f"| {kind} | {direction} | {len(found)} | {middle:.1%} | {mean:.1%} | {worst:+.1%} |")


def main() -> None:
    """`measure` or `predict`."""
    measure_or_predict(__doc__ or "", measure, predict)


if __name__ == "__main__":
    main()
