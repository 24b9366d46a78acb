"""A plugin for pytest: which test runs which lines, its processes included, how long it takes, and what it shares with others.

    COVERAGE_FILE=FOLDER/lines python -m pytest -p benchmarks.mutation.contexts --cov --cov-context=test --cov-report= tests

leaves in the folder what `benchmarks.mutation.covering` reads.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

# Coverage measures processes with this configuration: JSON in base64 (coverage/patch.py).
_CONFIGURATION = "COVERAGE_PROCESS_CONFIG"
_seconds: dict[str, float] = {}
_shared: dict[str, list[str]] = {}


def _name_processes(test: str, when: str) -> None:
    """Lines of processes that start from now on count for this part of a test."""
    if _CONFIGURATION in os.environ:
        configuration = json.loads(base64.b64decode(os.environ[_CONFIGURATION]))
        configuration["context"] = f"{test}|{when}"
        os.environ[_CONFIGURATION] = base64.b64encode(json.dumps(configuration).encode()).decode()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Its fixtures are set up."""
    _name_processes(item.nodeid, "setup")
    fixtures: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - private to pytest
    _shared[item.nodeid] = sorted(
        f"{found[-1].baseid}::{name}" for name, found in fixtures.items() if found and found[-1].scope != "function"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """It runs."""
    _name_processes(item.nodeid, "run")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One of its parts is over."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    """Write the file; the workers of a parallel run write one each."""
    folder = Path(os.environ["COVERAGE_FILE"]).parent
    folder.mkdir(parents=True, exist_ok=True)
    tests = {name: {"seconds": round(_seconds.get(name, 0.0), 2), "shared": _shared[name]} for name in _shared}
    (folder / f"tests-{os.getpid()}.json").write_text(json.dumps(tests))
