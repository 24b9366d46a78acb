"""All that a simulation depends on, executed from its first step to its last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.errors import SimulationError
from autosac.runtime_sim.deadlock import explain_deadlock
from autosac.runtime_sim.engine import Execution
from autosac.runtime_sim.host import HostModel
from autosac.runtime_sim.linking import link
from autosac.runtime_sim.overlap import OverlapModel
from autosac.runtime_sim.program import LinkUse, Program
from autosac.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that a simulation depends on, per rank. `event_ms` and `host_ms`: device and host milliseconds per event;
    `link_use`: what the collective of an event takes of the links.
    """

    traces: tuple[Trace, ...]
    event_ms: tuple[NDArray[np.float64], ...]
    host_ms: tuple[NDArray[np.float64], ...]
    link_use: tuple[Mapping[int, LinkUse], ...]
    host: HostModel
    overlap: OverlapModel
    gpus_per_node: int
    steps: int


class Executed(NamedTuple):
    """An execution that has finished. `step_end_ms`: when each simulated step was complete."""

    program: Program
    execution: Execution
    step_end_ms: tuple[float, ...]

    @property
    def origin_ms(self) -> float:
        """When the step before the last was complete, or the start of the only step."""
        return self.step_end_ms[-2] if len(self.step_end_ms) > 1 else 0.0

    @property
    def makespan_ms(self) -> float:
        """The time of the last step."""
        return self.step_end_ms[-1] - self.origin_ms


def execute(problem: Problem) -> Executed:
    """Link and execute. SimulationError for a deadlock."""
    program = link(
        problem.traces,
        problem.event_ms,
        problem.host_ms,
        problem.link_use,
        steps=problem.steps,
        gpus_per_node=problem.gpus_per_node,
        overlap=problem.overlap,
    )
    execution = Execution(program, problem.host.launch_latency_us / 1e3, problem.host.queue_depth)
    if not execution.run():
        raise SimulationError(explain_deadlock(problem.traces, program, execution))
    ends = [0.0] * problem.steps
    for step, end in zip(program.step, execution.end, strict=True):
        ends[step] = max(ends[step], end)
    for resume, positions in zip(execution.resume, program.step_ends, strict=True):
        for step, position in enumerate(positions):
            ends[step] = max(ends[step], resume[position])
    return Executed(program, execution, tuple(ends))
