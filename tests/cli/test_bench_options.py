"""What the options of ``autosac bench`` change of a suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosac.bench import report, run
from autosac.bench.policies import Policy
from autosac.bench.suite import Suite, load_suite
from autosac.cli.parser import main

SUITE = """
budgets = ["6MiB"]
policies = ["none", "full"]
[[models]]
name = "m"
make_step = "net.py:make_step"
configurations = [{ name = "a" }, { name = "b" }]
[[models]]
name = "n"
make_step = "net.py:make_step"
configurations = [{ name = "b" }]
"""


class _ReadSuite(Exception):
    """The suite has been read."""


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], {}),
        (["--no-cache"], {"use_cache": False}),
        (["--policies", "full,ilp"], {"policies": (Policy("full"), Policy("ilp"))}),
        (["--budgets", "7MiB,50%"], {"budgets": ("7MiB", "50%")}),
        (["--time-limit", "7.5"], {"time_limit_s": 7.5}),
    ],
    ids=["nothing", "no cache", "policies", "budgets", "time limit"],
)
def test_what_an_option_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], changes: dict[str, Any]
) -> None:
    """Only what it is called after: the rest is as the file has it."""
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    assert _asked_for(monkeypatch, path, words) == replace(load_suite(path), **changes)


def test_a_part_of_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and configurations by their names."""
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    for words, left in (
        (["--models", "n"], [("n", "b")]),
        (["--configurations", "b"], [("m", "b"), ("n", "b")]),
        (["--models", "m", "--configurations", "a"], [("m", "a")]),
    ):
        suite = _asked_for(monkeypatch, path, words)
        assert [(model.name, c.name) for model in suite.models for c in model.configurations] == left


def _asked_for(monkeypatch: pytest.MonkeyPatch, path: Path, words: list[str]) -> Suite:
    """The suite that the command would run."""
    found: list[Suite] = []

    def run_suite(suite: Suite, *_: Any) -> Any:
        found.append(suite)
        raise _ReadSuite

    monkeypatch.setattr(run, "run_suite", run_suite)
    monkeypatch.setattr(report, "check_pictures", lambda: None)
    with pytest.raises(_ReadSuite):
        main(["bench", str(path), "-o", str(path.with_name("out")), *words])
    return found[0]
