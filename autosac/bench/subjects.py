"""A model in one configuration, as the harness sees it: its step under any policy, and the captures that planning needs.

Both subjects are `autosac.planning.closed_loop.PlanningCaptures` whose baselines are "none" and "full". A step under a
plan is captured once, whichever solver comes to that plan.
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
from autosac.files.temporary import temporary_folder
from autosac.induction import capturing
from autosac.jobs.tasks import TitanJob
from autosac.jobs.titan import TitanCaptures
from autosac.jobs.untrainable import simulation_of_trainable
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
        return {name: self.simulate(Policy(name)) for name in ("none", "full")}

    def under(self, plan: Plan) -> Simulation:
        """See `Subject`."""
        if (plan.units, plan.settings) not in self._known:
            self._known[plan.units, plan.settings] = super().under(plan)
        return self._known[plan.units, plan.settings]

    def simulate(self, policy: Policy) -> Simulation:
        """See `Subject`."""
        plan = self.plan_under(policy)
        return self.observed() if plan is None else self.under(plan)

    def reference(self, policy: Policy) -> Simulation:
        """See `Subject`."""
        return self.observed()

    def plan_under(self, policy: Policy) -> Plan | None:
        """See `Subject`."""
        if policy.name == "none":
            return None
        return block_plan(policy, self.policies, blocks_of(self.policies, self._patterns))


def _without_libraries(machine: Target) -> Target:
    """A CPU has no cuBLAS workspaces."""
    return replace(machine, hardware=replace(machine.hardware, cublas_workspace_bytes=0))


class TitanSubject:
    """A TorchTitan job. Policies without budget are TorchTitan's own."""

    def __init__(self, job: TitanJob, server: CaptureServer, folder: Path) -> None:
        self._job = job
        self._server = server
        self._captures = TitanCaptures(job, server, folder)
        self._requests: dict[TitanRequest, Simulation] = {}
        self._known: dict[tuple[tuple[Unit, ...], Settings], Simulation] = {}

    def observed(self) -> Simulation:
        """See `Subject`."""
        return self._capture(self._job.request("none", observe=True))

    def baselines(self) -> Mapping[str, Simulation]:
        """See `Subject`."""
        return {"none": self.observed(), "full": self._capture(self._job.request("full"))}

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        """See `Subject`."""
        self._captures.begin(plan, ahead=ahead)

    def begin_template(self, plan: Plan) -> None:
        """See `Subject`."""
        self._captures.begin_template(plan)

    def sample(self, plan: Plan, layers: int | None) -> Callable[[], Simulation]:
        """See `Subject`."""
        return self._captures.sample(plan, layers)

    def under(self, plan: Plan) -> Simulation:
        """See `Subject`."""
        if (plan.units, plan.settings) not in self._known:
            self._known[plan.units, plan.settings] = self._captures.under(plan)
        return self._known[plan.units, plan.settings]

    def template(self, plan: Plan) -> Simulation:
        """See `Subject`."""
        return self._captures.template(plan)

    def simulate(self, policy: Policy) -> Simulation:
        """See `Subject`."""
        if policy.name == "none":
            return self.observed()
        if policy.memory_budget is None:
            request = self._job.request(policy.mode)
            early = ("--activation_checkpoint.early_stop",) if policy.stops_early else ()
            return self._capture(replace(request, overrides=(*request.overrides, *early)))
        mode = ("memory_budget", "--activation_checkpoint.memory_budget", str(policy.memory_budget))
        return self._capture(self._compiled("--activation_checkpoint.mode", *mode))

    def reference(self, policy: Policy) -> Simulation:
        """A compiled step is compared with a compiled one."""
        if policy.memory_budget is None:
            return self.observed()
        return self._capture(self._compiled("--activation_checkpoint.mode", "none"))

    def plan_under(self, policy: Policy) -> Plan | None:
        """See `Subject`."""
        return None

    def _compiled(self, *arguments: str) -> TitanRequest:
        request = self._job.request("job")
        return replace(request, overrides=(*request.overrides, "--compile.enable", *arguments))

    def _capture(self, request: TitanRequest) -> Simulation:
        if request not in self._requests:
            trace = capturing(self._server, request, self._job.progress).result()
            self._requests[request] = simulation_of_trainable(trace, self._job.target)
        return self._requests[request]


@contextmanager
def subject_of(
    suite: Suite, model: Model, configuration: Configuration, *, target: str = "gpu", progress: Progress
) -> Iterator[Subject]:
    """The subject, while its capture process lives. UsageError if the model cannot be imported or the job is unknown."""
    if model.make_step:
        yield EagerSubject(suite, model, configuration, target=target)
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
