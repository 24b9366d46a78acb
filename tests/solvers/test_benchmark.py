"""The solvers' benchmark runs and says what the plans are worth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The benchmark with these arguments."""
    command = [sys.executable, "-m", "benchmarks.solvers", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_benchmark_prints_a_row_per_solver() -> None:
    """Ten blocks: greedy, knapsack and ILP fit the budget."""
    done = run("--blocks", "10")
    assert done.returncode == 0
    header, *rows = done.stdout.splitlines()
    assert header.split()[:2] == ["blocks", "method"]
    assert [row.split()[1] for row in rows] == ["greedy", "knapsack", "ilp"]
    assert all(row.endswith("fits") for row in rows)


def test_an_impossible_budget_is_one_line() -> None:
    """A tenth of the peak fits no plan: the solver's message on stderr, no traceback."""
    done = run("--blocks", "3", "--budget", "0.1")
    assert done.returncode == 1
    assert done.stderr.startswith("no checkpointing plan fits")
    assert done.stderr.count("\n") == 1
