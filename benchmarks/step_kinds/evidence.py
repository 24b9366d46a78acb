"""The kinds of calls of the profiled steps, as a compact file: written from traces (`benchmarks/traces.py`), read as values.

`h100_2026_11_23.json.gz` was measured by AutoSAC's own `benchmarks/gpu` on 2026-11-23: H100 80GB HBM3, 700 W, torch 2.11.0.
It holds one step of each of 20 eager jobs of `benchmarks/gpu/unseen.py`. A row is one way of calling an operator in one job:
its signature, the median microseconds of its kernels with the gaps of a full queue, how often it was called, and what AutoSAC
predicted before any of these steps was known (`before_us`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from autosac.trace import Scalar, Signature, TensorMeta

SHIPPED = Path(__file__).with_name("h100_2026_11_23.json.gz")


class Kind(NamedTuple):
    """One way of calling an operator in job `number`, called `job`; `tf32`: a float32 product that ran on tensor cores."""

    number: int
    job: str
    signature: Signature
    us: float
    calls: int
    before_us: float
    tf32: bool

    @property
    def ms(self) -> float:
        """Device time of all its calls."""
        return self.us * self.calls / 1e3


def save(path: Path, kinds: Iterable[Kind]) -> None:
    """Write the kinds; tensors that occur again are written once."""
    metas: dict[TensorMeta, int] = {}
    jobs: dict[int, str] = {}
    rows: list[list[Any]] = []
    for kind in kinds:
        jobs[kind.number] = kind.job
        s = kind.signature
        tensors = [[metas.setdefault(meta, len(metas)) for meta in group] for group in (s.inputs, s.outputs)]
        numbers = [round(kind.us, 2), kind.calls, round(kind.before_us, 2), int(kind.tf32)]
        rows.append([kind.number, s.name, *tensors, list(map(list, s.arguments)), list(s.mutates), *numbers])
    table = {"jobs": jobs, "tensors": list(map(list, metas)), "rows": rows}
    text = json.dumps(table, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def load(path: Path = SHIPPED) -> list[Kind]:
    """The kinds of all jobs."""
    table = json.loads(gzip.decompress(path.read_bytes()))
    metas = [TensorMeta(tuple(shape), tuple(stride), dtype, place) for shape, stride, dtype, place in table["tensors"]]
    kinds = []
    for number, name, inputs, outputs, arguments, mutates, us, calls, before_us, tf32 in table["rows"]:
        signature = Signature(
            name,
            tuple(metas[i] for i in inputs),
            tuple(metas[i] for i in outputs),
            tuple((key, _frozen(value)) for key, value in arguments),
            mutates=tuple(mutates),
        )
        kinds.append(Kind(number, table["jobs"][str(number)], signature, us, calls, before_us, bool(tf32)))
    return kinds


def _frozen(value: Any) -> Scalar:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
