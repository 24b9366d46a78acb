"""All that a simulation depends on, executed from its first step to its last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.errors import SimulationError
from autosac.runtime_sim.buffers import Buffers
from autosac.runtime_sim.deadlock import explain_deadlock, has_stuck_send
from autosac.runtime_sim.engine import Execution
from autosac.runtime_sim.host import HostModel
from autosac.runtime_sim.linking import link
from autosac.runtime_sim.overlap import OverlapModel
from autosac.runtime_sim.program import LinkUse, Program
from autosac.trace import Collective, Trace

_FULL = (
    "; NCCL lets a send wait for its recv unless its buffers hold the message (here up to {:.3g} MiB), and runs what two "
    "ranks send to each other in the order of issue: put transfers that belong together into one batch_isend_irecv"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that a simulation depends on, per rank. `event_ms` and `host_ms`: device and host milliseconds per event;
    `link_use`: what the collective of an event takes of the links; `buffers`: those of NCCL, for messages from one rank to
    another.
    """

    traces: tuple[Trace, ...]
    event_ms: tuple[NDArray[np.float64], ...]
    host_ms: tuple[NDArray[np.float64], ...]
    link_use: tuple[Mapping[int, LinkUse], ...]
    host: HostModel
    overlap: OverlapModel
    gpus_per_node: int
    steps: int
    buffers: Buffers = Buffers()  # noqa: RUF009


class Executed(NamedTuple):
    """An execution that has finished. `step_end_ms`: when each simulated step was complete. `buffered`: it has, since sends
    did not wait for their recvs.
    """

    program: Program
    execution: Execution
    step_end_ms: tuple[float, ...]
    buffered: bool = False

    @property
    def origin_ms(self) -> float:
        """When the step before the last was complete, or the start of the only step."""
        return self.step_end_ms[-2] if len(self.step_end_ms) > 1 else 0.0

    @property
    def makespan_ms(self) -> float:
        """The time of the last step."""
        return self.step_end_ms[-1] - self.origin_ms


def execute(problem: Problem) -> Executed:
    """Link and execute. SimulationError for a deadlock.

    NCCL lets a send wait for its recv, so two ranks that both send first wait for ever. But messages that fit its buffers are
    gone at once. So what is deadlocked otherwise is executed again, with sends of such messages that wait for nobody.
    """
    finished, program, execution = _run(problem, None)
    buffered = False
    if not finished:
        why, full = explain_deadlock(problem.traces, program, execution), False
        if any(map(_sends_alone, problem.traces)):
            buffered, program, execution = _run(problem, problem.buffers)
            other = explain_deadlock(problem.traces, program, execution)
            why, full = other or why, not other or has_stuck_send(problem.traces, program, execution)
        if not buffered:
            hint = _FULL.format(_most_bytes(problem) / 2**20) if full else ""
            raise SimulationError(f"deadlock: {why}{hint}")
    ends = [0.0] * problem.steps
    for step, end in zip(program.step, execution.end, strict=True):
        ends[step] = max(ends[step], end)
    for resume, positions in zip(execution.resume, program.step_ends, strict=True):
        for step, position in enumerate(positions):
            ends[step] = max(ends[step], resume[position])
    return Executed(program, execution, tuple(ends), buffered)


def _run(problem: Problem, buffers: Buffers | None) -> tuple[bool, Program, Execution]:
    """Whether everything was executed, what was, and how."""
    program = link(
        problem.traces,
        problem.event_ms,
        problem.host_ms,
        problem.link_use,
        steps=problem.steps,
        gpus_per_node=problem.gpus_per_node,
        overlap=problem.overlap,
        buffers=buffers,
    )
    execution = Execution(program, problem.host.launch_latency_us / 1e3, problem.host.queue_depth)
    return execution.run(), program, execution


def _most_bytes(problem: Problem) -> int:
    """The largest message that two of the ranks can have in the buffers, in a communicator of their own."""
    nodes = [trace.info.rank // problem.gpus_per_node for trace in problem.traces]
    shared = len(set(nodes)) < len(nodes)
    return problem.buffers.most_bytes(2, inter_node=not shared)


def _sends_alone(trace: Trace) -> bool:
    """Whether the rank sends anything that is no part of a batch."""
    return any(type(event) is Collective and event.kind == "send" and event.batch < 0 for event in trace.events)
