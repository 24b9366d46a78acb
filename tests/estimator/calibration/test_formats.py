"""Files that calibration has written, as documents that are written by hand: later versions must read them, or say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.errors import HardwareError
from autosac.estimator.calibration.fitted import Calibrated, load_calibrated
from autosac.estimator.profiled import ProfiledModel, save_measured
from autosac.trace import Signature, TensorMeta

FITTED = {
    "format": "autosac-calibrated",
    "schema": 1,
    "device": "a GPU",
    "overhead_ms": 0.0,
    "peak_flops": {"bfloat16": 1e15},
    "bandwidth": 3e12,
    "groups": {},
    "collectives": [["all_gather", 8, 1024, 0.5]],
    "memory": {"fault_ns_per_byte": 0.0, "reuse_bytes": [4.0], "read_ns_per_byte": [0.25]},
    "about": {"torch": "2.13"},
}
MEASURED = {"format": "autosac-measured", "schema": 1, "operators": [["aten.relu.default", 0.25, 0.0]]}


def written(path: Path, document: dict[str, Any]) -> str:
    """The path, after writing."""
    path.write_text(json.dumps(document))
    return str(path)


def test_fitted_models(tmp_path: Path) -> None:
    """What the document says is what is read; written again it is the same."""
    found = load_calibrated(written(tmp_path / "one.json", FITTED))
    assert (found.device, found.overhead_ms, found.bandwidth) == ("a GPU", 0.0, 3e12)
    assert found.collectives == {("all_gather", 8, 1024): 0.5} and found.peak_flops == {"bfloat16": 1e15}
    assert found.memory is not None and found.memory.reuse_bytes == (4.0,)
    found.save(tmp_path / "two.json")
    assert json.loads((tmp_path / "two.json").read_text()) == FITTED


@pytest.mark.parametrize(
    "changes",
    [
        {"overhead_ms": -1.0},
        {"bandwidth": 0},
        {"bandwidth": 2e30},
        {"bandwidth": True},
        {"peak_flops": {"bfloat16": "fast"}},
        {"collectives": [["all_gather", 8, 1024]]},
        {"memory": {"fault_ns_per_byte": 0.0, "reuse_bytes": [], "read_ns_per_byte": []}},
        {"memory": {"fault_ns_per_byte": 0.0, "reuse_bytes": [1.0, 2.0], "read_ns_per_byte": [0.1]}},
        {"memory": {"fault_ns_per_byte": 0.0, "reuse_bytes": [0.0], "read_ns_per_byte": [0.1]}},
        {"groups": []},
    ],
)
def test_damaged_models(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Numbers that cannot be, and parts that do not fit together."""
    with pytest.raises(HardwareError, match=r"one.json is damaged"):
        load_calibrated(written(tmp_path / "one.json", {**FITTED, **changes}))


def test_measured_operators(tmp_path: Path) -> None:
    """A signature's time is found under its key; the document is what is written."""
    relu = Signature("aten.relu.default", (TensorMeta((2,), (1,), "float32"),), (TensorMeta((2,), (1,), "float32"),))
    save_measured(tmp_path / "one.json", {relu: (0.25, 0.125)})
    document = json.loads((tmp_path / "one.json").read_text())
    (row,) = document.pop("operators")
    assert document == {"format": "autosac-measured", "schema": 1} and row[1:] == [0.25, 0.125]
    (answer,) = ProfiledModel.load(tmp_path / "one.json").estimate([relu])
    assert answer is not None and (answer.ms, answer.source, answer.rel_std) == (0.25, "profiled", 0.125)
    assert ProfiledModel.load(tmp_path / "one.json").estimate([relu._replace(name="aten.exp.default")]) == [None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["a", 0.0, 0.0], r"operators\[0\]\[1\] is 0.0: expected a number from 1e-12 to 1e\+09"),
        (["a", -1.0, 0.0], r"operators\[0\]\[1\] is -1.0: expected a number"),
        (["a", 1.0, -0.1], r"operators\[0\]\[2\] is -0.1: expected a number from 0 to 1000"),
        (["a", 1.0], r"operators\[0\]\[2\] is missing"),
        (["a", True, 0.1], r"operators\[0\]\[1\] is True: expected a number"),
        ([1, 1.0, 0.0], r"operators\[0\]\[0\] is 1: expected a text"),
        ("a", r"operators\[0\] is 'a': expected a list or a table"),
    ],
)
def test_damaged_measurements(tmp_path: Path, row: Any, message: str) -> None:
    """Times must be positive, errors not negative."""
    with pytest.raises(HardwareError, match=message):
        ProfiledModel.load(written(tmp_path / "one.json", {**MEASURED, "operators": [row]}))


@pytest.mark.parametrize(("document", "load"), [(FITTED, load_calibrated), (MEASURED, ProfiledModel.load)])
def test_other_files(tmp_path: Path, document: dict[str, Any], load: Callable[[str], Calibrated]) -> None:
    """Of another schema, and of another format."""
    assert load(written(tmp_path / "good.json", document))
    for schema in (0, 2):
        with pytest.raises(HardwareError, match=f"has schema {schema}, this version reads 1: calibrate again"):
            load(written(tmp_path / f"{schema}.json", {**document, "schema": schema}))
    with pytest.raises(HardwareError, match="is not a file of"):
        load(written(tmp_path / "other.json", {**document, "format": "other"}))
