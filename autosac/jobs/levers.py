"""What else would make a job's step faster under its budget: other settings of the job, each planned and simulated.

A lever is a change of the job that leaves the model and the tokens of a step as they are: how the global batch is cut into
microbatches, compilation, the loss in chunks, offloading, the optimizer's implementation, what FSDP keeps gathered, the
allocator. Those that change numbers by more than the order of a sum are marked, and never combined with others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autosac.capture.process.server import CaptureServer
from autosac.errors import AutosacError, InfeasibleError
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import captures_of, plan_in, plans_with_loss
from autosac.jobs.titan import TitanJob
from autosac.memory_sim import AllocatorConfig
from autosac.planning.closed_loop import Goal, Planned
from autosac.planning.confidence import Confidence
from autosac.progress import Parts
from autosac.simulation import TITAN_ALLOCATOR
from autosac.titan.version import has_python_jobs
from autosac.trace import TraceInfo

T = TypeVar("T")
# Less than this is not worth a change of the job.
_WORTH = 1.001
# From this share of the step on the host limits it.
_LIMITED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change of the job: TorchTitan's arguments, `autosac plan`'s own option, or the allocator's configuration.

    `kind`: of levers of one kind only one can be pulled. `numbers`: what it changes of the numbers that are computed, empty if
    no more than the order of sums. `quick`: it often matters.
    """

    name: str
    kind: str
    overrides: tuple[str, ...] = ()
    option: str = ""
    allocator: str = ""
    numbers: str = ""
    quick: bool = False

    def job(self, job: TitanJob) -> TitanJob:
        """The job with this change."""
        job = replace(job, overrides=(*job.overrides, *self.overrides))
        if not self.allocator:
            return job
        return replace(job, target=replace(job.target, allocator=AllocatorConfig.parse(self.allocator)))

    def goal(self, goal: Goal) -> Goal:
        """The goal with this change."""
        return replace(
            goal,
            offload=goal.offload or self.option == "--offload",
            chunk_loss=goal.chunk_loss or self.option == "--chunk-loss",
        )

    @property
    def how(self) -> str:
        """What to write to get it."""
        allocator = f"PYTORCH_CUDA_ALLOC_CONF={self.allocator}" if self.allocator else ""
        return " ".join(part for part in (allocator, self.option, *self.overrides) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What became of a lever, or of several together: the plan with it, or why there is none."""

    levers: tuple[Lever, ...]
    planned: Planned | None = None
    failure: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Per GPU, under the plan; 0 without one."""
        return self.planned.simulation.throughput.tokens_per_second if self.planned else 0.0

    @property
    def name(self) -> str:
        """What is changed."""
        return " + ".join(lever.name for lever in self.levers)

    @property
    def how(self) -> str:
        """What to write to get it."""
        return " ".join(lever.how for lever in self.levers)

    @property
    def numbers(self) -> str:
        """What it changes of the numbers that are computed."""
        return ", ".join(lever.numbers for lever in self.levers if lever.numbers)


def plan_with_levers(
    job: TitanJob, goal: Goal, extent: str, confidence: Confidence | None = None, *, all_stages: bool = True
) -> tuple[Planned | InfeasibleError, tuple[Pulled, ...]]:
    """The job's plan (`autosac.jobs.tasks.plan_titan_job`), and what levers make of it (`pull`), in one capture process."""
    with CaptureServer(debug=job.debug, use_cache=job.use_cache, on_progress=job.progress) as server:
        (own,) = plan_in(server, job, goal, confidence=confidence, all_stages=all_stages)
        return own, pull(server, job, goal, own, extent, confidence, all_stages=all_stages)


def pull(
    server: CaptureServer,
    job: TitanJob,
    goal: Goal,
    own: Planned | InfeasibleError,
    extent: str,
    confidence: Confidence | None = None,
    *,
    all_stages: bool = True,
) -> tuple[Pulled, ...]:
    """Each lever's plan for the same budget, those with the most tokens per second first. Their steps are derived.

    `extent` is one of `autosac.choices.LEVERS`: "quick" for those that most often matter, "all" for every one, and together
    those that help. What a job cannot do is said in the row of the lever. `own`: the job's plan, or that there is none; then a
    lever may be what makes the job fit.
    """
    with contextlib.ExitStack() as folders:
        puller = _Puller(job, goal, server, own, confidence, all_stages, folders)
        levers = tuple(levers_of(puller.info(), job, goal))
        if extent != "all":
            levers = tuple(lever for lever in levers if lever.quick and extent == "quick")
        parts = Parts(job.progress, "lever", len(levers))
        found = [plan() for plan in parts.each(one_ahead(puller.begin((lever,)) for lever in levers))]
        if extent == "all":
            rate = 0.0 if isinstance(own, InfeasibleError) else own.simulation.throughput.tokens_per_second
            found += combined(found, rate, lambda together: puller.begin(together)())
    return tuple(sorted(found, key=lambda pulled: -pulled.tokens_per_second))


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The items, each after the next one has been made."""
    items = iter(items)
    for item in items:
        for following in items:
            yield item
            item = following
        yield item


class _Puller:
    """Plans the job with some levers pulled. What captures need lies in `folders`."""

    def __init__(
        self,
        job: TitanJob,
        goal: Goal,
        server: CaptureServer,
        own: Planned | InfeasibleError,
        confidence: Confidence | None,
        all_stages: bool,
        folders: contextlib.ExitStack,
    ) -> None:
        self._job, self._goal, self._server, self._own, self._confidence = job, goal, server, own, confidence
        self._all_stages, self._folders = all_stages, folders
        self._beside = ("none", "full") if _waits_for_host(own) else ("none",)

    def info(self) -> TraceInfo:
        """What the job was captured with."""
        if not isinstance(self._own, InfeasibleError):
            return self._own.simulation.trace.info
        with temporary_folder() as folder:
            captures = captures_of(self._job, self._server, folder, ("none",), all_stages=False, beside=("none",))
            return captures[0].observed().trace.info

    def begin(self, levers: Sequence[Lever]) -> Callable[[], Pulled]:
        """Begin the captures of the job with these levers; the answer plans."""
        job, goal = self._job, replace(self._goal, confirm=False, changes=False)
        for lever in levers:
            job, goal = lever.job(job), lever.goal(goal)
        # With nothing but the loss in chunks, the plan to compete with is there.
        plain = (self._own,) if job == self._job and goal.offload == self._goal.offload else None
        folder = self._folders.enter_context(temporary_folder())
        try:
            captures = captures_of(
                job, self._server, folder, ("none",), all_stages=self._all_stages, beside=self._beside
            )
        except AutosacError as e:
            failed = Pulled(levers=tuple(levers), failure=str(e))
            return lambda: failed

        def plan() -> Pulled:
            try:
                (planned,) = plans_with_loss(captures, goal, (goal.budget_bytes,), self._confidence, plain)
            except AutosacError as e:
                return Pulled(levers=tuple(levers), failure=str(e))
            if isinstance(planned, InfeasibleError):
                return Pulled(levers=tuple(levers), failure=str(planned))
            return Pulled(levers=tuple(levers), planned=planned)

        return plan


def _waits_for_host(own: Planned | InfeasibleError) -> bool:
    """Whether the job's own full checkpointing may be the plan with a lever: it is the plan without, or the host, which
    records every operator under other plans, limits that.
    """
    if isinstance(own, InfeasibleError):
        return False
    if own.plan.settings.job_checkpointing:
        return True
    return own.simulation.breakdown.host_bound_ms > _LIMITED * own.simulation.step_ms


def combined(found: Sequence[Pulled], own: float, pull: Callable[[Sequence[Lever]], Pulled]) -> Iterator[Pulled]:
    """The levers that help, one after the other as long as they help together: the best of all, if it is of several.

    `found`: each lever alone; `own`: tokens per second without any; `pull` plans with several.
    """
    helpful = [pulled for pulled in found if pulled.tokens_per_second > _WORTH * own and not pulled.numbers]
    helpful.sort(key=lambda pulled: -pulled.tokens_per_second)
    if not helpful:
        return
    best, *others = helpful
    for other in others:
        (lever,) = other.levers
        if lever.kind in {pulled.kind for pulled in best.levers}:
            continue
        together = pull((*best.levers, lever))
        if together.tokens_per_second > _WORTH * best.tokens_per_second:
            best = together
    if len(best.levers) > 1:
        yield best


def levers_of(info: TraceInfo, job: TitanJob, goal: Goal) -> Iterator[Lever]:
    """The levers of a job that are not pulled yet, by the settings that it was captured with."""
    settings, parallelism = info.job_settings, info.parallelism
    if not goal.chunk_loss and not has_python_jobs():  # theirs is a loss of the configuration's own
        yield Lever(name="loss in chunks", kind="loss", option="--chunk-loss", quick=True)
    yield from _batches(info)
    if not info.compiled:
        yield Lever(name="compiled model", kind="compile", overrides=("--compile.enable",))
        if not goal.offload:
            yield Lever(name="activations in host memory", kind="compile", option="--offload")
    if settings.get("optimizer.implementation", "fused") != "fused":
        yield Lever(name="fused optimizer", kind="optimizer", overrides=("--optimizer.implementation", "fused"))
    reshard = settings.get("parallelism.fsdp_reshard_after_forward")
    if reshard is not None and parallelism.dp_shard * parallelism.cp > 1:  # FSDP shards over both
        for wanted in ("always", "never"):
            if wanted != reshard:
                option = ("--parallelism.fsdp_reshard_after_forward", wanted)
                yield Lever(name=f"FSDP reshards after the forward: {wanted}", kind="reshard", overrides=option)
    if not job.target.allocator.expandable_segments:
        yield Lever(name="expandable segments", kind="allocator", allocator=TITAN_ALLOCATOR)
    if settings.get("model.converters") == "[]":
        option = ("--model.converters", "quantize.linear.float8")
        yield Lever(name="float8 products", kind="float8", overrides=option, numbers="products in 8 bits")


def _batches(info: TraceInfo) -> Iterator[Lever]:
    """The global batch in smaller and larger microbatches."""
    local, degree = info.local_batch_size, info.parallelism.data_parallel
    if local is None:
        return
    fixed = int(info.job_settings.get("training.global_batch_size", -1))
    share = fixed // degree if fixed > 0 else local
    sizes = {local // 2, 1, 2 * local}
    for size in sorted((s for s in sizes if 1 <= s != local and share % s == 0), reverse=True):
        option = ("--training.local_batch_size", str(size), "--training.global_batch_size", str(share * degree))
        yield Lever(
            name=f"local batch {size}, {share // size} microbatch{'es' * (share > size)}",
            kind="batch",
            overrides=option,
            quick=size == local // 2,
        )
