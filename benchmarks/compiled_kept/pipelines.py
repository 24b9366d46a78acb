"""Whether the plan of a compiled pipeline states what its modules save, by captures.

    python -m benchmarks.compiled_kept --pipelines

TorchTitan's small Llama-3 on two pipeline stages, with four microbatches, is planned halfway between full checkpointing and
none. The bytes that the plan states of each module stand beside those that one forward of a fresh capture under the plan
saves, and those that the module saves in a job on one GPU whose batch is the microbatch: there, nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import captures_of, plan_in, simulate_in
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Goal
from autosac.planning.compiled_costs import kept_bytes
from autosac.planning.planner import plan_of
from autosac.simulation import Simulation

SCHEDULES = ("1F1B", "Interleaved1F1B")
_EXAMPLE = str(Path(__file__).parents[2] / "examples" / "llama3_8b.toml")
_SMALL = ("--model.flavor", "debugmodel", "--compile.enable", "--training.seq_len", "1024")
_STAGES = ("--training.local_batch_size", "4", "--parallelism.pipeline_parallel_degree", "2")
_ALONE = (
    "--training.local_batch_size",
    "1",
    "--training.mixed_precision_param",
    "float32",
)  # as in a pipeline without FSDP


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One module under the plan."""

    schedule: str
    module: str
    stated_bytes: int
    executed_bytes: int
    alone_bytes: int

    @property
    def is_right(self) -> bool:
        """Whether all three agree."""
        return self.stated_bytes == self.executed_bytes == self.alone_bytes


def rows_of(schedule: str) -> list[StageRow]:
    """The modules that the plan checkpoints."""
    job = _job(2, *_STAGES, "--parallelism.pipeline_parallel_schedule", schedule)
    with CaptureServer() as server, temporary_folder() as folder:
        none, modes = simulate_in(server, job, checkpointing="none", beside=("full",))
        full = modes["full"]
        assert isinstance(full, Simulation), full
        (planned,) = plan_in(server, job, Goal(budget_bytes=(_peak(none) + _peak(full)) // 2))
        if isinstance(planned, InfeasibleError):
            raise planned
        plan, file = planned.plan, folder / "plan.json"
        plan.save(file)
        again, _ = simulate_in(server, job, plan_file=str(file))
        assert again.pipeline is not None
        (captures,) = captures_of(_job(1, *_ALONE), server, folder, ("none",))
        alone = captures.under(plan_of(captures.observed(), Goal(budget_bytes=2**40), plan.units)).trace
        names = [unit.fqn for unit in plan.units]
        executed: dict[str, int] = {}
        for stage in again.pipeline.stages:
            executed |= kept_bytes(stage.trace, [name for name in names if name in stage.trace.modules])
        one = kept_bytes(alone, names)
    return [
        StageRow(
            schedule=schedule,
            module=unit.fqn,
            stated_bytes=unit.kept_bytes,
            executed_bytes=executed[unit.fqn],
            alone_bytes=one[unit.fqn],
        )
        for unit in plan.units
    ]


def table(rows: Sequence[StageRow]) -> str:
    """All modules, and how many are right."""
    lines = [
        f"{row.schedule:16} {row.module:10} states {row.stated_bytes:12,} executes {row.executed_bytes:12,} "
        f"on one GPU {row.alone_bytes:12,}{'' if row.is_right else ': wrong'}"
        for row in rows
    ]
    right = sum(row.is_right for row in rows)
    return "\n".join([*lines, f"{right} of {len(rows)} modules of pipelines save what is stated"])


def _job(gpus: int, *arguments: str) -> TitanJob:
    return TitanJob.of(_EXAMPLE, gpu="h100-sxm-80gb", world_size=gpus, overrides=(*_SMALL, *arguments))


def _peak(simulation: Simulation) -> int:
    assert simulation.pipeline is not None
    return max(stage.peak_bytes("reserved") for stage in simulation.pipeline.stages)
