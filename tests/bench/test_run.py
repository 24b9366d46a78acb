"""A tiny suite from end to end, predicted and measured on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.bench.policies import Policy, block_plan, blocks_of
from autosac.bench.run import stage_notes
from autosac.bench.subjects import EagerSubject
from autosac.bench.suite import load_suite
from autosac.cli.parser import main
from autosac.errors import UsageError
from autosac.plans import Plan

Write = Callable[..., Path]
CASE = '[case_study]\nmodel = "net"\nconfiguration = "C1"\nmodule = "blocks.3"\nbudgets = ["68.5MiB", "69MiB"]\nsolver = "ilp"'
# What differs: checkpointing keeps the CPU generator's state, 5,056 bytes a module, which no operator allocates.
TOLERANCE = 0.01


def run(path: Path, capfd: pytest.CaptureFixture[str], *options: str) -> Any:
    """``autosac bench --json`` of the first configuration."""
    capfd.readouterr()
    code = main(
        ["bench", str(path), "-o", str(path.parent / "out"), "--configurations", "C1", "--json", "--quiet", *options]
    )
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)


def test_predicted_and_measured_on_the_cpu(write_suite: Write, capfd: pytest.CaptureFixture[str]) -> None:
    """Predicted peaks are those of real runs, without checkpointing, with all of it, and under a plan."""
    path = write_suite(budgets=["3.3MiB"], policies=["none", "full", "knapsack"])
    rows = run(path, capfd, "--measure", "--device", "cpu", "--steps", "1")["rows"]
    assert [row["policy"] for row in rows] == ["none", "full", "knapsack"]
    for row in rows:
        assert row["error"] == "" and row["measured"]["error"] == ""
        assert row["peak_active_bytes"] == pytest.approx(row["measured"]["peak_active_bytes"], rel=TOLERANCE)
        assert row["measured"]["step_ms"] > 0
    none, full, knapsack = (row["measured"]["peak_active_bytes"] for row in rows)
    assert full * (1 - TOLERANCE) <= knapsack <= 3.3 * 2**20 < none
    assert "### Measured beside predicted" in (path.parent / "out" / "results.md").read_text()


def test_every_policy_and_the_case_study(write_suite: Write, capfd: pytest.CaptureFixture[str]) -> None:
    """Plans meet the budget with no more recomputation than full checkpointing; plans and the report's files are there."""
    path = write_suite(
        budgets=["69MiB"], policies=["none", "full", "selective-2", "selective-op", "greedy", "ilp", "joint"], more=CASE
    )
    document = run(path, capfd)
    rows = {row["policy"]: row for row in document["rows"]}
    budget = 69 * 2**20
    assert (
        rows["full"]["peak_active_bytes"] < rows["selective-2"]["peak_active_bytes"] < rows["none"]["peak_active_bytes"]
    )
    assert rows["none"]["peak_active_bytes"] > budget and rows["none"]["recompute_ms"] == 0
    for name in ("greedy", "ilp", "joint"):
        assert rows[name]["peak_active_bytes"] <= budget
        assert rows[name]["recompute_ms"] <= rows["full"]["recompute_ms"]
        assert len(Plan.load(path.parent / "out" / rows[name]["plan_file"]).units) > 0
    names = {Path(file).name for file in document["files"]}
    assert {"results.csv", "results.md", "results.html", "peak.png", "decisions.png", "tradeoff.png"} <= names
    assert any(claim.startswith("discarding 60% of blocks.3") for claim in document["claims"])


def test_a_budget_that_nothing_meets_is_a_row(write_suite: Write, capfd: pytest.CaptureFixture[str]) -> None:
    """The other policies are still shown; the row says the smallest budget that works."""
    (none, ilp) = run(write_suite(budgets=["100KiB"], policies=["none", "ilp"]), capfd)["rows"]
    assert none["error"] == "" and ilp["step_ms"] is None
    assert "the smallest budget found to work is" in ilp["error"]


def test_the_documentation_page(write_suite: Write, capfd: pytest.CaptureFixture[str]) -> None:
    """--docs writes the tables under the suite's name, with the command that prints them."""
    path = write_suite()
    run(path, capfd, "--docs", str(path.parent / "bench.md"))
    text = (path.parent / "bench.md").read_text()
    assert text.startswith(f"# Tiny\n\nPrinted by `autosac bench {path}`") and "| net C1 | full |" in text


@pytest.fixture
def subject(write_suite: Write) -> EagerSubject:
    """The tiny model's first configuration."""
    suite = load_suite(write_suite())
    return EagerSubject(suite, suite.models[0], suite.models[0].configurations[0], target="cpu")


def test_blocks_and_their_plans(subject: EagerSubject) -> None:
    """Blocks are the members of numbered containers or match patterns; selective-2 takes the second and the fourth."""
    policies = subject.policies
    blocks = blocks_of(policies, ())
    assert [block.name for block in blocks] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert [block.name for block in blocks_of(policies, ["blocks.[13]"])] == ["blocks.1", "blocks.3"]
    with pytest.raises(UsageError, match="no module that can be checkpointed matches 'layers"):
        blocks_of(policies, ["layers.*"])
    full = block_plan(Policy("full"), policies, blocks)
    assert len(full.units) == 4 and not any(d.keep for unit in full.units for d in unit.decisions)
    assert [u.fqn for u in block_plan(Policy("selective-2"), policies, blocks).units] == ["blocks.1", "blocks.3"]


def test_selective_op_keeps_every_second_product(subject: EagerSubject) -> None:
    """Of a block's two matrix products the first is kept, as TorchTitan does."""
    plan = block_plan(Policy("selective-op"), subject.policies, blocks_of(subject.policies, ()))
    products = [(d.occurrence, d.keep) for d in plan.units[0].decisions if d.op == "aten.addmm.default"]
    assert products == [(0, True), (1, False)]


def test_a_plan_is_captured_once(subject: EagerSubject) -> None:
    """Two policies that come to the same units share a simulation."""
    assert subject.simulate(Policy("full")) is subject.simulate(Policy("selective-1"))


def test_what_steps_of_a_pipeline_are_is_said() -> None:
    """A note says so; of a job without stages there is none."""
    assert stage_notes("llama3 pp", 1) == []
    (note,) = stage_notes("llama3 pp", 4)
    assert note.startswith("llama3 pp: steps are those of all 4 pipeline stages together")
