"""A TorchTitan job from its file, and the captures of it that planning needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from autosac.capture.moe_load import MoELoad
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.derivation import UncheckpointedStep
from autosac.errors import CaptureError, FirstStageError, UsageError
from autosac.induction import Capturing, capturing, early_info
from autosac.jobs.checks import check_job_file
from autosac.jobs.dynamic_shapes import routers_layer, with_dynamic_shapes
from autosac.jobs.untrainable import check_trainable, simulation_of_trainable
from autosac.limits import MOST_GPUS, OPTIMIZER_SLICE_BYTES, world_size_of_environment
from autosac.plans import Plan, Settings, Unit
from autosac.plans.layers import in_all_layers
from autosac.simulation import TITAN_ALLOCATOR, Simulation, Target, simulation_of
from autosac.titan.settings import asks_to_compile
from autosac.titan.version import check_job, has_python_jobs
from autosac.trace import Trace, TracedOperators, TraceInfo

# The policies that a plan is shown beside.
BASELINES = ("none", "full", "selective-op")
_CHECKPOINTED = ("full", "selective-op")
# The observed step, "none", is of a model that is not compiled.
_NONE_COMPILED = "none, compiled"
# TorchTitan's argument for recomputations that end with the last result that is needed.
STOPPING_EARLY = "--activation_checkpoint.early_stop"
_plan_numbers = itertools.count(1)  # of this process
Progress = Callable[[str], None]
StageInputs = tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TitanJob:
    """A TorchTitan job: its file (TorchTitan 0.2) or MODULE:CONFIG (0.3), TorchTitan's own arguments, how many GPUs and of
    which kind, and the rank to look at.

    `stage_inputs`, `moe_load`, `loss_chunks` and `optimizer_slice_bytes`: see `autosac.capture.request.TitanRequest`.
    `whole`: its layers are known not to be worth capturing by a few of them (`autosac.induction`). `use_cache`: captures may
    be those of earlier runs.
    """

    config_file: str
    target: Target
    overrides: tuple[str, ...] = ()
    world_size: int = 1
    rank: int = 0
    stage_inputs: StageInputs | None = None
    whole: bool = False
    moe_load: MoELoad = field(default_factory=MoELoad)
    loss_chunks: int = 1
    optimizer_slice_bytes: int = 0
    debug: bool = False
    use_cache: bool = True
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
        power_limit_w: float | None = None,
        moe_load: MoELoad | None = None,
        debug: bool = False,
        use_cache: bool = True,
        progress: Progress = _silent,
    ) -> TitanJob:
        """The job, checked as far as it can be without capturing it. UsageError for what is unknown or wrong."""
        check_job(config_file)
        if world_size is None:
            world_size = world_size_of_environment()
        if not 1 <= world_size <= MOST_GPUS:
            raise UsageError(f"world size {world_size}: expected a whole number from 1 to {MOST_GPUS}")
        if not has_python_jobs():
            check_job_file(config_file, overrides, world_size)
        return TitanJob(
            config_file=config_file,
            target=Target.of(
                gpu,
                world_size,
                cluster=cluster,
                allocator=TITAN_ALLOCATOR if allocator is None else allocator,
                power_limit_w=power_limit_w,
            ),
            overrides=tuple(overrides),
            world_size=world_size,
            rank=rank,
            moe_load=moe_load or MoELoad(),
            debug=debug,
            use_cache=use_cache,
            progress=progress,
        )

    def request(
        self, checkpointing: str = "job", *, observe: bool = False, plan_file: str | None = None
    ) -> TitanRequest:
        """The capture request for one way of checkpointing. A plan may be one of the job's own."""
        job = self
        if plan_file is not None:
            settings = Plan.load(plan_file).settings
            checkpointing = settings.job_checkpointing or "plan"
            if settings.job_checkpointing and settings.early_stop and not has_python_jobs():
                job = self.stopping_early()
        return TitanRequest(
            config_file=self.config_file,
            overrides=job.overrides,
            world_size=self.world_size,
            rank=self.rank,
            gpu=self.target.gpu,
            checkpointing=checkpointing,
            plan_file=plan_file,
            observe=observe,
            ranks_per_node=self.target.cluster.gpus_per_node,
            stage_inputs=self.stage_inputs,
            moe_load=self.moe_load,
            loss_chunks=self.loss_chunks,
            optimizer_slice_bytes=self.optimizer_slice_bytes,
        )

    def stopping_early(self) -> TitanJob:
        """The job of TorchTitan 0.2 whose own recomputations end with the last result that is needed."""
        return replace(self, overrides=(*self.overrides, STOPPING_EARLY))

    def draw(self, number: int) -> TitanJob:
        """The job with another draw of its expert load imbalance."""
        return replace(self, moe_load=replace(self.moe_load, draw=number))

    def stages(self, first: TraceInfo) -> tuple[TitanJob, ...]:
        """The job as seen from one rank of each pipeline stage, given what the capture of the first one's rank reported early
        (`autosac.induction.early_info`).

        Pipeline stages are TorchTitan's outermost dimension: stage s begins at rank s * world size / stages.
        """
        count = first.parallelism.pp
        ranks = [stage * (self.world_size // count) for stage in range(count)]
        others = replace(self, stage_inputs=first.stage_outputs or None, whole=first.cut is None)
        return (replace(self, rank=0), *(replace(others, rank=rank) for rank in ranks[1:]))


Capture: TypeAlias = "Future[Trace] | Capturing"


def own_stage(job: TitanJob, server: CaptureServer, start: Callable[[TitanJob], Capture]) -> tuple[TitanJob, Capture]:
    """The job as its own rank sees it, and its capture, which `start` starts.

    A rank of a later pipeline stage needs to know what the first stage sends. Its capture tells that it does, and then that of
    the first rank tells the rest.
    """
    capture = start(job)
    if job.rank == 0:
        return job, capture
    try:
        capture.result()
    except FirstStageError:
        job.progress("capturing the first pipeline stage")
        first = replace(job, rank=0)
        later = first.stages(early_info(capturing(server, first.request("none"), job.progress)))[-1]
        job = replace(later, rank=job.rank)
        capture = start(job)
    return job, capture


class TitanCaptures:
    """The captures that planning needs, from one capture process; see `autosac.planning.closed_loop.PlanningCaptures`.

    `started`: captures of the job under some of BASELINES that have begun, by name. `beside`: those that a plan is shown
    beside.
    """

    def __init__(
        self,
        job: TitanJob,
        server: CaptureServer,
        folder: Path,
        started: Mapping[str, Capture] | None = None,
        beside: Sequence[str] = BASELINES,
    ) -> None:
        self.job = job
        self._server = server
        self._folder = folder
        self._beside = tuple(beside)
        self._under_plans: dict[tuple[tuple[Unit, ...], Settings], Capture] = {}
        self._templates: dict[tuple[tuple[Unit, ...], Settings], Capture] = {}
        self._started: dict[str, Capture] = dict(started or {})
        self._simulations: dict[str, Simulation] = {}
        self._failures: dict[str, str] = {}
        self._uncheckpointed: _Uncheckpointed | None = None
        self._early: TitanCaptures | None = None  # of the job whose own recomputations stop early
        # Of `_under_plans`, the one whose step nobody has asked for yet.
        self._ahead: tuple[tuple[Unit, ...], Settings] | None = None

    def with_loss_in(self, chunks: int) -> TitanCaptures:
        """Captures of the same job that computes its loss in chunks."""
        job = replace(self.job, loss_chunks=chunks)
        return TitanCaptures(job, self._server, self._folder, beside=self._beside)

    def sliced(self) -> TitanCaptures:
        """Captures of the same job whose optimizer works in slices."""
        job = replace(self.job, optimizer_slice_bytes=OPTIMIZER_SLICE_BYTES)
        return TitanCaptures(job, self._server, self._folder, beside=self._beside)

    def start(self, *names: str) -> None:
        """Begin to capture the step under some of BASELINES, unless that has begun."""
        for name in names:
            is_new = name not in self._started
            self._begin(name, self.job.request(name, observe=name == "none"))
            capture = self._started[name]
            if is_new and name != "none" and isinstance(capture, Capturing):
                capture.go_ahead()  # nobody waits for it before the plan is found
            if name == "none" and asks_to_compile(self.job.config_file, self.job.overrides):
                self._begin(_NONE_COMPILED, self.job.request("none"))

    def _begin(self, key: str, request: TitanRequest) -> None:
        if key not in self._started:
            reference = self._reference() if key in _CHECKPOINTED else None
            if reference is not None:  # two cuts may be worthwhile where three are not
                request = replace(request, cuts=2)
            self._started[key] = self._capturing(request, reference)

    def _capturing(self, request: TitanRequest, reference: _Uncheckpointed | None) -> Capture:
        return capturing(self._server, request, self.job.progress, whole=self.job.whole, reference=reference)

    def _reference(self) -> _Uncheckpointed | None:
        """The step without checkpointing; None where that is not asked for, or of a model that is not compiled, and the others
        are, or may be.
        """
        if "none" not in self._started:
            return None
        if asks_to_compile(self.job.config_file, self.job.overrides) is not False:
            return None
        self._uncheckpointed = self._uncheckpointed or _Uncheckpointed(self._started["none"])
        return self._uncheckpointed

    def stages(self, name: str) -> tuple[TitanJob, ...]:
        """The job as seen from one rank of each pipeline stage, this one's first, as soon as its capture tells."""
        self.start(name)
        return self.job.stages(early_info(self._started[name]))

    def baseline(self, name: str) -> Simulation:
        """The step under one of BASELINES. CaptureError if the job cannot run so."""
        if name == "none" and not self.compiled:
            return self.observed()
        key = _NONE_COMPILED if name == "none" else name
        if key not in self._simulations:
            self._begin(key, self.job.request(name))
            trace = self._started[key].result()
            self._simulations[key] = simulation_of_trainable(trace, self.job.target)
        return self._simulations[key]

    @property
    def compiled(self) -> bool:
        """Whether the job compiles its model. The observed step is of one that is not compiled."""
        return self.observed().trace.info.compiled

    def _with_dynamic_shapes(self, trace: Trace) -> Trace:
        """The observed step, with the sizes that routing changes marked as dynamic: a plan may not insist on them.

        Compared with another draw of a few layers; of all with pipeline parallelism, where every stage needs some.
        """
        layer = routers_layer(trace)
        if layer is None:
            return trace
        load = self.job.moe_load
        other = MoELoad(kind="uniform") if load.is_balanced else replace(load, draw=load.draw + 1)
        request = replace(self.job, moe_load=other).request("none", observe=True)
        if trace.info.parallelism.pp == 1:
            request = replace(request, layers=layer + 1)
        return with_dynamic_shapes(trace, self._server.capture(request))

    def observed(self) -> Simulation:
        """The step without checkpointing, its regions observed; as it is without compilation."""
        if "none" not in self._simulations:
            self.start("none")
            trace = self._with_dynamic_shapes(self._started["none"].result())
            if trace.info.compiled:  # as its settings say; TorchTitan compiles not every model
                self._begin(_NONE_COMPILED, self.job.request("none"))
                compiled = self._started[_NONE_COMPILED].result().info.compiled
                trace = replace(trace, info=replace(trace.info, compiled=compiled))
            self._simulations["none"] = simulation_of(trace, self.job.target)
        return self._simulations["none"]

    def baselines(self) -> Mapping[str, Simulation]:
        """The step under each of those that a plan is shown beside and that the job can run under; `failures` says why not
        under the others.

        All are begun; one is waited for when it is asked for.
        """
        self.start(*self._beside)
        return _Baselines(self, self._beside)

    def working(self, name: str) -> bool:
        """Whether the job can run under this one of BASELINES. CaptureError if it cannot run without checkpointing."""
        if name not in BASELINES or name in self._failures:
            return False
        try:
            self.baseline(name)
        except CaptureError as e:
            if name == "none":
                raise
            self._failures[name] = str(e)
        return name not in self._failures

    def failures(self) -> Mapping[str, str]:
        """Why the job cannot run under a baseline, by its name."""
        return self._failures

    def stopping_early(self) -> Simulation | None:
        """See `autosac.planning.closed_loop.PlanningCaptures`. TorchTitan 0.3 has no such setting."""
        if self.observed().trace.info.early_stop or has_python_jobs():
            return None
        if self._early is None:
            started = {"none": self._started["none"]}
            self._early = TitanCaptures(self.job.stopping_early(), self._server, self._folder, started)
        try:
            return self._early.baseline("full")
        except CaptureError:  # without, it could be captured
            return None

    def traced(self) -> Mapping[str, TracedOperators]:
        """Nothing: baselines are TorchTitan's own."""
        return {}

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        """Begin to capture the step under a plan, unless that has begun. See `autosac.planning.closed_loop.PlanningCaptures`
        for `ahead`.
        """
        key = plan.units, plan.settings
        if self._ahead is not None and self._ahead != key:
            self._cancel(self._under_plans.pop(self._ahead))
        is_new = key not in self._under_plans and (not ahead or self._server.has_room())
        if is_new:
            self._under_plans[key] = self._capturing(self._request(plan), None)
        self._ahead = key if ahead and (is_new or self._ahead == key) else None

    def _cancel(self, capture: Capture) -> None:
        if isinstance(capture, Capturing):
            capture.cancel()
        else:
            self._server.cancel(capture)

    def begin_template(self, plan: Plan) -> None:
        """Begin to capture a template, unless that has begun; apart from the capture that confirms the same plan."""
        if (plan.units, plan.settings) not in self._templates:
            request, reference = self._request(plan), self._reference()
            if reference is not None and early_info(self._started["none"]).parallelism.pp == 1:
                request = replace(request, cuts=2)
            self._templates[plan.units, plan.settings] = self._capturing(request, reference)

    def _request(self, plan: Plan) -> TitanRequest:
        self.start("none")
        info = early_info(self._started["none"])
        if info.parallelism.pp > 1 and info.cut is not None:
            plan = in_all_layers(plan, info.cut.total) or plan
        # A capture reads its plan when it begins: those of all stages, in one folder, have files of their own until then.
        path = self._folder / f"plan{next(_plan_numbers)}.json"
        plan.save(path)
        return self.job.request(plan_file=str(path))

    def sample(self, plan: Plan, layers: int | None) -> Callable[[], Simulation]:
        """See `autosac.planning.closed_loop.PlanningCaptures`. A pipeline's stages keep all of their layers."""
        info = self.observed().trace.info
        check_trainable(info, plan)
        if layers is None or info.parallelism.pp > 1:
            self.begin(plan)
            return lambda: self.under(plan)
        capture = self._server.submit(replace(self._request(plan), layers=layers))
        return lambda: simulation_of(capture.result(), self.job.target, plan)

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        self.begin(plan)
        trace = self._under_plans[plan.units, plan.settings].result()
        return simulation_of_trainable(trace, self.job.target, plan)

    def template(self, plan: Plan) -> Simulation:
        """See `autosac.planning.closed_loop.PlanningCaptures`."""
        self.begin_template(plan)
        trace = self._templates[plan.units, plan.settings].result()
        return simulation_of_trainable(trace, self.job.target, plan)


class _Uncheckpointed:
    """See `autosac.induction.Reference`."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._step: UncheckpointedStep | None = None

    def first_cut(self) -> int:
        """0 if it was captured whole."""
        return self._capture.first_cut() if isinstance(self._capture, Capturing) else 0

    def agrees(self, trace: Trace) -> bool:
        """Whether the step is in a trace under checkpointing."""
        if self._step is None:
            self._step = UncheckpointedStep(self._capture.result())
        return self._step.is_in(trace)


class _Baselines(Mapping[str, Simulation]):
    """The baselines that work, each captured by the time it is asked for."""

    def __init__(self, captures: TitanCaptures, names: Sequence[str]) -> None:
        self._captures, self._names = captures, names

    def __getitem__(self, name: str) -> Simulation:
        if name not in self._names or not self._captures.working(name):
            raise KeyError(name)
        return self._captures.baseline(name)

    def __iter__(self) -> Iterator[str]:
        return filter(self._captures.working, self._names)

    def __len__(self) -> int:
        return sum(map(self._captures.working, self._names))
