"""How good the shipped models are on the measurements that no fit has seen, as Markdown.

    python -m benchmarks.operators --data DIR [--save docs/operators.md]

The held-out shapes are a fixed 15 % of the operators' and 20 % of the message sizes (`measurements.py`,
`fit_collectives.py`). The first table is about the models behind `autosac.estimator.price`; "training sizes" are
products whose three dimensions are at least 256. The plain roofline is judged on the same shapes for comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np

from autosac.estimator import AlphaBeta, ChunkModel, Cluster, LogSigmoid, load_hardware, price
from autosac.estimator.features import (
    Rates,
    attention_baseline_ms,
    attention_features,
    gemm_baseline_ms,
    gemm_features,
)
from autosac.estimator.learned import MODELS, load_bundle
from autosac.estimator.models import CollectiveModel
from autosac.files.writing import write_text_atomically
from autosac.trace import Op, Phase, Signature, TensorMeta, Trace, TraceInfo
from benchmarks.fit_collectives import KINDS, LINKS, is_held_out, read, usable
from benchmarks.fit_memory import read as read_memory
from benchmarks.fit_models import consensus
from benchmarks.measurements import GPUS, Array, attention, gemm
from benchmarks.quantization import products

_OPERATORS = 50_000
_ROOFLINE_EFFICIENCY = {"matmul": 0.72, "attention": 0.60}


def _line(name: str, gpu: str, log_ratio: Array, roofline: Array) -> str:
    error, plain = np.abs(np.expm1(log_ratio)), np.abs(np.expm1(roofline))
    cells = [name, gpu, len(error), f"{error.mean():.2%}", f"{np.median(error):.2%}", f"{(error < 0.1).mean():.1%}"]
    return "| " + " | ".join(map(str, [*cells, f"{plain.mean():.0%}"])) + " |"


def _gemm_lines(data: Path, gpu: str) -> list[str]:
    bundle = load_bundle(gpu)
    assert bundle is not None
    lines = []
    for dtype, unit, item in (("bfloat16", "bfloat16", 2.0), ("fp8", "float8", 1.0)):
        if f"gemm.{unit}" not in bundle.trees:
            continue
        measured, _ = products(data, gpu, dtype)
        log_ms, _ = consensus(measured)
        rates = Rates.of(load_hardware(gpu), unit)
        m, n, k = measured.shapes.T
        base = np.log(gemm_baseline_ms(m, n, k, item, rates))
        error = bundle.trees[f"gemm.{unit}"].predict(gemm_features(m, n, k, item, rates)) + base - log_ms
        roofline = base - np.log(_ROOFLINE_EFFICIENCY["matmul"]) - log_ms
        test = measured.held_out
        lines.append(_line(f"matmul {dtype}", gpu, error[test], roofline[test]))
        sizes = test & (measured.shapes.min(axis=1) >= 256)
        lines.append(_line(f"matmul {dtype}, training sizes", gpu, error[sizes], roofline[sizes]))
        if 0 < (measured.repeats > 1).mean() < 0.9:
            sure = sizes & (measured.repeats > 1)
            lines.append(_line(f"matmul {dtype}, training sizes, measured twice", gpu, error[sure], roofline[sure]))
    return lines


def _attention_line(data: Path, gpu: str) -> str:
    bundle = load_bundle(gpu)
    assert bundle is not None
    measured = attention(data, gpu)
    log_ms, _ = consensus(measured)
    rates = Rates.of(load_hardware(gpu), "bfloat16")
    base = np.log(attention_baseline_ms(measured.shapes, rates))
    error = bundle.trees["attention"].predict(attention_features(measured.shapes, rates)) + base - log_ms
    test = measured.held_out
    roofline = base - np.log(_ROOFLINE_EFFICIENCY["attention"]) - log_ms
    return _line("attention forward", gpu, error[test], roofline[test])


def _noise_line(data: Path, gpu: str) -> str | None:
    """How far the frameworks' timings of the same kernel are apart."""
    measured = gemm(data, gpu, "bfloat16")
    if measured.ms.shape[1] < 2:
        return f"| {gpu} | {', '.join(measured.frameworks)} | only one: no cross-check |"
    ratio = np.abs(np.log(measured.ms[:, 1:] / measured.ms[:, :1]))
    medians = ", ".join(
        f"{name} {np.nanmedian(column):.1%}" for name, column in zip(measured.frameworks[1:], ratio.T, strict=True)
    )
    return f"| {gpu} | {', '.join(measured.frameworks)} | {medians} |"


def _collective_lines(data: Path) -> list[str]:
    lines = []
    everything: list[list[float]] = [[], [], []]
    for link, (system, gpu) in LINKS.items():
        hardware = load_hardware(gpu)
        node = Cluster(
            name="node",
            nodes=1,
            gpus_per_node=8,
            intra_gbps=hardware.link_gbps,
            intra_latency_us=0.6,
            inter_gbps=400.0,
            inter_latency_us=5.0,
        )
        models: list[CollectiveModel] = [LogSigmoid(hardware), AlphaBeta(hardware), ChunkModel(hardware)]
        for kind in KINDS:
            rows = [row for row in usable(link, read(data, system, kind)) if is_held_out(row[1])]
            cells = []
            for model, found in zip(models, everything, strict=True):
                errors = [abs(model.estimate(kind, s, node.place(range(n))).ms * 1e3 / t - 1) for n, s, t in rows]
                found += errors
                cells.append(f"{np.median(errors):.1%}")
            lines.append(f"| {link} ({gpu}) | {kind} | {len(rows)} | " + " | ".join(cells) + " |")
    medians = " | ".join(f"{np.median(found):.1%}" for found in everything)
    return [*lines, f"| all | all | {len(everything[0])} | {medians} |"]


def _made_up(distinct: int) -> Trace:
    """A trace of 50,000 operators with so many distinct signatures: products, additions and attentions of random sizes."""
    generator = np.random.default_rng(0)

    def tensor(*shape: int) -> TensorMeta:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return TensorMeta(shape, tuple(strides), "bfloat16")

    def signature(number: int) -> Signature:
        m, n, k = (int(size) for size in generator.integers(64, 16384, 3))
        if number % 10 < 4:
            return Signature("aten.mm.default", (tensor(m, k), tensor(k, n)), (tensor(m, n),))
        if number % 10 < 9:
            return Signature("aten.add.Tensor", (tensor(m, n), tensor(m, n)), (tensor(m, n),))
        q = tensor(4, 32, k, 128)
        return Signature("aten._scaled_dot_product_flash_attention.default", (q, q, q), (q,), (("is_causal", True),))

    return Trace(
        info=TraceInfo(),
        signatures=tuple(signature(i) for i in range(distinct)),
        storages=(),
        modules=("",),
        module_parents=(-1,),
        module_classes=("Model",),
        sources=("",),
        groups=(),
        prologue=(),
        events=tuple(Op(i % distinct, 0, 0, Phase.FORWARD, 0, (), ()) for i in range(_OPERATORS)),
    )


def _speed_lines() -> list[str]:
    lines = ["| operators | distinct signatures | seconds of one processor |", "|---|---|---|"]
    for distinct in (500, 5000, _OPERATORS):
        trace, seconds = _made_up(distinct), []
        for _ in range(3):
            begin = time.process_time()
            price(trace, load_hardware("h100-sxm-80gb"))
            seconds.append(time.process_time() - begin)
        lines.append(f"| {_OPERATORS:,} | {distinct:,} | {min(seconds):.2f} |")
    return lines


def report(data: Path) -> str:
    """The whole report."""
    lines = [
        "# Operator and collective models against measurements",
        "",
        "For readers who want to know how accurate the shipped cost models are. Printed by `benchmarks/operators.py`. Every",
        "row is about shapes that no fit has seen: 15 % of the operators' shapes, 20 % of the message sizes. For products of",
        "matrices, the measured time is the median over the frameworks that timed a shape.",
        "",
        "## Matrix products and attention",
        "",
        "| model | GPU | shapes | MAPE | median | within 10 % | MAPE of a roofline |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpu in GPUS:
        lines += [*_gemm_lines(data, gpu), _attention_line(data, gpu)]
    lines += [
        "",
        "The frameworks' timings of the same kernel differ by this much (median over shapes, bf16). On a shape that was timed",
        "once, no model can be better than that.",
        "",
        "| GPU | frameworks | median difference from the first |",
        "|---|---|---|",
        *(line for gpu in GPUS if (line := _noise_line(data, gpu))),
        "",
        "## Collectives inside a node",
        "",
        "Median error on held-out sizes, 2, 4 and 8 GPUs. `price` uses the first model.",
        "",
        "| link | collective | points | log-sigmoid | alpha-beta | chunks |",
        "|---|---|---|---|---|---|",
        *_collective_lines(data),
        "",
        "## Memory-bound operators",
        "",
        _memory_summary(data),
        "",
        "## Pricing a trace",
        "",
        "Every distinct signature is priced once, all in one batch. The step of a model of any size has some hundreds of "
        "them.",
        "",
        *_speed_lines(),
        "",
        f"The fitted models take {sum(f.stat().st_size for f in MODELS.iterdir()) / 1e6:.1f} MB on the disk.",
        "",
    ]
    return "\n".join(lines)


def _memory_summary(data: Path) -> str:
    fitted = json.loads((MODELS / "memory.json").read_text(encoding="utf-8"))
    rows = read_memory(data)
    parts = [f"elementwise {fitted['rel_std']:.0%} ({fitted['rows']['elementwise']} rows)"]
    parts += [f"{n} {s['rel_std']:.0%} ({fitted['rows'][n]})" for n, s in fitted["slowdowns"].items()]
    return (
        f"Too few measurements ({len(rows)} rows of eager modules) to hold any back. Residuals of the fits (standard deviation"
        f" of the log): {', '.join(parts)}."
    )


def main() -> None:
    """Print the report, and save it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="folder with ops/ and comm/")
    parser.add_argument("--save", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    text = report(arguments.data)
    print(text)
    if arguments.save:
        write_text_atomically(arguments.save, text)


if __name__ == "__main__":
    main()
