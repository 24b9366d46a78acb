"""What mixtures of experts run beside their products, one by one, beside their prices: routing, sorting, moving tokens.

    python -m benchmarks.gpu.experts measure --out DIR                        # on the GPU
    python -m benchmarks.gpu.experts predict --out DIR [--gpu PROFILE]        # anywhere

The operators of TorchTitan's mixtures: the best experts of each token and their scores, counting and sorting of tokens, rows
that are gathered and added, and products of one row (a token's scores with its experts' outputs), with their gradients.
Writes ``experts.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import measure_or_predict
from benchmarks.gpu.products import Call, measure, prices_us

_TOKENS, _WIDTHS = (4096, 32768), (2048, 5120)
_ROUTED = ((32, 4), (64, 6), (128, 8), (256, 8))  # experts, and those of each token
COUNTED = ("bmm", "topk", "sort", "histc", "gather", "scatter", "index", "_softmax", "sigmoid")


def calls() -> Iterator[Call]:
    """All calls; each runs one operator."""
    for tokens in _TOKENS:
        for experts, chosen in _ROUTED:
            yield from _routing(tokens, experts, chosen)
        for width in _WIDTHS:
            yield from _moving(tokens, width)
            for chosen in (4, 8):
                yield from _combining(tokens, width, chosen)


def _routing(tokens: int, experts: int, chosen: int) -> Iterator[Call]:
    name = f"{tokens} tokens, {chosen} of {experts}"

    def scores(device: torch.device) -> torch.Tensor:
        return torch.rand(tokens, experts, device=device)

    def ids(device: torch.device) -> torch.Tensor:
        return torch.randint(0, experts, (tokens, chosen), device=device)

    yield _call("softmax", name, lambda d: (scores(d),), lambda x: torch.softmax(x, dim=1))
    yield _call("topk", name, lambda d: (scores(d),), lambda x: torch.topk(x, chosen, dim=-1, sorted=False))
    yield _call("gather", name, lambda d: (scores(d), ids(d)), lambda x, i: x.gather(1, i))
    yield _call("histc", name, lambda d: (ids(d).view(-1),), lambda i: torch.histc(i, bins=experts, min=0, max=experts))
    yield _call("stable sort", name, lambda d: (ids(d).view(-1),), lambda i: torch.argsort(i, stable=True))


def _moving(tokens: int, width: int) -> Iterator[Call]:
    name = f"{tokens} x {width}"

    def rows(device: torch.device) -> torch.Tensor:
        return torch.randn(tokens, width, device=device, dtype=torch.bfloat16)

    def order(device: torch.device) -> torch.Tensor:
        return torch.randperm(tokens, device=device)

    def wide(device: torch.device) -> torch.Tensor:
        return order(device).reshape(-1, 1).expand(-1, width)

    yield _call("rows by index", name, lambda d: (rows(d), order(d)), lambda x, i: x[i])
    yield _call("rows by gather", name, lambda d: (rows(d), wide(d)), lambda x, i: x.gather(0, i))
    yield _call("rows added", name, lambda d: (rows(d), wide(d), rows(d)), lambda x, i, y: x.scatter_add(0, i, y))
    yield _call(
        "rows put",
        name,
        lambda d: (rows(d), order(d), rows(d)),
        lambda x, i, y: torch.index_put(x, (i,), y, accumulate=True),
    )


def _combining(tokens: int, width: int, chosen: int) -> Iterator[Call]:
    name = f"{tokens} x [1, {chosen}] x [{chosen}, {width}]"

    def some(device: torch.device, *shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, device=device)

    yield _call("one row", name, lambda d: (some(d, 1, chosen), some(d, chosen, width)), torch.bmm)
    yield _call(
        "one row, gradient of scores",
        name,
        lambda d: (some(d, 1, width), some(d, chosen, width)),
        lambda g, x: torch.bmm(g, x.transpose(1, 2)),
    )
    yield _call(
        "one row, gradient of outputs",
        name,
        lambda d: (some(d, 1, chosen), some(d, 1, width)),
        lambda s, g: torch.bmm(s.transpose(1, 2), g),
    )


def _call(kind: str, name: str, inputs: Callable[[torch.device], tuple[Any, ...]], run: Callable[..., Any]) -> Call:
    def make(device: torch.device) -> Callable[[], Any]:
        given = inputs(device)
        return lambda: run(*given)

    return Call(kind, name, make)


def predict(out: Path, gpu: str) -> None:
    """Print all calls with their errors."""
    rows = json.loads((out / "experts.json").read_text())["rows"]
    for row, us in zip(rows, prices_us(gpu, calls(), COUNTED), strict=True):
        if "us" in row:
            print(f"{row['kind']:<30} {row['name']:<32} {row['us']:>9.1f} us {us:>9.1f} {us / row['us'] - 1:>+7.1%}")


def main() -> None:
    """`measure` or `predict`."""
    measure_or_predict(__doc__ or "", lambda out: measure(calls(), out / "experts.json"), predict)


if __name__ == "__main__":
    main()
