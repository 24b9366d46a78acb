"""When everything ran: the result of a simulation, for all ranks together.

Times are milliseconds from the completion of the step before (so a kernel that the host launched early, or
that overlaps the step before, may have a time below 0), or from the start of the only step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autosac.errors import SimulationError
from autosac.runtime_sim.breakdown import Breakdown, StepParts, breakdowns, step_parts
from autosac.runtime_sim.critical_path import PathSegment, critical_path, device_time_on
from autosac.runtime_sim.engine import Execution
from autosac.runtime_sim.execute import Problem, execute
from autosac.runtime_sim.program import Program
from autosac.runtime_sim.ranks import RankTimeline, rank_timeline
from autosac.trace import Phase


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """As TorchTitan logs them, per GPU: tokens per second, model FLOPs utilisation (0 to 1), TFLOP/s."""

    tokens_per_second: float
    mfu: float
    tflops: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The simulated step. `makespan_ms` is its time: see `simulate`. `step_end_ms`: when each simulated step
    was complete. `buffered`: ranks would be deadlocked if their sends waited for recvs, as NCCL's do with large messages.
    """

    makespan_ms: float
    step_end_ms: tuple[float, ...]
    ranks: tuple[RankTimeline, ...]
    problem: Problem = field(repr=False)
    program: Program = field(repr=False)
    execution: Execution = field(repr=False)
    buffered: bool = False

    @cached_property
    def breakdowns(self) -> tuple[Breakdown, ...]:
        """Where the time goes, per rank. Simulates the step without its recomputation, if it has any."""
        return breakdowns(self.problem, self.ranks, self.makespan_ms)

    def breakdown(self, rank: int = 0) -> Breakdown:
        """Where the step's time goes on the rank at this position. See `Breakdown`."""
        return self.breakdowns[rank]

    def parts(self, rank: int = 0) -> StepParts:
        """What the step of the rank at this position consists of, without simulating anything else."""
        return step_parts(self.ranks[rank], self.makespan_ms)

    def critical_path(self) -> tuple[PathSegment, ...]:
        """What the step's time consists of, from its beginning to its end without a gap. See `PathSegment`."""
        return critical_path(self.program, self.execution, self.step_end_ms)

    def exposed_recompute_ms(self) -> tuple[float, ...]:
        """Of every rank, the recomputation on the critical path: what hides behind nothing, not behind other ranks either. The
        sum of all ranks is the step's. If a rank's recomputation took longer by a small share, so would the step by that
        share of this.
        """
        path = self.critical_path()
        return tuple(
            sum(
                ms
                for event, ms in device_time_on(path, rank.rank).items()
                if getattr(rank.trace.events[event], "phase", None) is Phase.RECOMPUTE
            )
            for rank in self.ranks
        )

    def throughput(self, peak_flops: float, rank: int = 0) -> Throughput:
        """Tokens per second and MFU as TorchTitan counts them.

        Per GPU: this rank's tokens over the step time and over the ranks that share them (context, tensor and
        pipeline parallel). `peak_flops`: the GPU's dense peak (FLOP/s). SimulationError if the trace does not
        say its tokens.
        """
        info = self.ranks[rank].trace.info
        if not info.tokens_per_step:
            raise SimulationError("the trace does not say how many tokens its step trains on (tokens_per_step)")
        tokens_per_second = info.tokens_per_step / info.parallelism.sharing / self.makespan_ms * 1e3
        flops = (info.flops_per_token or 0.0) * tokens_per_second
        return Throughput(tokens_per_second=tokens_per_second, mfu=flops / peak_flops, tflops=flops / 1e12)


def timeline_of(problem: Problem) -> Timeline:
    """Execute, and report the last step. SimulationError for a deadlock."""
    executed = execute(problem)
    return Timeline(
        makespan_ms=executed.makespan_ms,
        step_end_ms=executed.step_end_ms,
        ranks=tuple(rank_timeline(problem, executed, position) for position in range(len(problem.traces))),
        problem=problem,
        program=executed.program,
        execution=executed.execution,
        buffered=executed.buffered,
    )
