"""The plan of a running TorchTitan job: made or read once, and the same on every rank.

With a budget, rank 0 plans in a process of its own that has no GPU, and sends the plan's bytes to the other
ranks. With a plan file, every rank reads it. Either way each rank compares the plan's hash with that of rank
0. All of it goes through the job's key-value store, which no GPU is needed for; a failure of rank 0 ends
every rank with the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from autosac.errors import AutosacError, PlanError, UsageError
from autosac.plans import Plan
from autosac.titan.settings import check_settings, compiles_model

# A plan of the largest jobs takes minutes on a busy login node; a rank that waits longer has lost rank 0.
_PATIENCE = timedelta(minutes=30)

_resolved: tuple[Any, Plan] | None = None
_exchanges = 0


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: bytes, /) -> None:
        """Publish a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until the keys are there."""


class Section(Protocol):
    """What the user asks for: ``[autosac]`` in a job file, `AutoSAC.Config` in a configuration."""

    budget: str
    plan: str
    solver: str
    curve: str
    confidence: float
    offload: bool
    chunk_loss: bool
    gpu: str
    observe: bool
    observe_steps: int
    replan: bool


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """The job that is being built. `identity` is the same object for all of its model parts; `name` is what `autosac plan`
    would take for the job, empty where it has no name; `settings` decide what it computes (empty: unknown).
    """

    identity: Any
    section: Section
    name: str
    overrides: tuple[str, ...]
    settings: Mapping[str, str]
    world_size: int
    dump_folder: str


def plan_of_job(job: RunningJob) -> Plan:
    """The plan that the job asks for; the same object for all of the job's model parts.

    UsageError or PlanError if what it asks for is wrong, or the plan is for another job; whatever planning raises.
    """
    global _resolved
    if _resolved is None or _resolved[0] is not job.identity:
        _resolved = (job.identity, _plan_of(job))
    return _resolved[1]


def _plan_of(job: RunningJob) -> Plan:
    from torchtitan.tools.logging import logger

    section = job.section
    if section.plan and section.budget:
        raise UsageError("AutoSAC is given both a plan and a budget: give only one of them")
    rank, store = rank_and_store()
    if section.plan:
        plan = agree_on_file(plan_file(section.plan, job.name), rank, store)
    else:
        plan = agree_on(lambda: _make_plan(job), rank, store)
    if plan.made_for.world_size != job.world_size:
        raise PlanError(f"the plan was made for {plan.made_for.world_size} ranks; this job has {job.world_size}")
    check_settings(plan.made_for.job_settings, job.settings)
    if compiles_model(job.settings):
        check_compilable(plan)
    logger.info(f"AutoSAC: plan {plan.hash()[:12]} is {plan.doing}{_predicted(plan)}")
    return plan


def check_compilable(plan: Plan) -> None:
    """PlanError if a compiled model cannot follow the plan."""
    from autosac.integrations.recompute.compiled_modes import NEEDS, SEES_RESULTS

    if plan.offloads:
        raise PlanError("the plan offloads to host memory, which a compiled model cannot: turn off compile.enable")
    if any(unit.decisions for unit in plan.units) and not SEES_RESULTS:
        raise PlanError(f"the job compiles its model: {NEEDS}")


def plan_file(path: str, job: str) -> str:
    """The file that a job means by `path`: one beside the job file, or in the working folder. PlanError if there are both and
    they differ.
    """
    beside = Path(job).parent / path
    if not job.endswith(".toml") or not beside.is_file():
        return path
    here = Path(path)
    if here.is_file() and here.read_bytes() != beside.read_bytes():
        raise PlanError(f"the plan {path} is ambiguous: there is {beside}, and another one in the working folder")
    return str(beside)


def gathered(mine: bytes, rank: int, world_size: int, store: Store | None) -> list[bytes]:
    """What every rank has to say, in order, on rank 0; on the others nothing."""
    if store is None:
        return [mine]
    key = _next_key()
    store.set(f"{key}/{rank}", mine)
    return [_await(store, f"{key}/{other}") for other in range(world_size)] if rank == 0 else []


def agree_on_change(make: Callable[[], Plan | None], rank: int, store: Store | None) -> Plan | None:
    """The plan that rank 0 makes, if it makes one; None if it makes none. `make` may not fail."""
    if store is None:
        return make()
    key = _next_key()
    if rank == 0:
        made = make()
        content = b"none" if made is None else made.to_bytes()
        store.set(key, content)
    else:
        content = _await(store, key)
    return Plan.from_bytes(content, name="rank 0's plan") if content != b"none" else None


def agree_on(make: Callable[[], Plan], rank: int, store: Store | None) -> Plan:
    """The plan that rank 0 makes. On the other ranks: PlanError with rank 0's message if it fails."""
    if store is None:
        return make()
    key = _next_key()
    if rank == 0:
        try:
            content = make().to_bytes()
        except BaseException as e:
            store.set(key, f"failed {e}".encode())
            raise
        plan = Plan.from_bytes(content)  # as the others read it
        store.set(key, f"{plan.hash()} ".encode() + content)
        return plan
    head, _, content = _await(store, key).partition(b" ")
    if head == b"failed":
        raise PlanError(f"rank 0 could not plan: {content.decode()}")
    plan = Plan.from_bytes(content, name="rank 0's plan")
    if plan.hash() != head.decode():
        raise PlanError(f"rank {rank} did not receive the plan that rank 0 made")
    return plan


def agree_on_file(path: str, rank: int, store: Store | None) -> Plan:
    """The plan in a file that every rank reads. PlanError if a rank finds another plan there than rank 0."""
    if store is None:
        return Plan.load(path)
    key = _next_key()
    if rank == 0:
        try:
            plan = Plan.load(path)
        except BaseException as e:
            store.set(key, f"failed {e}".encode())
            raise
        store.set(key, f"{plan.hash()} ".encode())
        return plan
    head, _, message = _await(store, key).partition(b" ")
    if head == b"failed":
        raise PlanError(f"rank 0: {message.decode()}")
    plan = Plan.load(path)
    if plan.hash() != head.decode():
        raise PlanError(
            f"{path} is plan {plan.hash()[:12]} on rank {rank} and {head.decode()[:12]} on rank 0: "
            "give all ranks the same file"
        )
    return plan


def _make_plan(job: RunningJob) -> Plan:
    from autosac.estimator.gpu import detect_gpu
    from autosac.jobs.tasks import plan_job

    section = job.section
    if not job.name:
        raise UsageError(
            "AutoSAC plans jobs that the command line names (--job.config_file, or --module and --config): "
            "give this one a plan file"
        )
    plan: Plan = plan_job(
        config_file=job.name,
        overrides=job.overrides,
        gpu=section.gpu or detect_gpu(),
        world_size=job.world_size,
        budget=section.budget or "85%",
        solver=section.solver,
        curve=section.curve,
        confidence=section.confidence,
        offload=section.offload,
        chunk_loss=section.chunk_loss,
    )
    folder = Path(job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "autosac_plan.json")
    return plan


def rank_and_store() -> tuple[int, Store | None]:
    """The rank and the job's store; None where nobody else answers."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return 0, None
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.get_rank(), store


def _next_key() -> str:
    global _exchanges
    _exchanges += 1
    return f"autosac/plan/{_exchanges}"


def _await(store: Store, key: str) -> bytes:
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError as e:
        raise AutosacError(f"rank 0 has not sent a plan for {_PATIENCE}") from e
    return store.get(key)


def _predicted(plan: Plan) -> str:
    prediction = plan.predictions.get("autosac")
    if prediction is None:
        return ""
    peak = prediction.peak_reserved_bytes or prediction.peak_active_bytes
    return f"; predicted: {prediction.step_ms:.0f} ms a step, peak {peak / 2**30:.2f} GiB"
