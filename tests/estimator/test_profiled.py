"""Measured operators come first, and their file is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autosac.errors import HardwareError
from autosac.estimator import ProfiledModel, load_hardware, price, save_measured
from autosac.estimator.profiled import signature_key
from autosac.trace import Signature, Trace


def test_a_measured_operator_overrides_every_model(
    tmp_path: Path, make_trace: Callable[..., Trace], mm: Callable[..., Signature]
) -> None:
    """The profile names the file; the others are priced as before."""
    known, other = mm(64, 64, 64), mm(128, 64, 64)
    save_measured(tmp_path / "ops.json", {known: (1.25, 0.01)})
    hardware = replace(load_hardware("h100-sxm-80gb"), measured=str(tmp_path / "ops.json"))
    prices = price(make_trace([known, other]), hardware)
    assert prices.event_ms[0] == 1.25
    assert prices.source == ("profiled", "learned:matmul")


def test_a_profile_finds_its_measurements_beside_it(
    tmp_path: Path, make_trace: Callable[..., Trace], mm: Callable[..., Signature]
) -> None:
    """A relative path is relative to the profile."""
    save_measured(tmp_path / "ops.json", {mm(64, 64, 64): (2.5, 0.0)})
    (tmp_path / "gpu.toml").write_text('base = "h100-sxm-80gb"\nname = "mine"\nmeasured = "ops.json"\n')
    prices = price(make_trace([mm(64, 64, 64)]), load_hardware(str(tmp_path / "gpu.toml")))
    assert prices.event_ms.tolist() == [2.5]


def test_the_key_tells_layouts_and_arguments_apart(mm: Callable[..., Signature]) -> None:
    """Equal calls have equal keys; a stride or an argument more makes another one."""
    signature = mm(8, 8, 8)
    flipped = signature._replace(inputs=(signature.inputs[0]._replace(stride=(1, 8)), signature.inputs[1]))
    scaled = signature._replace(arguments=(("alpha", 2),))
    assert len({signature_key(s) for s in (signature, mm(8, 8, 8), flipped, scaled)}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a file of measured operators"),
        ("[]", "not a file of measured operators"),
        ('{"format": "autosac-measured", "schema": 9}', "has schema 9"),
        ('{"format": "autosac-measured", "schema": 1, "operators": [["k", NaN, 0]]}', "NaN is not a number"),
        ('{"format": "autosac-measured", "schema": 1, "operators": [["k", 0, 0]]}', "expected a number from 1e-12"),
        ('{"format": "autosac-measured", "schema": 1, "operators": [["k", 1]]}', "is missing"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Truncated, foreign, of another version, or with times that are not positive numbers."""
    path = tmp_path / "ops.json"
    path.write_text(text)
    with pytest.raises(HardwareError, match=message):
        ProfiledModel.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message has the path."""
    with pytest.raises(HardwareError, match=r"none\.json cannot be read"):
        ProfiledModel.load(tmp_path / "none.json")
