"""TorchTitan jobs from their files: simulate, plan. What the command line and the TorchTitan plugin call.

With pipeline parallelism, one rank of every stage is captured, and each gets a plan of its own, for early stages hold more
microbatches than late ones; the plans are those with which the step of all stages together is shortest
(`autosac.planning.pipeline_plans`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from autosac.capture.process.server import CaptureServer
from autosac.errors import CaptureError, InfeasibleError, UsageError
from autosac.files.temporary import temporary_folder
from autosac.induction import capturing, early_info
from autosac.jobs.dynamic_shapes import has_router
from autosac.jobs.titan import BASELINES, Capture, Progress, TitanCaptures, TitanJob, own_stage
from autosac.jobs.untrainable import check_trainable, simulation_of_trainable
from autosac.jobs.waiting import busiest_beside, fullest
from autosac.planning.closed_loop import Goal, Planned, make_plans, pareto_budgets, predictions_of
from autosac.planning.confidence import Confidence, confidence_of
from autosac.planning.loss_chunks import chunks_of, competing
from autosac.planning.optimizer_slices import in_slices
from autosac.planning.pipeline_plans import make_pipeline_plans
from autosac.planning.stage_plans import joint_predictions
from autosac.plans import Plan, Prediction
from autosac.progress import Parts
from autosac.quantities import parse_budget
from autosac.simulation import Simulation, simulation_of
from autosac.titan.version import IN_CHUNKS_BY_ITSELF, has_python_jobs
from autosac.trace import Trace

__all__ = ["BASELINES", "TitanJob", "plan_job", "plan_titan_job", "simulate_draws", "simulate_job", "simulation_of"]


def simulate_job(
    job: TitanJob,
    *,
    checkpointing: str = "job",
    plan_file: str | None = None,
    beside: Sequence[str] = (),
    all_stages: bool = True,
) -> tuple[Simulation, dict[str, Simulation | CaptureError]]:
    """Capture the job and simulate it: as it is, with another way of checkpointing, or under a plan.

    With it, by name, the same job under the ways of checkpointing in `beside`, or why it cannot run so. With pipeline
    parallelism and `all_stages`, all stages are captured and executed together, and the simulation is that of the stage with
    the highest peak. CaptureError if the job itself cannot be captured.
    """
    captures = Parts(job.progress, "capture")
    with CaptureServer(debug=job.debug, use_cache=job.use_cache, on_progress=captures) as server:
        return simulate_in(
            server,
            job,
            checkpointing=checkpointing,
            plan_file=plan_file,
            beside=beside,
            all_stages=all_stages,
            captures=captures,
        )


def simulate_in(
    server: CaptureServer,
    job: TitanJob,
    *,
    checkpointing: str = "job",
    plan_file: str | None = None,
    beside: Sequence[str] = (),
    all_stages: bool = True,
    captures: Parts | None = None,
) -> tuple[Simulation, dict[str, Simulation | CaptureError]]:
    """As `simulate_job`, in a capture process that is there; `captures` says how many are done."""
    captures = captures or Parts(job.progress, "capture")
    plan = None
    if plan_file is not None:
        plan = Plan.load(plan_file)
        _check_made_for(plan, job)
    modes: dict[str, tuple[str, str | None]] = {
        "": (checkpointing, plan_file),
        **{name: (name, None) for name in beside},
    }

    def started(one: TitanJob, mode: str, file: str | None) -> Capture:
        return capturing(server, one.request(mode, plan_file=file), job.progress, whole=one.whole)

    failed: dict[str, CaptureError] = {}

    @contextlib.contextmanager
    def noting_failure(key: str) -> Iterator[None]:
        try:
            yield
        except CaptureError as e:
            if key == "":
                raise
            failed[key] = e

    traces: dict[str, list[Trace]] = {key: [] for key in modes}
    own, capture = own_stage(job, server, lambda one: started(one, checkpointing, plan_file))
    first = {key: capture if key == "" else started(own, mode, file) for key, (mode, file) in modes.items()}
    under_way = {key: [future] for key, future in first.items()}
    if all_stages and job.rank == 0:
        for key, (mode, file) in modes.items():
            with noting_failure(key):
                under_way[key] += [started(stage, mode, file) for stage in job.stages(early_info(first[key]))[1:]]
    captures.total = sum(map(len, under_way.values()))
    for key, future in captures.each((key, future) for key, futures in under_way.items() for future in futures):
        with noting_failure(key):
            trace = future.result()
            check_trainable(trace.info, plan if key == "" else None)
            traces[key].append(trace)
    job.progress("simulating")
    own_traces = traces.pop("")
    others = {
        key: fullest([simulation_of(trace, job.target) for trace in traces[key]]) for key in traces if key not in failed
    }
    return fullest([simulation_of(trace, job.target, plan) for trace in own_traces]), {**others, **failed}


def simulate_draws(
    job: TitanJob,
    count: int,
    *,
    checkpointing: str = "job",
    plan_file: str | None = None,
    observe: bool = False,
    all_stages: bool = True,
) -> list[Simulation]:
    """As `simulate_job`, in each of the first `count` draws of the job's expert load imbalance; of all stages together.

    Ranks that exchange tokens wait for the one that got most (`autosac.jobs.waiting`).
    """
    plan = Plan.load(plan_file) if plan_file is not None else None
    if plan is not None:
        _check_made_for(plan, job)

    def started(one: TitanJob) -> Capture:
        request = one.request(checkpointing, plan_file=plan_file, observe=observe)
        return capturing(server, request, job.progress, whole=one.whole)

    progress = Parts(job.progress, "draw", count)
    with CaptureServer(debug=job.debug, use_cache=job.use_cache, on_progress=progress) as server:
        own, capture = own_stage(job.draw(0), server, started)
        jobs = [[own.draw(number)] for number in range(count)]
        under_way = [[capture], *([started(draw)] for (draw,) in jobs[1:])]
        if all_stages and job.rank == 0:
            for stages, futures in zip(jobs, under_way, strict=True):
                stages += stages[0].stages(early_info(futures[0]))[1:]
                futures += [started(stage) for stage in stages[1:]]
        traces = [[future.result() for future in futures] for futures in progress.each(under_way)]
        if not any(map(has_router, traces[0])):
            raise UsageError(f"expert load imbalance {job.moe_load}: the job has no mixture of experts")
        busiest = [
            [other for pair in zip(stages, found, strict=True) if (other := busiest_beside(*pair)) is not None]
            for stages, found in zip(jobs, traces, strict=True)
        ]
        job.progress("capturing the most loaded ranks")
        waited_for = [[future.result() for future in [started(one) for one in others]] for others in busiest]
    job.progress("simulating")

    def simulated(found: Iterable[Trace]) -> list[Simulation]:
        return [simulation_of_trainable(trace, job.target, plan) for trace in found]

    return [fullest(simulated(found), simulated(others)) for found, others in zip(traces, waited_for, strict=True)]


def _check_made_for(plan: Plan, job: TitanJob) -> None:
    if plan.made_for.world_size != job.world_size:
        raise UsageError(
            f"the plan was made for a world of {plan.made_for.world_size} GPUs, this job has {job.world_size}"
        )


def plan_titan_job(
    job: TitanJob,
    goal: Goal,
    budgets_bytes: Sequence[int] = (),
    *,
    pareto: int = 0,
    confidence: Confidence | None = None,
    all_stages: bool = True,
) -> tuple[Planned | InfeasibleError, ...]:
    """Plan the job for the goal's budget, for several budgets, or for `pareto` budgets evenly spaced over all that matter.

    The latter include the peak of each baseline, so that no baseline can look better than the plans at its own memory. With
    `confidence` the plans fit with that probability. Without `all_stages` only the job's own rank is planned for.

    An InfeasibleError stands where no plan meets a budget. CaptureError if the job cannot be captured.
    """
    with CaptureServer(debug=job.debug, use_cache=job.use_cache, on_progress=job.progress) as server:
        return plan_in(server, job, goal, budgets_bytes, pareto=pareto, confidence=confidence, all_stages=all_stages)


def plan_in(
    server: CaptureServer,
    job: TitanJob,
    goal: Goal,
    budgets_bytes: Sequence[int] = (),
    *,
    pareto: int = 0,
    confidence: Confidence | None = None,
    all_stages: bool = True,
) -> tuple[Planned | InfeasibleError, ...]:
    """As `plan_titan_job`, in a capture process that is there."""
    check_chunks(goal)
    with temporary_folder() as folder:
        captures = captures_of(job, server, folder, all_stages=all_stages)
        budgets = tuple(budgets_bytes) or (goal.budget_bytes,)
        if pareto:
            per_stage = [pareto_budgets(stage, goal.budget_kind, pareto) for stage in captures]
            budgets = tuple(max(column) for column in zip(*per_stage, strict=True))
            budgets = tuple(sorted(budgets + between(baseline_peaks(captures, goal.budget_kind), budgets)))
        return plans_with_loss(captures, goal, budgets, confidence)


def check_chunks(goal: Goal) -> None:
    """UsageError if the loss may be computed in chunks of rows and the installed TorchTitan's jobs decide that themselves."""
    if goal.chunk_loss and has_python_jobs():
        raise UsageError(IN_CHUNKS_BY_ITSELF)


def baseline_peaks(captures: Sequence[TitanCaptures], kind: str) -> list[int]:
    """The peak of every baseline that all stages can run under, each that of the stage that needs most."""
    names = [name for name in BASELINES if all(stage.working(name) for stage in captures)]
    return [max(stage.baseline(name).peak_bytes(kind) for stage in captures) for name in names]


def between(peaks: Iterable[int], budgets: Sequence[int]) -> tuple[int, ...]:
    """The peaks that lie between the least and the most of some budgets and are none of them, ascending."""
    return tuple(sorted({peak for peak in peaks if min(budgets) < peak < max(budgets)} - set(budgets)))


def captures_of(
    job: TitanJob,
    server: CaptureServer,
    folder: Path,
    names: Sequence[str] = BASELINES,
    *,
    all_stages: bool = True,
    beside: Sequence[str] = BASELINES,
) -> list[TitanCaptures]:
    """The captures of one rank of each pipeline stage, those under the baselines `names` begun; of the job's own rank if
    that is not 0, or without `all_stages`. `beside`: the baselines that plans are shown beside.
    """

    def started(one: TitanJob) -> Capture:
        return capturing(server, one.request(names[0], observe=names[0] == "none"), one.progress, whole=one.whole)

    job, capture = own_stage(job, server, started)
    captures = [TitanCaptures(job, server, folder, {names[0]: capture}, beside)]
    captures[0].start(*names)
    if job.rank == 0 and all_stages:
        stages = captures[0].stages(names[0])[1:]
        captures += [TitanCaptures(stage, server, folder, beside=beside) for stage in stages]
    for stage in captures[1:]:
        stage.start(*names)
    return captures


def plans_of(
    captures: Sequence[TitanCaptures],
    goal: Goal,
    budgets: Sequence[int],
    progress: Progress,
    confidence: Confidence | None = None,
) -> tuple[Planned | InfeasibleError, ...]:
    """A plan of the whole job for each budget; an InfeasibleError where there is none."""
    inner = budgets if confidence is None else [confidence.inner_bytes(budget) for budget in budgets]
    if len(captures) == 1:
        whole = make_plans(captures[0], goal, inner, progress)
    else:
        whole = make_pipeline_plans(captures, goal, inner, progress)
    if confidence is None:
        return whole
    return tuple(confidence.certain(result, budget) for result, budget in zip(whole, budgets, strict=True))


def plans_with_loss(
    captures: Sequence[TitanCaptures],
    goal: Goal,
    budgets: Sequence[int],
    confidence: Confidence | None = None,
    plain: Sequence[Planned | InfeasibleError] | None = None,
) -> tuple[Planned | InfeasibleError, ...]:
    """As `plans_of`, with the optimizer in slices if that is better, and where the goal allows it with the loss in chunks.
    `plain`: the plans without, if there are any yet.
    """
    progress = captures[0].job.progress

    def planned(stages: Sequence[TitanCaptures]) -> tuple[Planned | InfeasibleError, ...]:
        return plans_of(stages, goal, budgets, progress, confidence)

    def baselines() -> dict[str, Prediction]:
        of_stages = [stage.baselines() for stage in captures]
        return predictions_of(of_stages[0]) if len(of_stages) == 1 else joint_predictions(of_stages)

    if plain is None:
        plain = in_slices(planned(captures), captures, planned, baselines)
    if not goal.chunk_loss:
        return tuple(_hinted(result, captures[-1]) for result in plain)
    chunks = chunks_of(captures[-1].observed().trace)  # the last stage's
    chunked = [stage.with_loss_in(chunks) for stage in captures]
    return competing(plain, chunks, lambda: in_slices(planned(chunked), chunked, planned, baselines), baselines)


def _hinted(result: Planned | InfeasibleError, last: TitanCaptures) -> Planned | InfeasibleError:
    """Where memory peaks in the loss, the error names the option that lowers that. `last`: the last stage's captures."""
    if not isinstance(result, InfeasibleError) or result.peak_in != "loss" or has_python_jobs():
        return result
    chunks = chunks_of(last.observed().trace)
    if chunks == 1:
        return result
    return InfeasibleError(
        f"{result}; --chunk-loss may compute the loss in {chunks} chunks, which takes less", peak_in="loss"
    )


def plan_job(
    *,
    config_file: str,
    overrides: Sequence[str],
    gpu: str,
    world_size: int,
    budget: str,
    solver: str = "pareto",
    curve: str = "staircase",
    confidence: float = 0.0,
    offload: bool = False,
    chunk_loss: bool = False,
) -> Plan:
    """What the TorchTitan plugin calls on rank 0: the plan for the running job. `confidence`: 0 for none."""
    job = TitanJob.of(config_file, gpu=gpu, world_size=world_size, overrides=tuple(overrides))
    usable_bytes = job.target.hardware.usable_bytes
    goal = Goal(
        budget_bytes=parse_budget(budget, usable_bytes),
        solver=solver,
        curve=curve,
        offload=offload,
        chunk_loss=chunk_loss,
    )
    sure = confidence_of(confidence, goal.budget_kind, job.target.allocator) if confidence else None
    (planned,) = plan_titan_job(job, goal, confidence=sure)
    if isinstance(planned, InfeasibleError):
        raise planned
    return planned.plan
