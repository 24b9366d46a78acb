"""The first steps of a TorchTitan job: measured, compared with the plan, written; and the plan made again with what they say.

Every rank measures (`integrations.first_steps`). In the optimizer of the last measured step rank 0 gathers the longest steps
and the highest peaks, writes the record and, if it is to, plans again in a process without a GPU, while the others wait at
the job's store. All ranks then change to the new plan, or none: nothing of a plan lives longer than from a forward to its
backward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosac.errors import AutosacError, UsageError
from autosac.integrations.apply import switch
from autosac.integrations.first_steps import FirstSteps
from autosac.integrations.torchtitan.planning import RunningJob, agree_on_change, gathered, plan_file, rank_and_store
from autosac.plans import Plan
from autosac.runs import MeasuredSteps, RunMemory, RunRecord
from autosac.titan.settings import compiles_model

RECORD = "autosac_run.json"
_WARM_UP = 2
_MOST_STEPS = 1000


@dataclass
class _Observed:
    """A job under observation, and the parts of its model on this rank."""

    job: RunningJob
    plan: Plan | None
    steps: FirstSteps
    parts: list[nn.Module] = field(default_factory=list)


_present: _Observed | None = None


def observe_part(job: RunningJob, model: nn.Module, plan: Plan | None) -> None:
    """Measure the first steps of a job, of which `model` is a part on this rank. UsageError for a wrong section."""
    global _present
    if not 1 <= job.section.observe_steps <= _MOST_STEPS:
        raise UsageError(f"observe_steps must be from 1 to {_MOST_STEPS}, not {job.section.observe_steps}")
    if job.section.replan and plan is None:
        raise UsageError("replan needs a plan to begin with: set enable = true")
    if _present is None or _present.job.identity is not job.identity:
        if _present is not None:
            _present.steps.remove()
        steps = FirstSteps(_finish, warm_up=_WARM_UP, steps=job.section.observe_steps)
        _present = _Observed(job, plan, steps)
    _present.parts.append(model)
    _present.steps.add(model)


def _finish(steps: MeasuredSteps) -> None:
    """On every rank, in the optimizer of the last measured step."""
    from torchtitan.tools.logging import logger

    assert _present is not None
    job, plan = _present.job, _present.plan
    rank, store = rank_and_store()
    mine = {"steps_ms": steps.steps_ms, "memory": asdict(steps.memory) if steps.memory is not None else None}
    found = gathered(json.dumps(mine).encode(), rank, job.world_size, store)
    record = _record(job, plan, steps, [json.loads(content) for content in found]) if rank == 0 else None
    if record is not None:
        folder = Path(job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        record.save(folder / RECORD)
        logger.info(f"AutoSAC: {record.compared()}; written to {folder / RECORD}")
    if not job.section.replan or plan is None:
        return
    if steps.in_backward or compiles_model(job.settings):
        logger.warning("AutoSAC keeps its plan: the job is compiled, or its optimizer steps in the backward")
        return
    changed = agree_on_change(partial(_replan, job, plan, record), rank, store)
    if changed is not None:
        for part in _present.parts:
            switch(part, changed)
        _present.plan = changed
        if steps.device == "cuda":
            torch.cuda.empty_cache()


def _record(job: RunningJob, plan: Plan | None, steps: MeasuredSteps, ranks: Sequence[dict[str, Any]]) -> RunRecord:
    """What all ranks have measured: the longest steps, the highest peaks."""
    memories = [row["memory"] for row in ranks if row["memory"] is not None]
    made = str(Path(job.dump_folder) / "autosac_plan.json")
    used = plan_file(job.section.plan, job.name) if job.section.plan else made
    return RunRecord.of_steps(
        steps,
        plan=plan,
        job=job.name,
        overrides=job.overrides,
        world_size=job.world_size,
        gpu=_gpu(job),
        plan_file=used if plan is not None else "",
        steps_ms=tuple(map(max, zip(*(row["steps_ms"] for row in ranks), strict=True))),
        memory=RunMemory(**{name: max(m[name] for m in memories) for name in memories[0]}) if memories else None,
    )


def _gpu(job: RunningJob) -> str:
    """The profile that the job was planned for; empty if the device is none that is known."""
    from autosac.estimator.gpu import detect_gpu

    if job.section.gpu:
        return job.section.gpu
    try:
        return detect_gpu()
    except UsageError:
        return ""


def _replan(job: RunningJob, plan: Plan, record: RunRecord | None) -> Plan | None:
    """On rank 0: another plan, if it is worth it. What goes wrong is logged: the job goes on as it is."""
    from torchtitan.tools.logging import logger

    from autosac.jobs.runs import replan

    assert record is not None
    section = job.section
    beside = Path(record.gpu).parent if record.gpu.endswith(".toml") else Path(job.dump_folder)
    try:
        found = replan(
            record,
            plan,
            beside / "autosac_run.toml",
            budget=f"{plan.made_for.budget_bytes / 2**20:.6f}MiB",
            solver=section.solver,
            curve=section.curve,
            confidence=section.confidence,
            offload=section.offload,
            chunk_loss=section.chunk_loss,
        )
    except (AutosacError, OSError) as e:
        logger.warning(f"AutoSAC keeps its plan: {e}")
        return None
    logger.info(f"AutoSAC {'changes' if found.plan is not None else 'keeps'} its plan: {found.why}")
    if found.plan is not None:
        found.plan.save(Path(job.dump_folder) / "autosac_plan_again.json")
    return found.plan
