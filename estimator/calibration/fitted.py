"""The models that a calibration leaves beside its profile, and the file that holds them.

The file is JSON: ``{"format": "autosac-calibrated", "schema": 1, "device", "overhead_ms", "peak_flops", "bandwidth",
"groups": {name: Gaussian process}, "collectives": [[kind, ranks, bytes, ms], ...], "memory": {...} or null, "about": {...}}``.
`CalibratedOperators` answers for the groups that were measured (`shapes`, `gaussian`), `CalibratedCollectives` for transfers
inside a node by interpolating between the measured sizes, in logarithms; both leave the rest to the models behind them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from autosac.errors import HardwareError
from autosac.estimator.calibration.gaussian import GaussianProcess
from autosac.estimator.calibration.host_memory import HostMemory
from autosac.estimator.calibration.shapes import ShapeFeatures, shape_of
from autosac.estimator.cluster import Placement
from autosac.estimator.models import CollectiveModel, Estimate
from autosac.estimator.profiles import read_document
from autosac.files.writing import write_text_atomically
from autosac.trace import Signature

_FORMAT, _SCHEMA = "autosac-calibrated", 1
_COLLECTIVE_STD = 0.1
_MOST = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What was fitted on one machine.

    `overhead_ms`: the least that an operator takes; `peak_flops` (by arithmetic, FLOP/s) and `bandwidth` (bytes/s): the
    best that was seen; `collectives`: (kind, ranks, bytes) -> ms; `memory`: of a CPU; `about`: date, versions, device.
    """

    device: str
    overhead_ms: float
    peak_flops: Mapping[str, float]
    bandwidth: float
    groups: Mapping[str, GaussianProcess]
    collectives: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    memory: HostMemory | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def baseline_ms(self, shape: ShapeFeatures) -> float:
        """The roofline of the module `shapes`."""
        peak = self.peak_flops.get(shape.arithmetic) or max(self.peak_flops.values(), default=math.inf)
        return self.overhead_ms + 1e3 * max(shape.flops / peak, shape.nbytes / self.bandwidth)

    def save(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""
        document = {
            "format": _FORMAT,
            "schema": _SCHEMA,
            "device": self.device,
            "overhead_ms": self.overhead_ms,
            "peak_flops": dict(self.peak_flops),
            "bandwidth": self.bandwidth,
            "groups": {name: process.to_json() for name, process in sorted(self.groups.items())},
            "collectives": [[*key, ms] for key, ms in sorted(self.collectives.items())],
            "memory": asdict(self.memory) if self.memory is not None else None,
            "about": dict(self.about),
        }
        write_text_atomically(path, json.dumps(document, allow_nan=False))


@lru_cache(maxsize=8)
def load_calibrated(path: str) -> Calibrated:
    """Read a file of fitted models. HardwareError if it is none, is damaged, or holds numbers that are not finite."""
    document = read_document(path, "calibrated models", _FORMAT, _SCHEMA)
    try:
        return _parsed(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise HardwareError(f"{path} is damaged: {type(e).__name__}: {e}") from e


def _parsed(document: dict[str, Any]) -> Calibrated:
    memory = document["memory"]
    if memory is not None:
        memory = HostMemory(
            fault_ns_per_byte=_number(memory["fault_ns_per_byte"], zero=True),
            reuse_bytes=tuple(_number(v) for v in memory["reuse_bytes"]),
            read_ns_per_byte=tuple(_number(v, zero=True) for v in memory["read_ns_per_byte"]),
        )
        if not memory.reuse_bytes or len(memory.reuse_bytes) != len(memory.read_ns_per_byte):
            raise ValueError("reuse_bytes and read_ns_per_byte do not fit together")
    return Calibrated(
        device=str(document["device"]),
        overhead_ms=_number(document["overhead_ms"], zero=True),
        peak_flops={str(k): _number(v) for k, v in document["peak_flops"].items()},
        bandwidth=_number(document["bandwidth"]),
        groups={str(k): GaussianProcess.from_json(v) for k, v in document["groups"].items()},
        collectives={(str(k), int(n), int(size)): _number(ms) for k, n, size, ms in document["collectives"]},
        memory=memory,
        about=document.get("about", {}),
    )


def _number(value: Any, *, zero: bool = False) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST or (value == 0 and not zero):
        raise ValueError(f"{value!r} is not a number {'of at least' if zero else 'above'} 0 and at most {_MOST:g}")
    return float(value)


class CalibratedOperators:
    """Operators of the groups that were measured on this machine."""

    def __init__(self, calibrated: Calibrated, *, tf32: bool = False) -> None:
        """`tf32`: float32 products run on tensor cores, which is not how they were measured."""
        self._calibrated = calibrated
        self._skipped = ("matmul:float32", "batched_matmul:float32") if tf32 else ()

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """One answer for each signature; None where its group was not measured."""
        answers: list[Estimate | None] = [None] * len(signatures)
        rows: dict[str, list[tuple[int, ShapeFeatures]]] = {}
        for i, signature in enumerate(signatures):
            shape = shape_of(signature)
            groups = shape.groups if shape is not None else ()
            group = next((g for g in groups if g in self._calibrated.groups and g not in self._skipped), None)
            if shape is not None and group is not None:
                rows.setdefault(group, []).append((i, shape))
        for group, members in rows.items():
            process = self._calibrated.groups[group]
            logs = process.predict(np.array([shape.features for _, shape in members]))
            for (i, shape), value in zip(members, logs.tolist(), strict=True):
                ms = self._calibrated.baseline_ms(shape) * math.exp(value)
                answers[i] = Estimate(ms, f"calibrated:{group.partition(':')[0]}", process.rel_std)
        return answers


class CalibratedCollectives:
    """Transfers inside one node between the measured sizes; everything else is left to `behind`."""

    def __init__(self, calibrated: Calibrated, behind: CollectiveModel) -> None:
        self._behind = behind
        self._tables: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
        for (kind, ranks, nbytes), ms in sorted(calibrated.collectives.items()):
            sizes, times = self._tables.setdefault((kind, ranks), ([], []))
            sizes.append(math.log(nbytes))
            times.append(math.log(ms))

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """The duration of one transfer; beyond the largest measured size at the rate of the largest."""
        table = self._tables.get((kind, placement.ranks)) if placement.nodes == 1 else None
        if table is None:
            return self._behind.estimate(kind, nbytes, placement)
        size = math.log(max(nbytes, 1))
        beyond = max(0.0, size - table[0][-1])
        ms = math.exp(float(np.interp(size, *table)) + beyond)
        return Estimate(ms, "calibrated:collective", _COLLECTIVE_STD)
