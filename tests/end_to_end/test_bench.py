"""The harness on TorchTitan jobs that `autosac plan` plans in a way of its own: compiled ones, and those in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.bench.planners import find_plan
from autosac.bench.policies import Policy
from autosac.bench.subjects import TitanSubject
from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.jobs.tasks import TitanJob, plan_in, simulate_in
from autosac.planning.closed_loop import Goal, Planned

SETTINGS: dict[str, dict[str, Any]] = {
    "compiled": {"compile__enable": True},
    "pipelined": {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B"},
}
BUDGETS_BYTES = {"compiled": 300 * 2**20, "pipelined": 275 * 2**20}


@pytest.mark.long
@pytest.mark.parametrize("kind", SETTINGS)
def test_what_is_compared_is_what_simulate_and_plan_say(
    job: Callable[..., TitanJob], kind: str, tmp_path: Path, capture_server: CaptureServer
) -> None:
    """No checkpointing and selective checkpointing are those of the job, compiled or of all stages; the plan is that of
    `autosac plan`; PyTorch's planner and the joint problem make none.
    """
    wanted = job("llama3", 4, training__seq_len=2048, training__local_batch_size=4, **SETTINGS[kind])
    subject = TitanSubject(wanted, capture_server, tmp_path)
    assert (subject.compiled, subject.stages) == ((True, 1) if kind == "compiled" else (False, 2))
    for name in ("none", "selective-op"):
        simulation, _ = simulate_in(capture_server, wanted, checkpointing=name)
        compared = subject.simulate(Policy(name))
        assert (compared.step_ms, compared.peak_reserved_bytes) == (simulation.step_ms, simulation.peak_reserved_bytes)
    assert subject.reference(Policy("pareto")) is subject.simulate(Policy("none"))

    goal = Goal(budget_bytes=BUDGETS_BYTES[kind])
    (planned,) = plan_in(capture_server, wanted, goal)
    found = find_plan(subject, Policy("pareto"), goal)
    assert isinstance(planned, Planned) and planned.plan.units
    assert (found.best.plan.units, found.best.simulation.step_ms) == (planned.plan.units, planned.simulation.step_ms)
    for other in ("joint", "pytorch-tools"):
        with pytest.raises(InfeasibleError, match=f"{other} makes no plans of"):
            find_plan(subject, Policy(other), goal)
