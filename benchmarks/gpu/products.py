"""Products and attention one by one, beside their prices: float8, grouped, odd sizes, the narrow ones of tensor parallelism.

    python -m benchmarks.gpu.products measure --out DIR                        # on the GPU
    python -m benchmarks.gpu.products predict --out DIR [--gpu PROFILE]        # anywhere

`measure` times every call of the table below with the device's own clock (`autosac.estimator.calibration.timing`) and writes
``products.json``; `predict` prices the same calls at full clock and prints the errors by kind.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autosac.estimator.calibration.calls import ReplayedCall
from autosac.estimator.calibration.timing import Timed, time_call
from autosac.files.writing import write_text_atomically
from autosac.trace import Signature
from benchmarks.gpu.common import measure_or_predict, write_result

_ROWS = (1024, 2048, 4096, 8192, 16384)
_WIDTHS = (
    (4096, 512),
    (4096, 768),
    (512, 4096),
    (4096, 1792),
    (1792, 4096),
    (8192, 1024),
    (8192, 1280),
    (1024, 8192),
    (8192, 3584),
    (3584, 8192),
    (4096, 6144),
    (4096, 14336),
    (14336, 4096),
)
_GROUPED = ((2048, 1408), (1408, 2048), (2048, 768), (768, 2048), (4096, 1536), (2880, 5760))
_EXPERTS = (8, 32, 64, 128)
_TOKENS = (4096, 16384, 65536)
# Sizes that four-element loads do not divide, or eight-element ones.
_ODD = (
    (4096, 4095, 4096),
    (4096, 4098, 4096),
    (4095, 4096, 4096),
    (4096, 4096, 1001),
    (50, 4096, 4096),
    (8192, 1000, 4096),
)
# Batch, heads, heads of keys, length, size of a head.
_ATTENTION = (
    (8, 16, 16, 1024, 64),
    (4, 16, 8, 2048, 128),
    (2, 32, 8, 4096, 128),
    (1, 32, 8, 8192, 128),
    (1, 32, 8, 32768, 128),
    (1, 16, 16, 8192, 64),
    (4, 16, 16, 2048, 256),
    (64, 16, 16, 197, 64),
    (16, 12, 12, 512, 64),
    (1, 4, 1, 8192, 128),
)


class Call(NamedTuple):
    """A call of `kind`; `make` builds it on a device. The last of its counted operators is the one that is timed."""

    kind: str
    name: str
    make: Callable[[torch.device], Callable[[], Any]]
    counted: int = 1


def calls() -> Iterator[Call]:
    """All calls."""
    for k, n in _WIDTHS:
        for m in _ROWS:
            for kind in ("bf16", "float8 by tensor", "float8 by row"):
                yield Call(kind, f"{m} x {k} x {n}", product(kind, m, k, n))
    for k, n in _GROUPED:
        for experts in _EXPERTS:
            for tokens in _TOKENS:
                name = f"{experts} experts, {tokens} x {k} x {n}"
                yield Call("grouped", name, _grouped(experts, tokens, k, n))
                yield Call("grouped, gradient of weights", name, _grouped_gradient(experts, tokens, k, n))
    for m, k, n in _ODD:
        for kind in ("bf16", "TF32"):
            yield Call(f"{kind}, odd", f"{m} x {k} x {n}", _odd(kind, m, k, n))
    for shape in _ATTENTION:
        for kind in ("cuDNN", "flash"):
            for causal in (True, False):
                name = " x ".join(map(str, shape)) + (", causal" if causal else "")
                yield Call(f"{kind} attention", name, _attention(kind, shape, causal, backward=False))
                yield Call(f"{kind} attention, backward", name, _attention(kind, shape, causal, backward=True), 2)


def _bf16(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def product(kind: str, m: int, k: int, n: int, *, fast: bool = True) -> Any:
    """A product in bf16, or in float8 with one scale for a tensor or for a row; `fast` lets it add up in fewer bits."""

    def make(device: torch.device) -> Callable[[], Any]:
        a, b = _bf16(device, m, k), _bf16(device, n, k)
        if kind == "bf16":
            return lambda: torch.mm(a, b.t())
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        by_row = kind.endswith("row")
        of_a, of_b = (torch.ones(shape if by_row else (), device=device) for shape in ((m, 1), (1, n)))
        return lambda: torch._scaled_mm(a, b.t(), of_a, of_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return make


def _odd(kind: str, m: int, k: int, n: int) -> Any:
    def make(device: torch.device) -> Callable[[], Any]:
        torch.backends.cuda.matmul.allow_tf32 = True
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        return lambda: torch.mm(a, b.t())

    return make


def _offsets(device: torch.device, experts: int, tokens: int) -> torch.Tensor:
    return torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (tokens // experts)


def _grouped(experts: int, tokens: int, k: int, n: int) -> Any:
    def make(device: torch.device) -> Callable[[], Any]:
        x, w, offsets = _bf16(device, tokens, k), _bf16(device, experts, n, k), _offsets(device, experts, tokens)
        return lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets)

    return make


def _grouped_gradient(experts: int, tokens: int, k: int, n: int) -> Any:
    def make(device: torch.device) -> Callable[[], Any]:
        x, gradient, offsets = _bf16(device, tokens, k), _bf16(device, tokens, n), _offsets(device, experts, tokens)
        return lambda: torch._grouped_mm(gradient.t(), x, offs=offsets)

    return make


def _attention(kind: str, shape: Sequence[int], causal: bool, *, backward: bool) -> Any:
    batch, heads, key_heads, length, size = shape
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if kind == "cuDNN" else SDPBackend.FLASH_ATTENTION

    def make(device: torch.device) -> Callable[[], Any]:
        q, k, v = (_bf16(device, batch, length, h, size).transpose(1, 2) for h in (heads, key_heads, key_heads))
        k, v = (t.repeat_interleave(heads // key_heads, dim=1) for t in (k, v))
        if not backward:
            return lambda: _attend(backend, q, k, v, causal)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        with torch.enable_grad():
            out = _attend(backend, q, k, v, causal)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    def _attend(backend: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return make


def timed_alone(run: Callable[[], Any]) -> Timed:
    """A call on the CUDA device, by the device's own clock."""
    return time_call(ReplayedCall(Signature("", (), ()), run, (), {}), torch.device("cuda"))


def measure(timed_calls: Iterable[Call], path: Path) -> None:
    """Time calls, write after every few."""
    device, rows = torch.device("cuda"), []
    for call in timed_calls:
        row: dict[str, Any] = {"kind": call.kind, "name": call.name}
        run: Callable[[], Any] | None
        try:
            run = call.make(device)
            timed = timed_alone(run)
            row |= {"us": timed.ms * 1e3, "rel_std": timed.rel_std}
        except RuntimeError as e:
            row["error"] = str(e).splitlines()[0][:200]
        rows.append(row)
        run = None  # its tensors
        if len(rows) % 40 == 0:
            write_result(path, "cuda", rows)
    write_result(path, "cuda", rows)
    print(len(rows), "calls,", sum("error" in row for row in rows), "failed")


_COUNTED = ("mm", "_scaled_mm", "_grouped_mm", "_scaled_dot_product")


def prices_us(gpu: str, priced: Iterable[Call] | None = None, counted: Sequence[str] = _COUNTED) -> list[float]:
    """Of calls (by default this module's), at full clock: they were timed one by one, for milliseconds.

    The names of `counted` operators begin so; `Call.counted` says how many of them a call runs.
    """
    import autosac
    from autosac.estimator import load_hardware, price
    from autosac.estimator.power import uncapped
    from autosac.estimator.work import base_name
    from autosac.trace import Op

    all_calls = list(calls() if priced is None else priced)

    def make_step(device: torch.device) -> Any:
        anchor = torch.nn.Linear(1, 1, device=device)

        def step() -> None:
            for call in all_calls:
                call.make(device)()
            anchor.weight.sum().backward()

        return anchor, step

    trace, found = autosac.simulate(make_step, gpu=gpu).trace, []
    for event, ms in zip(trace.events, price(trace, uncapped(load_hardware(gpu))).event_ms, strict=True):
        if type(event) is Op and base_name(trace.signatures[event.signature].name).startswith(tuple(counted)):
            found.append(1e3 * float(ms))
    prices, position = [], 0
    for call in all_calls:
        position += call.counted
        prices.append(found[position - 1])
    assert position == len(found), (position, len(found))
    return prices


def predict(out: Path, gpu: str) -> None:
    """Print every kind's errors. Prices are kept in ``products.json`` the first time: those before the calls were known."""
    path = out / "products.json"
    document = json.loads(path.read_text())
    prices = prices_us(gpu)
    if not all("price_before_us" in row for row in document["rows"]):
        for row, us in zip(document["rows"], prices, strict=True):
            row["price_before_us"] = round(us, 3)
        write_text_atomically(path, json.dumps(document, separators=(",", ":")))
    print("\n".join(table_of(document["rows"], prices)))


def table_of(rows: Sequence[dict[str, Any]], prices_now_us: Sequence[float]) -> list[str]:
    """Measured calls beside their prices, before they were known and now, by kinds and halves, as Markdown."""
    kinds: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    seen: dict[str, int] = {}
    for row, now in zip(rows, prices_now_us, strict=True):
        half = seen[row["kind"]] = seen.get(row["kind"], 1) ^ 1
        if "us" in row:
            kinds.setdefault((row["kind"], half), []).append((row["us"], row["price_before_us"], now))
    lines = ["| kind | calls | median error before | now | sum of prices over times before | now |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for (kind, half), found in kinds.items():
        cells = [f"{kind}, {('even', 'odd')[half]}", str(len(found))]
        errors = [[abs(row[column] / row[0] - 1) for row in found] for column in (1, 2)]
        cells += [f"{statistics.median(of_one):.1%}" for of_one in errors]
        total = sum(row[0] for row in found)
        cells += [f"{sum(row[column] for row in found) / total:.2f}" for column in (1, 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """`measure` or `predict`."""
    measure_or_predict(__doc__ or "", lambda out: measure(calls(), out / "products.json"), predict, gpu="h100-sxm-80gb")


if __name__ == "__main__":
    main()
