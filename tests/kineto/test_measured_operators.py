"""Which operators of traces are priced by what was measured, and with what error: by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autosac.estimator.calibration.traces.correction import Observed, operator_point
from autosac.estimator.calibration.traces.evidence import EvidenceRow
from autosac.estimator.calibration.traces.learn import PricedRow, measured_operators
from autosac.trace import Signature, TensorMeta


def meta(rows: int, dtype: str) -> TensorMeta:
    return TensorMeta((rows, 64), (64, 1), dtype)


def product(dtype: str = "bfloat16") -> Signature:
    return Signature("aten.mm.default", (meta(64, dtype), meta(64, dtype)), (meta(64, dtype),))


def relu(dtype: str = "float32", name: str = "aten.relu.default") -> Signature:
    return Signature(name, (meta(64, dtype),), (meta(64, dtype),))


def priced(signature: Signature, us: float = 100.0, calls: int = 1, rel_std: float = 0.0, **facts: Any) -> PricedRow:
    """A row of a trace, as long as its shipped price says."""
    point = operator_point(signature, us / 1e3)
    assert point is not None
    row = EvidenceRow("t.json", signature, us, calls, rel_std, tf32=False, **facts)
    return PricedRow(row, us, "", Observed(point, 0.0, 1e-4))


def test_rows_of_several_traces_are_averaged_over_calls() -> None:
    """100 us once and 130 us twice are 120 us; the largest deviation, over the root of three calls, beside the 2 % of few."""
    rows = [priced(product(), 100.0, 1, 0.03), priced(product(), 130.0, 2, 0.01)]
    ms, error = measured_operators(rows)[product()]
    assert ms == pytest.approx(0.12, rel=1e-12)
    assert error == pytest.approx(math.hypot(0.03 / math.sqrt(3), 0.02), rel=1e-12)


@pytest.mark.parametrize(
    ("row", "is_measured"),
    [
        (priced(product("bfloat16")), True),
        (priced(product("float32")), False),
        (priced(relu("float32")), True),
        (priced(relu("bfloat16")), True),
        (priced(relu(), has_strides=False), False),
        (priced(relu(), beside=True), False),
    ],
    ids=["product", "product in float32", "float32", "16 bits", "layout unknown", "beside collectives"],
)
def test_what_is_left_out(row: PricedRow, is_measured: bool) -> None:
    """Products in float32 (TF32 or not), what has no known layout, and what only ran beside collectives."""
    assert list(measured_operators([row])) == [row.row.signature] * is_measured


def test_copies_of_the_host_are_left_out() -> None:
    """How fast they are depends on whose memory it is."""
    device = meta(64, "float32")
    copy = Signature("aten._to_copy.default", (device._replace(place="cpu"),), (device,))
    row = priced(copy)
    assert row.observed.point.family == "host copy"
    assert measured_operators([row]) == {}
