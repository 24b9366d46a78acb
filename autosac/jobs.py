"""TorchTitan jobs from their files: capture, simulate, plan. What the command line and the TorchTitan plugin call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autosac.capture.request import TitanRequest
from autosac.capture.server import CaptureServer
from autosac.errors import InfeasibleError, UsageError
from autosac.planning import Goal, Planned, make_plans, pareto_budgets
from autosac.plans import Plan
from autosac.quantities import parse_budget
from autosac.simulation import TITAN_ALLOCATOR, Simulation, Target, selective_modules_of
from autosac.trace import Trace

# The policies that a plan is shown beside.
BASELINES = ("none", "full", "selective-op")
Progress = Callable[[str], None]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TitanJob:
    """A TorchTitan job: its file, TorchTitan's own arguments, how many GPUs and of which kind."""

    config_file: str
    target: Target
    overrides: tuple[str, ...] = ()
    world_size: int = 1
    rank: int = 0
    debug: bool = False
    progress: Progress = field(default=_silent)

    @staticmethod
    def of(
        config_file: str,
        *,
        gpu: str,
        world_size: int | None = None,
        overrides: Sequence[str] = (),
        rank: int = 0,
        cluster: str | None = None,
        allocator: str | None = None,
        debug: bool = False,
        progress: Progress = _silent,
    ) -> TitanJob:
        """The job, checked as far as it can be without capturing it. UsageError for what is unknown or wrong."""
        if not Path(config_file).is_file():
            raise UsageError(f"job file {config_file}: there is no such file")
        if world_size is None:
            world_size = _world_size_of_environment()
        return TitanJob(
            config_file=config_file,
            target=Target.of(
                gpu, world_size, cluster=cluster, allocator=TITAN_ALLOCATOR if allocator is None else allocator
            ),
            overrides=tuple(overrides),
            world_size=world_size,
            rank=rank,
            debug=debug,
            progress=progress,
        )

    def request(
        self, checkpointing: str = "job", *, observe: bool = False, plan_file: str | None = None
    ) -> TitanRequest:
        """The capture request for one way of checkpointing."""
        return TitanRequest(
            config_file=self.config_file,
            overrides=self.overrides,
            world_size=self.world_size,
            rank=self.rank,
            gpu=self.target.gpu,
            checkpointing="plan" if plan_file else checkpointing,
            plan_file=plan_file,
            observe=observe,
            ranks_per_node=self.target.cluster.gpus_per_node,
        )


def _world_size_of_environment() -> int:
    text = os.environ.get("NGPU", "1")
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"NGPU={text!r} is no number of GPUs; give --world-size")
    return int(text)


def simulate_job(
    job: TitanJob, *, checkpointing: str = "job", plan_file: str | None = None, beside: Sequence[str] = ()
) -> tuple[Simulation, dict[str, Simulation]]:
    """Capture the job and simulate it: as it is, with another way of checkpointing, or under a plan.

    With it, by name, the same job under the ways of checkpointing in `beside`.
    """
    plan = None
    if plan_file is not None:
        plan = Plan.load(plan_file)
        _check_made_for(plan, job)
    with CaptureServer(debug=job.debug, on_progress=job.progress) as server:
        asked = server.submit(job.request(checkpointing, plan_file=plan_file))
        others = {name: server.submit(job.request(name)) for name in beside}
        trace = asked.result()
        traces = {name: future.result() for name, future in others.items()}
    job.progress("simulating")
    return simulation_of(trace, job.target, plan), {
        name: simulation_of(trace, job.target) for name, trace in traces.items()
    }


def simulation_of(trace: Trace, target: Target, plan: Plan | None = None) -> Simulation:
    """The simulation of a captured step, which pays for selective checkpointing on the host where it is used."""
    if plan is not None:
        selective = tuple(
            unit.fqn for unit in plan.units if unit.fqn in trace.modules and any(d.keep for d in unit.decisions)
        )
    else:
        selective = selective_modules_of(trace.info, trace.modules)
    return Simulation(trace=trace, target=target, selective_modules=selective)


def _check_made_for(plan: Plan, job: TitanJob) -> None:
    if plan.made_for.world_size != job.world_size:
        raise UsageError(
            f"the plan was made for a world of {plan.made_for.world_size} GPUs, this job has {job.world_size}"
        )


class TitanCaptures:
    """The captures that planning needs, from one capture process; see `autosac.planning.Captures`."""

    def __init__(self, job: TitanJob, server: CaptureServer, folder: Path) -> None:
        self._job = job
        self._server = server
        self._folder = folder
        self._plans = 0
        self._observed = server.submit(job.request("none", observe=True))
        self._base: Simulation | None = None
        self._baselines: dict[str, Simulation] = {}

    def observed(self) -> Simulation:
        """The step without checkpointing, its regions observed."""
        if self._base is None:
            self._base = simulation_of(self._observed.result(), self._job.target)
        return self._base

    def baselines(self) -> Mapping[str, Simulation]:
        """The step under each of BASELINES."""
        if not self._baselines:
            futures = {name: self._server.submit(self._job.request(name)) for name in BASELINES[1:]}
            self._baselines = {
                name: simulation_of(future.result(), self._job.target) for name, future in futures.items()
            }
        return {"none": self.observed(), **self._baselines}

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        self._plans += 1
        path = self._folder / f"plan{self._plans}.json"
        plan.save(path)
        trace = self._server.capture(self._job.request(plan_file=str(path)))
        return simulation_of(trace, self._job.target, plan)


def plan_titan_job(
    job: TitanJob, goal: Goal, budgets_bytes: Sequence[int] = (), *, pareto: int = 0
) -> tuple[Planned | InfeasibleError, ...]:
    """Plan the job for the goal's budget, for several budgets, or for `pareto` budgets evenly spaced over all that matter.

    An InfeasibleError stands where no plan meets a budget. CaptureError if the job cannot be captured.
    """
    with (
        tempfile.TemporaryDirectory(prefix="autosac-") as folder,
        CaptureServer(debug=job.debug, on_progress=job.progress) as server,
    ):
        captures = TitanCaptures(job, server, Path(folder))
        budgets = (
            pareto_budgets(captures, goal.budget_kind, pareto) if pareto else budgets_bytes or (goal.budget_bytes,)
        )
        return make_plans(captures, goal, budgets, job.progress)


def plan_job(
    *, config_file: str, overrides: Sequence[str], gpu: str, world_size: int, budget: str, solver: str = "knapsack"
) -> Plan:
    """What the TorchTitan plugin calls on rank 0: the plan for the running job."""
    job = TitanJob.of(config_file, gpu=gpu, world_size=world_size, overrides=tuple(overrides))
    goal = Goal(budget_bytes=parse_budget(budget, job.target.hardware.usable_bytes), solver=solver)
    (planned,) = plan_titan_job(job, goal)
    if isinstance(planned, InfeasibleError):
        raise planned
    return planned.plan
