"""Generated kernels, one by one, beside their prices: ``python -m benchmarks.generated_kernels [--all]``.

Traces of three compiled steps on an H200 (``gpu/results``: Llama-3's layers in bf16, in float8 with a scale for each tensor
and for each row; torch 2.11) name each kernel's tensors. The same jobs are captured here. A kernel is compared if the capture
has one of the same kind with the same tensors: this torch fuses some operators otherwise. `bytes alone`: the price without
instructions. What of ``estimator/generated.py`` is fitted to these kernels are `ACROSS` and the instructions of an online
softmax. Needs torchao.

``--all`` also prints the kernels that take less than a thousandth of the step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from autosac.capture.compiler.arithmetic import Instructions
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.estimator.generated import GeneratedKernels
from autosac.estimator.hardware import load_hardware
from autosac.estimator.work import generated_kind
from autosac.simulation import Target
from autosac.trace import Signature, Trace
from benchmarks.ending import exit_code
from benchmarks.gpu import titan

_RESULTS = Path(__file__).parent / "gpu" / "results" / "h200-2026-11-26"
_GPU = "h200-sxm-141gb"
_CASES = (1, 2, 3)
_TYPES = {"c10::BFloat16": "bfloat16", "c10::Float8_e4m3fn": "float8_e4m3fn", "float": "float32", "long int": "int64"}

Key = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]


class Kernel(NamedTuple):
    """A measured kernel with its prices."""

    key: Key
    launches: int
    measured_us: float
    bytes_us: float
    priced_us: float


def measured(trace: Path) -> dict[Key, list[float]]:
    """Times (us) of a trace's generated kernels, by kind and tensors."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    calls: dict[str, set[Key]] = defaultdict(set)
    for event in events:
        if event.get("cat") == "cpu_op" and generated_kind(f"triton.{event['name']}"):
            calls[event["name"]].add(_key_of_call(event["name"], event["args"]))
    found: dict[Key, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and len(calls.get(event["name"], ())) == 1:
            found[next(iter(calls[event["name"]]))].append(event["dur"])
    return found


def _key_of_call(name: str, args: dict[str, Any]) -> Key:
    pairs = zip(args["Input Dims"], args["Input type"], strict=True)
    return generated_kind(f"triton.{name}"), tuple(
        sorted((tuple(dims), _TYPES.get(kind, kind)) for dims, kind in pairs if kind != "Scalar")
    )


def captured(case: dict[str, Any], server: CaptureServer) -> Trace:
    """The case's job, as this torch compiles it."""
    name, flavor = case["model"].split(",")[0].split()
    batch, length = case["model"].split(", ")[1].split(" x ")
    job = titan.JOB.format(model=name, flavor=flavor, dtype="bfloat16", batch=batch, length=length, steps=8)
    arguments = case["arguments"][: case["arguments"].index("--profiling.enable_profiling")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(job)
        return server.capture(
            TitanRequest(config_file=str(path), overrides=tuple(arguments), gpu=Target.of(_GPU, 1).gpu)
        )


def compared(times: dict[Key, list[float]], trace: Trace) -> Iterator[Kernel]:
    """Those that the capture has as well, if it has them once."""
    signatures: dict[Key, set[Signature]] = defaultdict(set)
    for _, op in trace.operators():
        signature = trace.signatures[op.signature]
        if kind := generated_kind(signature.name):
            signatures[kind, tuple(sorted((m.shape, m.dtype) for m in signature.inputs))].add(signature)
    model = GeneratedKernels(load_hardware(_GPU))
    for key, found in times.items():
        if len(same := signatures.get(key, set())) == 1:
            (signature,) = same
            alone = tuple((name, value) for name, value in signature.arguments if name not in Instructions._fields)
            prices = model.estimate([signature._replace(arguments=alone), signature])
            bytes_us, priced_us = (1e3 * price.ms for price in prices if price is not None)
            yield Kernel(key, len(found), median(found), bytes_us, priced_us)


def run(show_all: bool) -> None:
    """Print every step's kernels."""
    cases = json.loads((_RESULTS / titan.CASES).read_text())
    print("step, kernel: its largest tensors                  launches  measured (us)  bytes alone     priced")
    everything: list[Kernel] = []
    with CaptureServer() as server:
        for case in (cases[i] for i in _CASES):
            times = measured(_RESULTS / "traces" / case["trace"])
            step_us = sum(map(sum, times.values()))
            kernels = sorted(compared(times, captured(case, server)), key=lambda k: -k.launches * k.measured_us)
            everything += kernels
            seen_us = sum(k.launches * k.measured_us for k in kernels)
            print(f"{case['policy']}: {seen_us / step_us:.0%} of the time of generated kernels is compared")
            for kernel in kernels:
                if show_all or kernel.launches * kernel.measured_us > 1e-3 * step_us:
                    print(_line(kernel), flush=True)
    weights = np.array([k.launches * k.measured_us for k in everything])
    for name in ("bytes_us", "priced_us"):
        errors = np.array([getattr(k, name) / k.measured_us - 1 for k in everything])
        mean, total = np.average(abs(errors), weights=weights), np.average(errors, weights=weights)
        print(f"{name.removesuffix('_us')}: mean error {mean:.1%} by time, together {total:+.1%}")


def _line(kernel: Kernel) -> str:
    kind, tensors = kernel.key
    largest = sorted(tensors, key=lambda t: -np.prod(t[0], dtype=float))[:2]
    what = f"{kind} {' '.join(f'{dtype}{list(shape)}' for shape, dtype in largest)}"
    errors = [f"{us:7.1f} {us / kernel.measured_us - 1:+5.0%}" for us in (kernel.bytes_us, kernel.priced_us)]
    return f"  {what:<66} {kernel.launches:3d} {kernel.measured_us:8.1f}  {errors[0]}  {errors[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generated_kernels", description=__doc__)
    parser.add_argument("--all", action="store_true", help="also short kernels")
    options = parser.parse_args(arguments)
    return exit_code(lambda: run(options.all))


if __name__ == "__main__":
    sys.exit(main())
