"""The local batch size at which a job trains on the most tokens per second, each size under a plan of its own.

At a fixed global batch the number of gradient accumulation steps follows: global batch = local batch x data-parallel degree
x accumulation steps. A larger local batch takes longer for each step, but does more in it; it needs more memory, hence more
recomputation. Two assumptions save most of the work:

M. Memory grows with the local batch. If a size does not fit with everything recomputed (TorchTitan's full checkpointing),
   no larger one does. `_largest` finds the border by steps of doubling width from the job's own size, then by bisection.
T. Without checkpointing, tokens per second do not fall as the local batch grows, and recomputation never makes a step
   shorter. So the rate of a size without checkpointing bounds the rates of that size and of all smaller ones under any plan.
   `search_batches` goes down from the largest size that fits and ends where the bound is not above the best found.

Under M and T the result is the best of all sizes given. A free local batch is sought among 1, 2, 3, 4, 6, 8, 12, ... (powers
of two and three times them, `BatchSizes.of`), or among the sizes that the caller names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from autosac.errors import CaptureError, InfeasibleError, UsageError
from autosac.planning.closed_loop import Planned
from autosac.quantities import format_bytes, format_enough_bytes
from autosac.trace import TraceInfo

_MOST = 2**16
TOO_LARGE = "too large"


class Unplanned(NamedTuple):
    """A step without checkpointing: its rate per GPU, and its peak (of the kind that the budget bounds)."""

    tokens_per_second: float
    peak_bytes: int


class Batches(Protocol):
    """What the search asks of a job with a local batch size. CaptureError if the job cannot run with it."""

    def least_bytes(self, size: int) -> int:
        """The peak with everything recomputed."""

    def unplanned(self, size: int) -> Unplanned:
        """The step without checkpointing."""

    def planned(self, size: int) -> Planned | InfeasibleError:
        """The plan for the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The local batch sizes to choose from, ascending, and the job's own; `global_batch_size` None: it follows."""

    sizes: tuple[int, ...]
    own: int
    data_parallel: int
    global_batch_size: int | None = None

    @staticmethod
    def of(info: TraceInfo, wanted: Sequence[int] = ()) -> BatchSizes:
        """The sizes for a job, by the info of a trace of it: `wanted` or all that are sensible. UsageError if one of `wanted`
        does not divide what a fixed global batch leaves to each GPU, or if nothing bounds the sizes: a pipeline holds a few
        microbatches at a time, however many there are.
        """
        assert info.local_batch_size is not None, "the info of a TorchTitan job"
        data_parallel = info.parallelism.data_parallel
        fixed = int(info.job_settings.get("training.global_batch_size", -1))
        own = info.local_batch_size
        if fixed <= 0 and not wanted and info.parallelism.pp > 1:
            raise UsageError(
                "with pipeline parallelism more microbatches are always faster and take no more memory: give --batch-sizes, "
                "or the job a training.global_batch_size"
            )
        if fixed <= 0:
            grid = (factor * 2**k for k in range(_MOST.bit_length()) for factor in (1, 3))
            sizes = {size for size in grid if size <= _MOST} | {own}
            return BatchSizes(sizes=tuple(sorted(wanted or sizes)), own=own, data_parallel=data_parallel)
        share = fixed // data_parallel
        for size in wanted:
            if share % size:
                raise UsageError(
                    f"a local batch of {size} does not divide the {share} sequences that a global batch of {fixed} leaves "
                    f"to each of {data_parallel} data-parallel ranks"
                )
        divisors = [size for size in range(1, share + 1) if share % size == 0]
        return BatchSizes(
            sizes=tuple(sorted(wanted or divisors)), own=own, data_parallel=data_parallel, global_batch_size=fixed
        )

    def accumulation(self, size: int) -> int:
        """Gradient accumulation steps with this local batch."""
        return 1 if self.global_batch_size is None else self.global_batch_size // (size * self.data_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A local batch size that was looked at. What was not needed is None; `outcome` tells what became of it:

    "planned", "too large" (with everything recomputed), "not faster" (whatever the plan), "no plan fits", "cannot run: why".
    """

    local_batch_size: int
    outcome: str
    least_bytes: int | None = None
    unplanned: Unplanned | None = None
    planned: Planned | None = None

    @property
    def tokens_per_second(self) -> float:
        """Per GPU, under the plan; 0 without one."""
        return self.planned.simulation.throughput.tokens_per_second if self.planned else 0.0


def search_batches(
    batches: Batches, sizes: BatchSizes, budget_bytes: int, progress: Callable[[str], None] = lambda _: None
) -> tuple[Trial, ...]:
    """All sizes that were looked at, ascending; `best_of` tells the best. InfeasibleError if none fits."""
    least: dict[int, int] = {}
    trials: dict[int, Trial] = {}

    def fits(size: int) -> bool:
        progress(f"a local batch of {size} with everything recomputed")
        try:
            least[size] = batches.least_bytes(size)
        except CaptureError as e:
            if size == sizes.own:
                raise
            trials[size] = Trial(local_batch_size=size, outcome=f"cannot run: {e}")
            return size < sizes.own  # too small for a pipeline, say: no reason why larger ones should not do
        if least[size] > budget_bytes:
            trials[size] = Trial(local_batch_size=size, outcome=TOO_LARGE, least_bytes=least[size])
        return least[size] <= budget_bytes

    start = min(range(len(sizes.sizes)), key=lambda i: abs(sizes.sizes[i] - sizes.own))
    count = _largest(sizes.sizes, start, fits) + 1
    best = 0.0
    for size in reversed(sizes.sizes[:count]):
        if size in trials:
            continue
        progress(f"a local batch of {size} without checkpointing")
        try:
            trial = Trial(
                local_batch_size=size,
                outcome="no plan fits",
                least_bytes=least.get(size),
                unplanned=batches.unplanned(size),
            )
        except CaptureError as e:
            trials[size] = Trial(local_batch_size=size, outcome=f"cannot run: {e}")
            continue
        assert trial.unplanned is not None
        bound = trial.unplanned.tokens_per_second
        if bound > best:
            planned = batches.planned(size)
            if isinstance(planned, Planned):
                trial = replace(trial, planned=planned, outcome="planned")
        else:
            trial = replace(trial, outcome="not faster")
        trials[size] = trial
        best = max(best, trial.tokens_per_second)
        if bound <= best:
            break
    if best == 0.0:
        raise _none_fits(sizes, least, budget_bytes)
    return tuple(trials[size] for size in sorted(trials))


def best_of(trials: Sequence[Trial]) -> Trial:
    """The trial with the most tokens per second, of equal ones that with the smallest batch."""
    return max(trials, key=lambda trial: (trial.tokens_per_second, -trial.local_batch_size))


def _largest(sizes: Sequence[int], start: int, fits: Callable[[int], bool]) -> int:
    """The index of the largest size that fits, -1 if none does; `fits` holds for a first part of the sizes.

    Asks O(log distance) times, and never for a size far beyond one that does not fit.
    """
    low, high, at, width = -1, len(sizes), start, 1
    while high - low > 1:
        if fits(sizes[at]):
            low = at
        else:
            high = at
        if high == len(sizes):
            at = low + width
        elif low == -1:
            at = high - width
        else:
            at = (low + high) // 2
        at = min(max(at, low + 1), high - 1)
        width *= 2
    return low


def _none_fits(sizes: BatchSizes, least: Mapping[int, int], budget_bytes: int) -> InfeasibleError:
    size = min(least, default=sizes.sizes[0])
    needed = f", {format_enough_bytes(least[size])} with everything recomputed" if size in least else ""
    return InfeasibleError(
        f"no local batch size meets {format_bytes(budget_bytes)}: the smallest that can run is {size}{needed}"
    )
