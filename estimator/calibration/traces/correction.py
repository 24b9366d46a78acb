"""The correction of shipped models by measured operators: a hierarchical model of their errors, with an error bar.

    log(measured / shipped) = machine + family + family(shape) + operator(shape) + operator(shape, near) + noise

Each term is a Gaussian process (scikit-learn's): constant over the machine; constant over a family of operators; smooth
over octaves of the shape, shared by the family; the same for one operator and type alone; and one that follows single
shapes. An operator with much evidence is corrected by its own, one with little leans on its family, and far from all
evidence the correction goes back to that of the machine. The posterior's standard deviation is the error bar. (Rasmussen
and Williams, Gaussian Processes for Machine Learning, chapters 2.2 and 4.2.4.)

The shipped models are off by a few per cent in each family, in other directions in each job, for reasons that a signature does
not show (what the caches hold). To carry such errors of one job over to another makes it worse. So a mean m is shrunk towards
nothing, the more the less it stands out (a positive-part estimator, as James and Stein's):

    correction = m * max(0, 1 - (transfer^2 + share * variance) / m^2)

The variances of the terms, `transfer` and `share` are constants. They were chosen among some 25 sets by calibrating with
one or four jobs of 20 profiled steps on an H100 and judging the others, by leaving out one trace of a GPU at a time, and by
five folds of each.

Shapes are the features of `calibration.shapes`, in octaves, and the shipped model's own time. A family without evidence
is left to the shipped models. Collectives are treated alike: their family is their kind, their operator the number of
ranks.

The file is JSON: ``{"format": "autosac-corrections", "schema": 1, "about": {...}, "levels": {...}, "rows": [[family,
operator, [features], log ratio, variance], ...]}``; the process is built from its rows when it is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray

from autosac.errors import HardwareError
from autosac.estimator.calibration.shapes import shape_of
from autosac.estimator.cluster import Placement
from autosac.estimator.models import CollectiveModel, Estimate, OperatorModel, first_estimates
from autosac.estimator.profiles import read_document
from autosac.estimator.work import base_name, crosses_to_host, family
from autosac.files.schema import STRICT, Pairs, Within
from autosac.files.writing import write_text_atomically
from autosac.trace import Signature

_FORMAT, _SCHEMA = "autosac-corrections", 1
_FEATURES = 12
_WIDE, _NEAR = 6.0, 1.5  # octaves
_FREE, _APART = 1e6, 0.1  # length scales that ignore a column, and that keep two codes apart
# The variance of each term, in the order of the module's docstring.
_LEVELS = {
    "machine": 2e-4,
    "family": 5e-3,
    "family_shape": 4e-3,
    "operator_shape": 0.01,
    "near": 0.05,
    "noise": 0.01,
}
_TRANSFER, _UNSURE = 0.06, 0.1
_MOST_ROWS, _TINY = 2000, 1e-12
_MOST_LOG = math.log(100.0)


class SignaturePoint(NamedTuple):
    """An operator or a collective as the correction sees it."""

    family: str
    operator: str
    features: tuple[float, ...]


class Observed(NamedTuple):
    """The logarithm of measured over shipped at a point, and the variance with which it is known."""

    point: SignaturePoint
    log_ratio: float
    variance: float


def operator_point(signature: Signature, shipped_ms: float, *, tf32: bool = False) -> SignaturePoint | None:
    """The point of an operator whose shipped price is this; None if nothing of it runs on the device."""
    shape = shape_of(signature)
    if shape is None or not shipped_ms > 0:
        return None
    kind = family(signature.name) or "unknown"
    if crosses_to_host(signature):
        kind = "host copy"
    dtype = shape.groups[0].rpartition(":")[2]
    if tf32 and dtype == "float32" and kind in ("matmul", "batched_matmul"):
        dtype = "tf32"
    features = (math.log2(shipped_ms * 1e3), *shape.features)[:_FEATURES]
    return SignaturePoint(kind, f"{base_name(signature.name)}:{dtype}", features + (0.0,) * (_FEATURES - len(features)))


def collective_point(kind: str, nbytes: int, ranks: int, shipped_ms: float) -> SignaturePoint:
    """The point of a transfer."""
    features = (math.log2(shipped_ms * 1e3), math.log2(max(nbytes, 1)))
    return SignaturePoint(f"collective {kind}", str(ranks), features + (0.0,) * (_FEATURES - 2))


@dataclass(frozen=True)
class Correction:
    """A fitted correction. `levels`: the variance of each term and of the noise; `about`: where it is from."""

    observed: tuple[Observed, ...]
    levels: Mapping[str, float]
    about: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def fit(observed: Sequence[Observed], about: Mapping[str, Any] | None = None) -> Correction:
        """A correction by these rows. Of very many those that are known best are kept."""
        if not observed:
            raise HardwareError("there is nothing to fit a correction to")
        kept = sorted(observed, key=lambda o: o.variance)[:_MOST_ROWS]
        return Correction(tuple(kept), _LEVELS, about or {})

    @cached_property
    def families(self) -> frozenset[str]:
        """Those with evidence."""
        return frozenset(o.point.family for o in self.observed)

    @cached_property
    def _process(self) -> _Process:
        return _Process(self.observed, self.levels)

    def predict(self, points: Sequence[SignaturePoint]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The logarithm of the correction at each point, and its standard deviation."""
        if not points:
            return np.zeros(0), np.zeros(0)
        mean, std = self._process.predict(points)
        unsure = _TRANSFER**2 + _UNSURE * np.maximum(std**2 - self.levels["noise"], 0.0)
        return mean * np.maximum(0.0, 1 - unsure / np.maximum(mean**2, _TINY)), std

    def save(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""
        rows = [
            [*o.point[:2], [round(f, 4) for f in o.point.features], round(o.log_ratio, 6), float(f"{o.variance:.4g}")]
            for o in self.observed
        ]
        document = {"format": _FORMAT, "schema": _SCHEMA, "about": dict(self.about), "levels": dict(self.levels)}
        write_text_atomically(path, json.dumps(document | {"rows": rows}, allow_nan=False))


class _Process:
    """scikit-learn's regressor behind codes for names."""

    def __init__(self, observed: Sequence[Observed], levels: Mapping[str, float]) -> None:
        from sklearn.gaussian_process import GaussianProcessRegressor

        points = [o.point for o in observed]
        self._families = {name: i for i, name in enumerate(sorted({p.family for p in points}))}
        self._operators = {name: i for i, name in enumerate(sorted({p[:2] for p in points}))}
        alpha = np.array([o.variance for o in observed])
        self._regressor = GaussianProcessRegressor(_kernel(levels), alpha=alpha, optimizer=None)
        self._regressor.fit(self._rows(points), np.array([o.log_ratio for o in observed]))

    def _rows(self, points: Sequence[SignaturePoint]) -> NDArray[np.float64]:
        codes = [(self._families.get(p.family, -1), self._operators.get(p[:2], -1), *p.features) for p in points]
        return np.array(codes, dtype=np.float64)

    def predict(self, points: Sequence[SignaturePoint]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        mean, std = self._regressor.predict(self._rows(points), return_std=True)
        return np.clip(mean, -_MOST_LOG, _MOST_LOG), std


def covariance(points: Sequence[SignaturePoint], levels: Mapping[str, float]) -> NDArray[np.float64]:
    """The prior covariance of the logarithms of corrections at these points, without noise."""
    families = {name: i for i, name in enumerate(sorted({p.family for p in points}))}
    operators = {name: i for i, name in enumerate(sorted({p[:2] for p in points}))}
    rows = [(families[p.family], operators[p[:2]], *p.features) for p in points]
    return np.asarray(_kernel(levels).k1(np.array(rows, dtype=np.float64)))


def _kernel(levels: Mapping[str, float]) -> Any:
    """The sum of the module's docstring."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

    def scales(of_family: float, of_operator: float, of_shape: float) -> list[float]:
        return [of_family, of_operator] + [of_shape] * _FEATURES

    terms = {
        "family": RBF(scales(_APART, _FREE, _FREE), "fixed"),
        "family_shape": RBF(scales(_APART, _FREE, _WIDE), "fixed"),
        "operator_shape": RBF(scales(_APART, _APART, _WIDE), "fixed"),
        "near": Matern(scales(_APART, _APART, _NEAR), "fixed", nu=1.5),
    }
    kernel = ConstantKernel(levels["machine"], "fixed")
    for name, term in terms.items():
        kernel = kernel + ConstantKernel(levels[name], "fixed") * term
    return kernel + WhiteKernel(levels["noise"], "fixed")


_Level = Annotated[float, Within(1e-6, 1e3)]
_Features = Annotated[tuple[Annotated[float, Within(-200, 200)], ...], Len(_FEATURES, _FEATURES)]
_Rows = tuple[tuple[str, str, _Features, Annotated[float, Within(-30, 30)], Annotated[float, Within(1e-12, 1e6)]], ...]


@dataclass(frozen=True)
class _File:
    """What a file of corrections holds: levels, and rows of family, operator, features, log ratio and variance."""

    __pydantic_config__: ClassVar[Any] = STRICT

    levels: Annotated[tuple[tuple[str, _Level], ...], Pairs(tuple(_LEVELS))]
    rows: Annotated[_Rows, Len(1, _MOST_ROWS)]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if missing := [name for name in _LEVELS if name not in dict(self.levels)]:
            raise ValueError(f"levels.{missing[0]} is missing")


@lru_cache(maxsize=8)
def load_correction(path: str) -> Correction:
    """Read a file of corrections. HardwareError if it is none, is damaged, or holds numbers that are not finite."""
    found = read_document(path, "corrections", _FORMAT, _SCHEMA, _File)
    observed = tuple(
        Observed(SignaturePoint(family, operator, features), log_ratio, variance)
        for family, operator, features, log_ratio, variance in found.rows
    )
    return Correction(observed, dict(found.levels), found.about)


# ---- the models ------------------------------------------------------------------------------------------------


class CorrectedOperators:
    """The shipped models with the correction on top, for the families that it has evidence of."""

    def __init__(self, correction: Correction, shipped: Sequence[OperatorModel], *, tf32: bool = False) -> None:
        """`shipped`: models in order of preference, of which the last knows every operator."""
        self._correction, self._shipped, self._tf32 = correction, tuple(shipped), tf32

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """One answer for each signature; None where there is no evidence of its family."""
        answers: list[Estimate | None] = [None] * len(signatures)
        prices = first_estimates(self._shipped, signatures) if signatures else []
        chosen: list[tuple[int, SignaturePoint]] = []
        for i, (signature, price) in enumerate(zip(signatures, prices, strict=True)):
            point = operator_point(signature, price.ms, tf32=self._tf32)
            if point is not None and point.family in self._correction.families:
                chosen.append((i, point))
        means, stds = self._correction.predict([point for _, point in chosen])
        for (i, _), mean, std in zip(chosen, means.tolist(), stds.tolist(), strict=True):
            answers[i] = Estimate(prices[i].ms * math.exp(mean), f"corrected:{prices[i].source}", std)
        return answers


class CorrectedTransfers:
    """Collectives inside one node, corrected where the traces hold collectives of their kind."""

    def __init__(self, correction: Correction, behind: CollectiveModel) -> None:
        self._correction, self._behind = correction, behind

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """The duration of one transfer."""
        plain = self._behind.estimate(kind, nbytes, placement)
        point = collective_point(kind, nbytes, placement.ranks, plain.ms) if plain.ms > 0 else None
        if point is None or placement.nodes > 1 or point.family not in self._correction.families:
            return plain
        mean, std = self._correction.predict([point])
        return Estimate(plain.ms * math.exp(float(mean[0])), f"corrected:{plain.source}", float(std[0]))
