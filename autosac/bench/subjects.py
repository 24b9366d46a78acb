"""A model in one configuration, as the harness sees it: its step under any policy, and the captures that planning needs.

Both subjects are `autosac.planning.closed_loop.PlanningCaptures` whose baselines are "none" and "full". A step under a
plan is captured once, whichever solver comes to that plan.

Of a compiled step the compiler decides, and of a pipelined job all stages are planned together: there the plan is that of
`autosac plan` (`Subject.planned`), and what a policy takes is compared with the compiled step, and with that of all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from autosac.api import EagerCaptures
from autosac.bench.policies import Policy, block_plan, blocks_of
from autosac.bench.suite import Configuration, Model, Suite, make_step_of
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.errors import InfeasibleError
from autosac.files.temporary import temporary_folder
from autosac.induction import capturing
from autosac.jobs.tasks import TitanJob, captures_of, plans_of
from autosac.jobs.titan import STOPPING_EARLY
from autosac.jobs.untrainable import simulation_of_trainable
from autosac.jobs.waiting import fullest
from autosac.planning.closed_loop import Goal, Planned, make_plan
from autosac.planning.planner import undecided
from autosac.planning.unit_policies import UnitPolicies
from autosac.plans import Plan, Settings, Unit
from autosac.simulation import Simulation, Target
from autosac.titan.version import job_beside

Progress = Callable[[str], None]


class Subject(Protocol):
    """See the module's docstring."""

    def observed(self) -> Simulation:
        """The step without checkpointing, its regions observed."""

    def baselines(self) -> Mapping[str, Simulation]:
        """The step without checkpointing, and with full checkpointing of its blocks."""

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        """See `autosac.planning.closed_loop.PlanningCaptures`."""

    def sample(self, plan: Plan, layers: int | None) -> Callable[[], Simulation]:
        """See `autosac.planning.closed_loop.PlanningCaptures`."""

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""

    def begin_template(self, plan: Plan) -> None:
        """See `autosac.planning.closed_loop.PlanningCaptures`."""

    def template(self, plan: Plan) -> Simulation:
        """See `autosac.planning.closed_loop.PlanningCaptures`."""

    def simulate(self, policy: Policy) -> Simulation:
        """The step under a policy that needs no budget."""

    def reference(self, policy: Policy) -> Simulation:
        """The step without checkpointing that a policy's overhead is counted against."""

    def plan_under(self, policy: Policy) -> Plan | None:
        """The plan that stands for a policy without budget; None where nothing is checkpointed, or by TorchTitan itself."""

    @property
    def stages(self) -> int:
        """How many pipeline stages there are. A simulation is that of the one for which most is reserved."""

    @property
    def compiled(self) -> bool:
        """Whether the step is compiled."""

    def planned(self, goal: Goal, progress: Progress) -> Planned:
        """The plan that `autosac plan` makes. InfeasibleError."""


class EagerSubject(EagerCaptures):
    """An eager model. Policies without budget are plans over its blocks."""

    def __init__(self, suite: Suite, model: Model, configuration: Configuration, *, target: str = "gpu") -> None:
        make_step = make_step_of(suite.folder, model.make_step, dict(configuration.arguments))
        super().__init__(
            make_step, _without_libraries(suite.target) if target == "cpu" else suite.target, target=target
        )
        self._patterns = model.blocks
        self._known: dict[tuple[tuple[Unit, ...], Settings], Simulation] = {}

    @cached_property
    def policies(self) -> UnitPolicies:
        """What may be checkpointed."""
        return UnitPolicies(self.observed())

    def baselines(self) -> Mapping[str, Simulation]:
        """See `Subject`."""
        if self.compiled:
            return super().baselines()
        return {name: self.simulate(Policy(name)) for name in ("none", "full")}

    def under(self, plan: Plan) -> Simulation:
        """See `Subject`."""
        if (plan.units, plan.settings) not in self._known:
            self._known[plan.units, plan.settings] = super().under(plan)
        return self._known[plan.units, plan.settings]

    def simulate(self, policy: Policy) -> Simulation:
        """See `Subject`."""
        plan = self.plan_under(policy)
        return self.reference(policy) if plan is None else self.under(plan)

    def reference(self, policy: Policy) -> Simulation:
        """See `Subject`."""
        return super().baselines()["none"] if self.compiled else self.observed()

    def plan_under(self, policy: Policy) -> Plan | None:
        """See `Subject`."""
        if policy.name == "none":
            return None
        plan = block_plan(policy, self.policies, blocks_of(self.policies, self._patterns))
        if self.compiled and not any(d.keep for unit in plan.units for d in unit.decisions):
            return undecided(plan)
        return plan

    @property
    def stages(self) -> int:
        """See `Subject`."""
        return 1

    @property
    def compiled(self) -> bool:
        """See `Subject`."""
        return self.observed().trace.info.compiled

    def planned(self, goal: Goal, progress: Progress) -> Planned:
        """See `Subject`."""
        return make_plan(self, goal, progress)


def _without_libraries(machine: Target) -> Target:
    """A CPU has no cuBLAS workspaces."""
    return replace(machine, hardware=replace(machine.hardware, cublas_workspace_bytes=0))


class TitanSubject:
    """A TorchTitan job, one rank of each of its pipeline stages. Policies without budget are TorchTitan's own."""

    def __init__(self, job: TitanJob, server: CaptureServer, folder: Path) -> None:
        self._server = server
        self._stages = captures_of(job, server, folder, ("none",), beside=("none", "full"))
        self._simulations: dict[tuple[str, ...], Simulation] = {}
        self._known: dict[tuple[tuple[Unit, ...], Settings], Simulation] = {}

    def observed(self) -> Simulation:
        """See `Subject`. Of the first stage, as all that solvers are told."""
        return self._stages[0].observed()

    def baselines(self) -> Mapping[str, Simulation]:
        """See `Subject`."""
        return self._stages[0].baselines()

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        """See `Subject`."""
        self._stages[0].begin(plan, ahead=ahead)

    def begin_template(self, plan: Plan) -> None:
        """See `Subject`."""
        self._stages[0].begin_template(plan)

    def sample(self, plan: Plan, layers: int | None) -> Callable[[], Simulation]:
        """See `Subject`."""
        return self._stages[0].sample(plan, layers)

    def under(self, plan: Plan) -> Simulation:
        """See `Subject`."""
        if (plan.units, plan.settings) not in self._known:
            self._known[plan.units, plan.settings] = self._stages[0].under(plan)
        return self._known[plan.units, plan.settings]

    def template(self, plan: Plan) -> Simulation:
        """See `Subject`."""
        return self._stages[0].template(plan)

    def simulate(self, policy: Policy) -> Simulation:
        """See `Subject`."""
        if policy.name in ("none", "full"):
            key = (policy.name,)
            if key not in self._simulations:
                self._simulations[key] = fullest([stage.baseline(policy.name) for stage in self._stages])
            return self._simulations[key]
        if policy.memory_budget is None:
            early = (STOPPING_EARLY,) if policy.stops_early else ()
            return self._together(policy.mode, *early)
        mode = ("--activation_checkpoint.mode", "memory_budget")
        budget = ("--activation_checkpoint.memory_budget", str(policy.memory_budget))
        return self._together("job", "--compile.enable", *mode, *budget)

    def reference(self, policy: Policy) -> Simulation:
        """A compiled step is compared with a compiled one."""
        if policy.memory_budget is None:
            return self.simulate(Policy("none"))
        return self._together("job", "--compile.enable", "--activation_checkpoint.mode", "none")

    def plan_under(self, policy: Policy) -> Plan | None:
        """See `Subject`."""
        return None

    @property
    def stages(self) -> int:
        """See `Subject`."""
        return len(self._stages)

    @property
    def compiled(self) -> bool:
        """See `Subject`."""
        return self._stages[0].compiled

    def planned(self, goal: Goal, progress: Progress) -> Planned:
        """See `Subject`."""
        (planned,) = plans_of(self._stages, goal, (goal.budget_bytes,), progress)
        if isinstance(planned, InfeasibleError):
            raise planned
        return planned

    def _together(self, checkpointing: str, *arguments: str) -> Simulation:
        """The step of all stages under one of TorchTitan's ways of checkpointing, with more of its arguments."""
        key = (checkpointing, *arguments)
        if key not in self._simulations:
            jobs = [stage.job for stage in self._stages]
            requests = [_with_arguments(job.request(checkpointing), arguments) for job in jobs]
            started = [
                capturing(self._server, request, job.progress, whole=job.whole)
                for request, job in zip(requests, jobs, strict=True)
            ]
            traces = [capture.result() for capture in started]
            self._simulations[key] = fullest([simulation_of_trainable(trace, jobs[0].target) for trace in traces])
        return self._simulations[key]


def _with_arguments(request: TitanRequest, arguments: tuple[str, ...]) -> TitanRequest:
    return replace(request, overrides=(*request.overrides, *arguments))


@contextmanager
def subject_of(
    suite: Suite, model: Model, configuration: Configuration, *, target: str = "gpu", progress: Progress
) -> Iterator[Subject]:
    """The subject, while its capture process lives. UsageError if the model cannot be imported or the job is unknown."""
    if model.make_step:
        eager = EagerSubject(suite, model, configuration, target=target)
        with eager:
            yield eager
        return
    job = titan_job(suite, model, configuration, progress)
    with temporary_folder() as folder, CaptureServer(use_cache=suite.use_cache, on_progress=progress) as server:
        yield TitanSubject(job, server, folder)


def titan_job(suite: Suite, model: Model, configuration: Configuration, progress: Progress) -> TitanJob:
    """The TorchTitan job of a configuration."""
    overrides: list[str] = []
    for key, value in configuration.arguments:
        if isinstance(value, bool):
            prefix, _, option = key.rpartition(".")
            overrides.append(f"--{key}" if value else f"--{prefix}.no-{option}")
        else:
            overrides += [f"--{key}", str(value)]
    return TitanJob.of(
        job_beside(suite.folder, model.job),
        gpu=suite.gpu,
        world_size=model.world_size,
        overrides=overrides,
        allocator=suite.alloc_conf,
        progress=progress,
    )
