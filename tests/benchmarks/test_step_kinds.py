"""Kinds of calls in profiled steps: their file, and the figures of the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosac.estimator.calibration.fitted import Calibrated
from autosac.estimator.profiled import save_measured, signature_key
from autosac.trace import Signature, TensorMeta
from benchmarks.step_kinds.__main__ import Judged, compared, figures, group, report
from benchmarks.step_kinds.calibrated import fitted, prices_us, signature_of
from benchmarks.step_kinds.evidence import Kind, load, save

X = TensorMeta((8, 4), (4, 1), "bfloat16")
SUM = Signature(
    "aten.sum.dim_IntList", (X,), (X._replace(shape=(8,), stride=(1,)),), (("dim", (1,)), ("keepdim", False))
)
COPY = Signature("aten.copy_.default", (X, X), (X,), mutates=(0,))


def test_kinds_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Signatures with lists among their arguments, written inputs, times to a hundredth of a microsecond."""
    kinds = [Kind(3, "a job", SUM, 12.34, 5, 6.7, tf32=False), Kind(4, "another", COPY, 1.0, 1, 2.0, tf32=True)]
    save(tmp_path / "kinds.json.gz", kinds)
    assert load(tmp_path / "kinds.json.gz") == kinds


def test_figures_weigh_kinds_by_their_time() -> None:
    """Errors of 50 % for 10 ms and 10 % for 1 ms: median 30 %, half of the time within 50 %, 5.1 ms off, 5 + 1.1 of 11 ms."""
    judged = [
        Judged(Kind(0, "a", SUM, 1000.0, 10, 500.0, tf32=False), 500.0, 1000.0),
        Judged(Kind(0, "a", COPY, 1000.0, 1, 1100.0, tf32=False), 1100.0, 1000.0),
    ]
    assert figures(judged, lambda j: j.before) == ["30.0%", "50.0%", "0.55", "5.1"]
    assert figures(judged, lambda j: j.after) == ["0.0%", "0.0%", "1.00", "0.0"]
    assert [group(j.kind) for j in judged] == ["sums of rows and columns", "other: elementwise"]
    assert "| even | 2 | 11.0 | 30.0% | 0.0% | 50.0% | 0.0% | 0.55 | 1.00 | 5.1 | 0.0 |" in report(judged)


def test_keys_of_measured_operators_are_read_back() -> None:
    """Tensors with strides and places, lists, flags, and an argument that is called like one of Python's keywords."""
    host = X._replace(place="cpu")
    odd = Signature("aten.uniform_.default", (X, host), (X,), (("from", -0.5), ("to", 0.5), ("mask", (True, False))))
    for signature in (SUM, odd, Signature("aten.zeros.default", (), (X,), (("size", (8, 4)),))):
        assert signature_of(signature_key(signature)) == signature
    with pytest.raises(ValueError, match="is not the key of an operator"):
        signature_of("aten.sum")


def test_calibrated_models_stand_beside_the_shipped_ones(tmp_path: Path) -> None:
    """Sums that were measured at twice the bandwidth's time are priced so; what was not measured keeps its price."""
    rows = [(X._replace(shape=(2**n, 4)), 2**n) for n in range(10, 20)]
    measured = {
        SUM._replace(inputs=(x,), outputs=(SUM.outputs[0]._replace(shape=(count,)),)): (2 * count * 10 / 1e9, 0.01)
        for x, count in rows
    }
    save_measured(tmp_path / "profile.measured.json", measured)
    plain = Calibrated(device="cuda", overhead_ms=0.0, peak_flops={"bfloat16": 1e15}, bandwidth=1e12, groups={})
    plain.save(tmp_path / "profile.calibrated.json")
    models = fitted(tmp_path / "profile.measured.json")
    assert set(models.groups) == {"sum:bfloat16", "family reduction:bfloat16"}
    large = next(s for s in measured if s.inputs[0].shape[0] == 2**18)
    kinds = [Kind(0, "a", large, 5.0, 1, 5.0, tf32=False), Kind(0, "a", COPY, 3.0, 1, 3.0, tf32=False)]
    summed, copied = prices_us(kinds, models, "h100-sxm-80gb")
    assert summed == pytest.approx(2 * 2**18 * 10 / 1e6, rel=0.05)
    assert copied == pytest.approx(2.6, rel=1e-4)  # a kernel's start, and very little traffic
    page = compared([Judged(kind, 0.0, kind.us) for kind in kinds], [10.0, 3.0])
    assert "| all | 2 | 0.0 | 50.0% | 0.0% | 100.0% | 0.0% | 1.62 | 1.00 | 0.0 | 0.0 |" in page
