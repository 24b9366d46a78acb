"""The releases of PyTorch that AutoSAC is tested with."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from autosac import torch_version
from autosac.cli.progress import progress_line
from autosac.simulation import TITAN_ALLOCATOR, Target


def test_the_package_asks_for_the_tested_releases() -> None:
    """pyproject.toml accepts the oldest and the newest tested release, the installed one, and none beyond them."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    (accepted,) = (
        SpecifierSet(text.removeprefix("torch")) for text in project["dependencies"] if text.startswith("torch>")
    )
    for (major, minor), inside in ((torch_version.OLDEST, True), (torch_version.NEWEST, True)):
        assert accepted.contains(f"{major}.{minor}.0") is inside
    assert not accepted.contains(f"{torch_version.NEWEST[0]}.{torch_version.NEWEST[1] + 1}.0")
    assert not accepted.contains(f"{torch_version.OLDEST[0]}.{torch_version.OLDEST[1] - 1}.1")
    assert accepted.contains(torch.__version__.partition("+")[0])


@pytest.mark.parametrize("installed", ["2.11.0", "2.15.1", "2.15.0+cpu", "unknown"])
def test_tested_releases_need_no_warning(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches and builds of a tested release are tested; a version that is no number says nothing."""
    monkeypatch.setattr(torch_version, "version", lambda _: installed)
    assert torch_version.too_new() is None


@pytest.mark.parametrize("installed", ["2.16.0", "2.16.0a0+gitdeadbee", "3.0.0"])
def test_a_newer_torch_is_told_in_one_line(
    installed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that capture name both versions on standard error, once, unless they are quiet."""
    monkeypatch.setattr(torch_version, "version", lambda _: installed)
    for enabled in (True, False):
        with progress_line(enabled=enabled):
            pass
    said = capsys.readouterr().err
    assert (
        said
        == f"autosac: torch {installed} is newer than 2.15, the newest release tested with AutoSAC: check its figures\n"
    )


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to warn of; the import says what is missing."""

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(torch_version, "version", missing)
    assert torch_version.too_new() is None


@pytest.mark.parametrize(
    ("gpu", "release", "expandable"),
    [
        ("mi300x", "2.11.0", False),
        ("mi300x", "2.12.0+rocm7.2", True),
        ("mi300x", "unknown", True),
        ("h100-sxm-80gb", "2.11.0", True),
    ],
)
def test_expandable_segments_have_no_effect_on_amd_before_2_12(
    gpu: str, release: str, expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target has the allocator's settings that the installed PyTorch would follow on that GPU."""
    monkeypatch.setattr(torch_version, "version", lambda _: release)
    assert Target.of(gpu, 8, allocator=TITAN_ALLOCATOR).allocator.expandable_segments is expandable
