"""Which TorchTitan takes which job: what is wrong is said in one line, with what to install."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from autosac.cli.parser import main
from autosac.titan import version as titan_version
from autosac.titan.python_jobs import missing_package

PLAN = ("plan", "--gpu", "h100-sxm-80gb", "--quiet")


def complaint(capsys: pytest.CaptureFixture[str], job: str) -> str:
    """What planning a job ends with, which is wrong usage."""
    assert main([*PLAN, job]) == 2
    return capsys.readouterr().err


def test_a_job_file_needs_torchtitan_0_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain installation brings TorchTitan 0.3, which reads no job files: what to install is said, with the file's name."""
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "llama3"\n')
    monkeypatch.setattr(titan_version, "version", lambda _: "0.3.0")
    said = complaint(capsys, str(job))
    assert f"job file {job}: torchtitan 0.3.0 is installed, which takes no job files" in said
    assert "pip install torchtitan==0.2.2" in said and said.count("\n") == 1


def test_without_torchtitan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both versions are named, each with its kind of job."""

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(titan_version, "version", missing)
    said = complaint(capsys, "job.toml")
    assert "pip install torchtitan==0.2.2 for job files (TOML), ==0.3.0 for MODULE:CONFIG" in said


def test_a_python_configuration_needs_torchtitan_0_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TorchTitan 0.2 takes no MODULE:CONFIG."""
    monkeypatch.setattr(titan_version, "version", lambda _: "0.2.2")
    assert "for llama3:llama3_8b, pip install torchtitan==0.3.0" in complaint(capsys, "llama3:llama3_8b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package.part", ": no_such_package is not installed"),
        ("from json import no_such_name", ": cannot import name 'no_such_name' from 'json'"),
        ("import json", ""),
    ],
)
def test_a_package_that_a_job_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    """TorchTitan says only that it cannot import the job's module; a module that is not there at all is another matter."""
    name = f"needy_job_{len(said)}"
    (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_package(name).startswith(said) and bool(missing_package(name)) == bool(said)
    assert missing_package("no_such_job.anywhere") == ""
