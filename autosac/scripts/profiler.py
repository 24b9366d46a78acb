"""PyTorch's profiler in a script: its files and its tables are of the simulated step, with kernels.

A build without CUDA would try, and fail, to record kernels once for each operator, so the profiler itself sees the host only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from autosac.runtime_sim import RankTimeline, write_chrome_trace
from autosac.simulation import Simulation
from autosac.trace import Collective, Op, Trace

_US_PER_MS = 1e3
_Build = Callable[..., Any]


def install(note: Callable[[str], None], simulated: Callable[[], Simulation | None]) -> None:
    """Profilers that are to see kernels show the simulated step, if there is one: `simulated` returns it. `note` takes a
    sentence for the report.
    """
    module: Any = torch.autograd.profiler
    profiler = module.profile
    original, export, parse = profiler.__init__, profiler.export_chrome_trace, profiler._parse_kineto_results
    watching: set[int] = set()  # profilers that are to see kernels

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        watching.discard(id(self))
        if self.enabled and self.use_device == "cuda":
            watching.add(id(self))
            note("files and tables of the script's profiler, and --trace FILE, show one simulated step, with kernels")
            self.profiler_kind = module.ProfilerState.KINETO
            self.kineto_activities = {module.ProfilerActivity.CPU}

    def shown(self: Any) -> Simulation | None:
        return simulated() if id(self) in watching else None

    @functools.wraps(export)
    def write(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        simulation = shown(self)
        if simulation is None:
            return export(self, path, *args, **kwargs)
        return write_chrome_trace(simulation.timeline, str(path))

    @functools.wraps(parse)
    def events(self: Any, *args: Any, **kwargs: Any) -> Any:
        simulation = shown(self)
        if simulation is None:
            return parse(self, *args, **kwargs)
        return list(function_events(simulation.timeline.ranks[simulation.stage], module.FunctionEvent))

    profiler.__init__, profiler.export_chrome_trace, profiler._parse_kineto_results = begin, write, events


def function_events(rank: RankTimeline, build: _Build) -> Iterator[Any]:
    """What the host launched, each with its kernel, and the kernels, as `torch.autograd.profiler_util.FunctionEvent`s, which
    `build` makes. Times in microseconds, on the clock of the timeline.
    """
    module: Any = torch.autograd
    cuda = module.DeviceType.CUDA
    for i in np.flatnonzero((rank.host_end_ms > rank.host_start_ms) | (rank.stream >= 0)).tolist():
        name = _name(rank.trace, i)
        if not name:
            continue
        common = {"id": i, "use_device": "cuda", "input_shapes": _shapes(rank.trace, i), "stack": []}
        host = [float(rank.host_start_ms[i]) * _US_PER_MS, float(rank.host_end_ms[i]) * _US_PER_MS]
        call = build(name=name, thread=1, start_us=host[0], end_us=host[1], **common)
        if rank.stream[i] >= 0:
            start_us, end_us = float(rank.start_ms[i]) * _US_PER_MS, float(rank.end_ms[i]) * _US_PER_MS
            kernel = _kernel(rank.trace, i)
            call.append_kernel(kernel, rank.rank, end_us - start_us)
            where = {"thread": int(rank.stream[i]), "device_type": cuda, "device_index": rank.rank}
            yield build(name=kernel, start_us=start_us, end_us=end_us, **where, **common)
        yield call


def _name(trace: Trace, i: int) -> str:
    """As the profiler calls an operator; empty for what is none."""
    event = trace.events[i]
    if type(event) is Collective:
        return f"nccl:{event.kind}"
    if type(event) is not Op:
        return ""
    namespace, _, operator = trace.signatures[event.signature].name.partition(".")
    return f"{namespace}::{operator.partition('.')[0]}" if namespace != "triton" else operator


def _kernel(trace: Trace, i: int) -> str:
    """The row of its kernel: the simulation has one for each operator, which has the operator's name."""
    event = trace.events[i]
    if type(event) is Collective:
        return "ncclDevKernel_" + "".join(part.capitalize() for part in event.kind.split("_"))
    name = _name(trace, i)
    return name if "::" not in name else f"kernel of {name}"


def _shapes(trace: Trace, i: int) -> list[list[int]]:
    event = trace.events[i]
    return [list(meta.shape) for meta in trace.signatures[event.signature].inputs] if type(event) is Op else []
