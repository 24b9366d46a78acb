"""The plan of a running TorchTitan job: made or read once, and the same on every rank.

With a budget, rank 0 plans in a process of its own that has no GPU, and hands the plan's bytes to the other
ranks. With a plan file, every rank reads it. Either way each rank compares the plan's hash with that of rank
0. All of it goes through the job's key-value store, which no GPU is needed for; a failure of rank 0 ends
every rank with the same message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from autosac.errors import AutosacError, PlanError, UsageError
from autosac.integrations.titan_settings import check_settings, job_settings
from autosac.plans import Plan

# A plan of the largest jobs takes minutes on a busy login node; a rank that waits longer has lost rank 0.
_PATIENCE = timedelta(minutes=30)
_CONFIG_FILE = ("--job.config_file", "--job.config-file")

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


def plan_of(job_config: Any, world_size: int) -> Plan:
    """The plan that the job's ``[autosac]`` section asks for; the same object for all of the job's model
    parts.

    UsageError or PlanError if the section is wrong, or the plan is for another job; whatever planning raises.
    """
    global _resolved
    if _resolved is None or _resolved[0] is not job_config:
        _resolved = (job_config, _plan_of(job_config, world_size))
    return _resolved[1]


def _plan_of(job_config: Any, world_size: int) -> Plan:
    from torchtitan.tools.logging import logger

    section = job_config.autosac
    if section.plan and section.budget:
        raise UsageError("[autosac] has both a plan and a budget: give one of them")
    rank, store = _rank_and_store()
    if section.plan:
        plan = agree_on_file(section.plan, rank, store)
    else:
        plan = agree_on(lambda: _make_plan(job_config, world_size), rank, store)
    if plan.made_for.world_size != world_size:
        raise PlanError(f"the plan was made for {plan.made_for.world_size} ranks; this job has {world_size}")
    check_settings(plan.made_for.job_settings, job_settings(job_config))
    if job_config.activation_checkpoint.mode != "none":
        logger.info(f"AutoSAC replaces activation_checkpoint.mode = {job_config.activation_checkpoint.mode}")
    logger.info(f"AutoSAC: plan {plan.hash()[:12]} checkpoints {len(plan.units)} modules{_predicted(plan)}")
    return plan


def agree_on(make: Callable[[], Plan], rank: int, store: Store | None) -> Plan:
    """The plan that rank 0 makes. On the other ranks: PlanError with rank 0's message if it fails."""
    if store is None:
        return make()
    key = _next_key()
    if rank == 0:
        try:
            plan = make()
        except BaseException as e:
            store.set(key, f"failed {e}".encode())
            raise
        store.set(key, f"{plan.hash()} ".encode() + plan.to_bytes())
        return plan
    head, _, content = _await(store, key).partition(b" ")
    if head == b"failed":
        raise PlanError(f"rank 0 could not plan: {content.decode()}")
    plan = Plan.from_bytes(content, name="rank 0's plan")
    if plan.hash() != head.decode():
        raise PlanError(f"rank {rank} did not receive the plan as rank 0 made it")
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


def job_arguments(argv: Sequence[str]) -> list[str]:
    """The command line without the job file: TorchTitan's overrides."""
    rest: list[str] = []
    skip = False
    for argument in argv:
        if skip:
            skip = False
        elif argument in _CONFIG_FILE:
            skip = True
        elif not argument.startswith(tuple(f"{name}=" for name in _CONFIG_FILE)):
            rest.append(argument)
    return rest


def _make_plan(job_config: Any, world_size: int) -> Plan:
    from autosac.integrations.gpu import detect_gpu
    from autosac.jobs import plan_job

    section = job_config.autosac
    if not job_config.job.config_file:
        raise UsageError("[autosac] plans jobs that have a job file: give --job.config_file")
    plan: Plan = plan_job(
        config_file=job_config.job.config_file,
        overrides=job_arguments(sys.argv[1:]),
        gpu=section.gpu or detect_gpu(),
        world_size=world_size,
        budget=section.budget or "85%",
        solver=section.solver,
    )
    folder = Path(job_config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "autosac_plan.json")
    return plan


def _rank_and_store() -> tuple[int, Store | None]:
    """The rank and the job's store; None where nobody else answers."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return 0, None
    return dist.get_rank(), dist.distributed_c10d._get_default_store()


def _next_key() -> str:
    global _exchanges
    _exchanges += 1
    return f"autosac/plan/{_exchanges}"


def _await(store: Store, key: str) -> bytes:
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError as e:
        raise AutosacError(f"rank 0 has not given a plan for {_PATIENCE}") from e
    return store.get(key)


def _predicted(plan: Plan) -> str:
    prediction = plan.predictions.get("autosac")
    if prediction is None:
        return ""
    peak = prediction.peak_reserved_bytes or prediction.peak_active_bytes
    return f"; predicted: {prediction.step_ms:.0f} ms a step, peak {peak / 2**30:.2f} GiB"
