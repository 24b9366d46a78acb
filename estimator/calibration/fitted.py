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
from typing import Annotated, Any, ClassVar

import numpy as np

from autosac.estimator.calibration.gaussian import GaussianProcess
from autosac.estimator.calibration.host_memory import HostMemory
from autosac.estimator.calibration.shapes import ShapeFeatures, shape_of
from autosac.estimator.cluster import Placement
from autosac.estimator.models import CollectiveModel, Estimate
from autosac.estimator.profiles import read_document
from autosac.files.schema import STRICT, Keyed, Within
from autosac.files.writing import write_text_atomically
from autosac.trace import Signature

_FORMAT, _SCHEMA = "autosac-calibrated", 1
_COLLECTIVE_STD = 0.1
_LEAST, _MOST = 1e-30, 1e30
Positive = Annotated[float, Within(_LEAST, _MOST)]
NotNegative = Annotated[float, Within(0, _MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What was fitted on one machine.

    `overhead_ms`: the least that an operator takes; `peak_flops` (by arithmetic, FLOP/s) and `bandwidth` (bytes/s): the
    best that was seen; `collectives`: (kind, ranks, bytes) -> ms; `memory`: of a CPU; `about`: date, versions, device.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    device: str
    overhead_ms: NotNegative
    peak_flops: Mapping[str, Positive]
    bandwidth: Positive
    groups: Mapping[str, GaussianProcess]
    collectives: Annotated[Mapping[tuple[str, int, int], Positive], Keyed()] = field(default_factory=dict)
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
    return read_document(path, "calibrated models", _FORMAT, _SCHEMA, Calibrated)


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
