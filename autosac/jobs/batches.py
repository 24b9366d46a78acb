"""Plans for a TorchTitan job with the local batch size that trains fastest: the job's side of `batch_search`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import captures_of, check_chunks, plans_with_loss
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.batch_search import BatchSizes, Trial, Unplanned, best_of, search_batches
from autosac.planning.closed_loop import Goal, Planned
from autosac.planning.confidence import Confidence
from autosac.simulation import Pipeline, Simulation

_OPTION = "--training.local_batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The best plan; it names the override of the job that goes with it. And all that was tried."""

    planned: Planned
    trials: tuple[Trial, ...]
    sizes: BatchSizes


def plan_batches(
    job: TitanJob,
    goal: Goal,
    wanted: Sequence[int] = (),
    confidence: Confidence | None = None,
) -> BatchPlan:
    """Plan the job for the goal's budget with the local batch size, of those `wanted` or all, that trains on the most tokens
    per second. With `confidence` every plan fits with that probability.

    InfeasibleError if no size fits, CaptureError if the job cannot be captured as it is.
    """
    check_chunks(goal)
    with (
        temporary_folder() as folder,
        CaptureServer(debug=job.debug, use_cache=job.use_cache, on_progress=job.progress) as server,
    ):
        batches = TitanBatches(job, goal, server, folder, confidence)
        sizes = BatchSizes.of(batches.info, wanted)
        inner_bytes = confidence.inner_bytes(goal.budget_bytes) if confidence else goal.budget_bytes
        try:
            trials = search_batches(batches, sizes, inner_bytes, job.progress)
        except InfeasibleError as e:
            raise (confidence.refused(e, goal.budget_bytes) if confidence else e) from e
    planned = best_of(trials).planned
    assert planned is not None
    return BatchPlan(planned=planned, trials=trials, sizes=sizes)


class TitanBatches:
    """The job with other local batch sizes, as `autosac.planning.batch_search.Batches`."""

    def __init__(
        self, job: TitanJob, goal: Goal, server: CaptureServer, folder: Path, confidence: Confidence | None = None
    ) -> None:
        self._job = job
        self._goal = goal
        self._server = server
        self._folder = folder
        self._confidence = confidence
        own = captures_of(job, server, folder, ("full",))
        self.info = own[0].baseline("full").trace.info
        self._captured = {self.info.local_batch_size: own}

    def least_bytes(self, size: int) -> int:
        """The peak of the stage that needs most, with its optimizer in slices if that is what it needs most for."""
        return max(self._least_bytes(stage) for stage in self._captures(size))

    def _least_bytes(self, stage: TitanCaptures) -> int:
        kind, full = self._goal.budget_kind, stage.baseline("full")
        least = full.peak_bytes(kind)
        if least <= self._goal.budget_bytes or full.memory.peak().outside != "optimizer":
            return least
        return min(least, stage.sliced().baseline("full").peak_bytes(kind))

    def unplanned(self, size: int) -> Unplanned:
        """All stages together."""
        stages = [stage.baseline("none") for stage in self._captures(size)]
        together: Sequence[Simulation] = Pipeline(stages=tuple(stages)).joined() if len(stages) > 1 else stages
        return Unplanned(
            tokens_per_second=together[0].throughput.tokens_per_second,
            peak_bytes=max(stage.peak_bytes(self._goal.budget_kind) for stage in stages),
        )

    def planned(self, size: int) -> Planned | InfeasibleError:
        """The plan, which names the override of the local batch size."""
        captures, goal = self._captures(size), self._goal
        (planned,) = plans_with_loss(captures, goal, (goal.budget_bytes,), self._confidence)
        del self._captured[size]  # of a large job they are large
        if isinstance(planned, InfeasibleError):
            return planned
        made_for = replace(planned.plan.made_for, overrides=(_OPTION, str(size)))
        return replace(planned, plan=replace(planned.plan, made_for=made_for))

    def _captures(self, size: int) -> list[TitanCaptures]:
        if size not in self._captured:
            job = replace(self._job, overrides=(*self._job.overrides, _OPTION, str(size)))
            self._captured[size] = captures_of(job, self._server, self._folder, ("full",))
        return self._captured[size]
