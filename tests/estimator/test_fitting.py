"""The programs that fit the shipped models: reproducible, and strict about what was measured."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from autosac.estimator.log_sigmoid import Curve
from benchmarks import fit_collectives, fit_models, measurements

pytest.importorskip("scipy")
threadpoolctl = pytest.importorskip("threadpoolctl")  # comes with scikit-learn
MODELS = Path(__file__).resolve().parents[2] / "estimator" / "data" / "models"
FEW = {"trees": 40, "leaves": 15}
DATA = os.environ.get("AUTOSAC_MEASUREMENTS", "")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """A gzipped CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def products(spoiled: str | None = None) -> list[dict[str, object]]:
    """Products of 300 shapes at 60 % of an A100's peak and a microsecond, by one framework; `spoiled` is one of the times."""
    found: list[dict[str, object]] = []
    for number in range(300):
        m, n, k = 32 << number % 10, 128 << number % 7, 64 << number % 9
        ms = 2 * m * n * k / 312e12 / 0.6 * 1e3 + 1e-3
        row = {"gemm_dtype": "bfloat16", "framework": "SGLang", "m": m, "n": n, "k": k, "latency_ms": f"{ms:.9f}"}
        found.append(row | ({"latency_ms": spoiled} if spoiled is not None and number == 7 else {}))
    return found


def test_the_same_data_gives_the_same_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fits of one folder, with 40 trees each, agree in every array, every byte of the file and every figure."""
    write(tmp_path / "ops" / "gemm_a100_sxm.csv.gz", products())
    boost = fit_models.boost
    monkeypatch.setattr(fit_models, "boost", lambda *rest, **more: boost(*rest, **more | FEW))
    with threadpoolctl.threadpool_limits(1):
        first, second = (fit_models.fit_gemm(tmp_path, "a100-sxm-80gb", "bfloat16") for _ in range(2))
    arrays, again = first[0].arrays("x"), second[0].arrays("x")
    assert arrays.keys() == again.keys()
    assert all((arrays[name] == again[name]).all() for name in arrays)
    assert fit_models.packed(arrays) == fit_models.packed(again)
    assert first[1] == second[1]
    assert first[1]["held_out"]["count"] > 10


@pytest.mark.parametrize("value", ["nan", "inf", "-1.5", "0", "", "fast"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    """NaN and the like among the measurements end the fit with the file, the column and the row."""
    path = tmp_path / "ops" / "gemm_a100_sxm.csv.gz"
    write(path, products(spoiled=value))
    with pytest.raises(ValueError, match=r"gemm_a100_sxm.*latency_ms must be a positive number.*m=4096, n=128, k=8192"):
        measurements.gemm(tmp_path, "a100-sxm-80gb", "bfloat16")


def test_a_curve_is_found_again() -> None:
    """Times that a known log-sigmoid curve gives are fitted to 1 %, on the held-out sizes too."""
    truth = Curve(latency_us=6.0, hop_us=0.8, share=0.8, steepness=0.5, midpoint=15.0)
    rows = [
        (ranks, 2**power, fit_collectives.microseconds(truth, "all_gather", ranks, 2**power, 300.0))
        for ranks in (2, 4, 8)
        for power in range(10, 29)
    ]
    held_out = [fit_collectives.is_held_out(nbytes) for _, nbytes, _ in rows]
    assert any(held_out) and not all(held_out)
    curve, errors = fit_collectives.fit_curve(rows, "all_gather", 300.0)
    assert np.abs(errors).max() < math.log(1.01)
    assert curve.latency_us == pytest.approx(truth.latency_us, rel=0.05)


@pytest.mark.skipif(not DATA, reason="AUTOSAC_MEASUREMENTS names no folder of measurements")
@pytest.mark.parametrize("part", ["memory", "collectives", "attention"])
def test_the_shipped_models_are_what_the_measurements_give(part: str) -> None:
    """Refitted from the folder, every small model equals the shipped file."""
    fit = {
        "memory": fit_models.fit_memory,
        "collectives": fit_models.fit_collectives,
        "attention": fit_models.fit_attention_ratios,
    }
    assert fit[part](Path(DATA)) == json.loads((MODELS / f"{part}.json").read_text())
