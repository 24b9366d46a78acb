"""PyTorch's own planner in the harness: what it is given, and what becomes of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autosac.api import EagerCaptures
from autosac.bench import pytorch_tools
from autosac.bench.policies import TOOLS
from autosac.bench.suite import load_suite, make_step_of
from autosac.cli.parser import main
from autosac.errors import InfeasibleError, UsageError
from autosac.estimator.sac_rules import OperatorGroup
from autosac.estimator.sac_stats import SACModStats, SACOperator
from autosac.planning.planner import Goal, Planner
from autosac.plans import Plan
from autosac.solvers import CurveSegment, GlobalProblem, GlobalUnit, PeakPoint

Write = Callable[..., Path]
GIB = 2**30


def stats_of(name: str, rows: list[tuple[float, int, bool | None]]) -> SACModStats:
    """A module of operators with these times, bytes, and what is settled about them."""
    operators = tuple(
        SACOperator(f"aten.op{i}", 0, ms, nbytes, False, False, None, False, ())
        for i, (ms, nbytes, _) in enumerate(rows)
    )
    groups = tuple(OperatorGroup((i,), forced) for i, (_, _, forced) in enumerate(rows))
    return SACModStats(module=name, region=0, operators=operators, groups=groups, implicit_bytes=0, boundary_bytes=0)


def unit_of(name: str, implicit: int, parent: int = -1) -> GlobalUnit:
    """A unit that saves all that it holds."""
    return GlobalUnit(
        name=name,
        implicit_bytes=implicit,
        boundary_bytes=0,
        stored_bytes=0,
        discardable_bytes=implicit,
        recompute_ms=3.0,
        segments=(CurveSegment(1.0, 0.0),),
        parent=parent,
    )


ROWS: list[tuple[float, int, bool | None]] = [(1.0, GIB, None), (2.0, GIB, None)]


def test_the_groups_that_are_kept() -> None:
    """Half of the bytes that are free to choose keeps the dearer of two results; what is settled is none of its business."""
    stats = stats_of("a", [*ROWS, (50.0, 4 * GIB, True), (60.0, 4 * GIB, False)])
    assert pytorch_tools.kept_groups(stats, 0.5) == (1,)
    assert pytorch_tools.kept_groups(stats, 1.0) == (0, 1)
    assert pytorch_tools.kept_groups(stats, 0.0) == ()


def test_a_group_is_kept_as_a_whole() -> None:
    """Operators that are decided as one are kept together, or not at all."""
    operators = stats_of("a", [*ROWS, (4.0, GIB, None)]).operators
    groups = (OperatorGroup((0, 2), None), OperatorGroup((1,), None))
    stats = SACModStats(module="a", region=0, operators=operators, groups=groups, implicit_bytes=0, boundary_bytes=0)
    assert pytorch_tools.kept_groups(stats, 0.7) == (0,)
    assert pytorch_tools.kept_groups(stats, 0.4) == (1,)


def two_blocks() -> tuple[GlobalProblem, list[SACModStats]]:
    """Units "1" and "11", 2 GiB each, one after the other: 10 GiB beside them, 1 GiB more in the backward of the first."""
    problem = GlobalProblem(
        units=(unit_of("1", 2 * GIB), unit_of("11", 2 * GIB)),
        points=(
            PeakPoint("forward 1", 12 * GIB, ((0, 1),)),
            PeakPoint("forward 11", 14 * GIB, ((1, 1),)),
            PeakPoint("backward 11", 13 * GIB, ((1, -1),)),
            PeakPoint("backward 1", 11 * GIB, ((0, -1),)),
            PeakPoint("optimizer", 12 * GIB),
        ),
    )
    return problem, [stats_of("1", ROWS), stats_of("11", ROWS)]


def test_the_graph_of_modules() -> None:
    """Each module has the highest memory of its backward, the root that of the step; "11" does not lie within "1"."""
    graph = pytorch_tools.module_graph(*two_blocks())
    held = {node["fqn"]: node["act_total"] / GIB for node in graph.nodes}
    assert held == {"model": 14, "model.1": 12, "model.11": 13}
    assert graph.fw_post_order == ["model.1", "model.11", "model"]
    assert graph.ad_matrix.tolist() == [[1, 1, 1], [0, 1, 0], [0, 0, 1]]
    assert [node["is_leaf"] for node in graph.nodes] == [True, False, False]
    assert [node["act_fw_per_module"] for node in graph.nodes] == [0, 2 * GIB, 2 * GIB]


def test_modules_in_a_module_come_before_it_in_the_forward() -> None:
    """A nested unit follows its parent in the tree and precedes it where their forwards end."""
    problem = GlobalProblem(
        units=(unit_of("a", 4 * GIB), unit_of("a.b", 2 * GIB, 0)),
        points=(PeakPoint("end", 4 * GIB, ((0, 1), (1, 1))), PeakPoint("backward", 4 * GIB, ((0, -1), (1, -1)))),
    )
    graph = pytorch_tools.module_graph(problem, [stats_of("a", ROWS), stats_of("a.b", ROWS)])
    assert [node["fqn"] for node in graph.nodes] == ["model", "model.a", "model.a.b"]
    assert graph.fw_post_order == ["model.a.b", "model.a", "model"]


def test_solved_by_pytorch() -> None:
    """12 GiB, 2 below the peak, make it discard 2 GiB in all; there is no plan for less than the optimizer's 12 GiB leave."""
    problem, statistics = two_blocks()
    discarded = pytorch_tools.solve(problem, statistics, 12 * GIB)
    assert 2 * sum(discarded.values()) == pytest.approx(2.0, abs=0.01)
    with pytest.raises(InfeasibleError, match="no plan within the budget"):
        pytorch_tools.solve(problem, statistics, 9 * GIB)


def test_in_the_harness(write_suite: Write, capfd: pytest.CaptureFixture[str]) -> None:
    """Its plan fits the budget when simulated, can be loaded, and is no faster than the exact one."""
    path = write_suite(budgets=["69MiB"], policies=["none", "full", "joint", TOOLS])
    code = main(["bench", str(path), "-o", str(path.parent / "out"), "--configurations", "C1", "--json", "--quiet"])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    rows = {row["policy"]: row for row in json.loads(out)["rows"]}
    tools = rows[TOOLS]
    assert tools["error"] == ""
    assert tools["peak_active_bytes"] <= 69 * 2**20 < rows["none"]["peak_active_bytes"]
    assert rows["joint"]["step_ms"] <= tools["step_ms"] <= rows["full"]["step_ms"]
    assert tools["recompute_ms"] <= rows["full"]["recompute_ms"]
    assert Plan.load(path.parent / "out" / tools["plan_file"]).units


def test_modules_that_run_twice(write_suite: Write) -> None:
    """A step with two microbatches is no step that it plans for: one line says so."""
    suite = load_suite(write_suite())
    make_step = make_step_of(suite.folder, suite.models[0].make_step, dict(suite.models[0].configurations[0].arguments))

    def twice(device: torch.device) -> object:
        model, _ = make_step(device)
        x = torch.ones(512, 64, device=device)

        def step() -> None:
            model(x).sum().backward()
            model(x).sum().backward()

        return model, step

    planner = Planner(EagerCaptures(twice, suite.target).observed(), Goal(budget_bytes=GIB))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"run once in a step; blocks\.0 runs more often"):
        pytorch_tools.plan_within(planner, GIB)
