"""A timeline as a Chrome trace, for https://ui.perfetto.dev, chrome://tracing and PyTorch's profiler tools.

One process per rank, whose rows are the modules, the host, and each stream. Names and categories are those
that ``torch.profiler`` writes (``cpu_op``, ``kernel``, ``gpu_memcpy``; communication operators begin with ``nccl:``, their
kernels with ``ncclDevKernel``), so that its tools recognise them. Three kinds of arrows: ``ac2g`` from launch to kernel,
``synchronisation`` from a kernel to one on another stream that waited for it, ``collective`` from the member
that came last to its peers.

Format: "Trace Event Format" (Google), JSON object form; times in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autosac.files.writing import write_bytes_atomically
from autosac.runtime_sim.program import Engine, Program
from autosac.runtime_sim.ranks import RankTimeline
from autosac.runtime_sim.timeline import Timeline
from autosac.trace import Collective, ModuleEnter, ModuleExit, Op, Phase, Trace

_MODULES, _HOST, _FIRST_STREAM = 0, 1, 2
_TICK_MS = 1 / 64e3
_COPIES = {Engine.HOST_TO_DEVICE: "Memcpy HtoD", Engine.DEVICE_TO_HOST: "Memcpy DtoH"}

Json = dict[str, Any]


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the last simulated step to `path`, gzipped if its name ends in ``.gz``. OSError if that is not
    possible.
    """
    content = json.dumps(chrome_trace(timeline), separators=(",", ":")).encode()
    path = Path(path)
    write_bytes_atomically(path, gzip.compress(content, 3, mtime=0) if path.suffix == ".gz" else content)


def chrome_trace(timeline: Timeline) -> Json:
    """The trace as a JSON object."""
    begins = [np.nanmin([*rank.start_ms, *rank.host_start_ms]) for rank in timeline.ranks]
    origin = float(min(begins))
    events: list[Json] = []
    for position, rank in enumerate(timeline.ranks):
        writer = _Writer(rank, position, origin)
        events += [*writer.rows(), *writer.modules(), *writer.host(), *writer.device()]
    events += _arrows(timeline, origin)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "otherData": {"step_ms": timeline.makespan_ms, "simulated_by": "AutoSAC"},
        "traceEvents": events,
    }


def _us(ms: float, origin_ms: float) -> float:
    """Microseconds in whole ticks of 1/64, which add without rounding: slices that follow each other do not overlap."""
    return round((ms - origin_ms) / _TICK_MS) / 64


class _Writer:
    """The slices and launch arrows of one rank."""

    def __init__(self, rank: RankTimeline, position: int, origin_ms: float) -> None:
        self.rank, self.trace, self.origin = rank, rank.trace, origin_ms
        self.first_id = position << 32
        self.start, self.end = rank.start_ms.tolist(), rank.end_ms.tolist()
        self.host_start, self.host_end = rank.host_start_ms.tolist(), rank.host_end_ms.tolist()
        self.stream: list[int] = rank.stream.tolist()

    def _slice(self, row: int, name: str, category: str, start: float, end: float, args: Json) -> Json:
        ts = _us(start, self.origin)
        dur = _us(end, self.origin) - ts
        return {
            "ph": "X",
            "pid": self.rank.rank,
            "tid": row,
            "name": name,
            "cat": category,
            "ts": ts,
            "dur": dur,
            "args": args,
        }

    def rows(self) -> Iterator[Json]:
        """The names of the process and its rows."""
        pid = self.rank.rank
        names = ["modules", "host", *(f"stream {i} ({n})" for i, n in enumerate(self.rank.stream_names))]
        named = [("process", _MODULES, f"rank {pid}", pid)]
        named += [("thread", row, name, row) for row, name in enumerate(names)]
        for what, row, name, index in named:
            place = {"ph": "M", "pid": pid, "tid": row}
            yield {**place, "name": f"{what}_name", "args": {"name": name}}
            yield {**place, "name": f"{what}_sort_index", "args": {"sort_index": index}}

    def modules(self) -> Iterator[Json]:
        """The step, and in it the modules on the host's clock, those whose begin and end are properly nested."""
        end = max([self.host_end[-1], *(end for end in self.end if end == end)])
        yield self._slice(_MODULES, "ProfilerStep#0", "user_annotation", self.host_start[0], end, {})
        stack: list[tuple[int, Phase, float]] = []
        for i, event in enumerate(self.trace.events):
            if type(event) is ModuleEnter:
                stack.append((event.module, event.phase, self.host_start[i]))
            elif type(event) is ModuleExit and stack and stack[-1][:2] == (event.module, event.phase):
                name = self.trace.modules[event.module] or "(model)"
                start = stack.pop()[2]
                args = {"phase": event.phase.name}
                yield self._slice(_MODULES, name, "user_annotation", start, self.host_end[i], args)

    def host(self) -> Iterator[Json]:
        """What the host spent time on."""
        durations = self.rank.host_end_ms - self.rank.host_start_ms
        for i in np.flatnonzero(durations > 0).tolist():
            event = self.trace.events[i]
            if type(event) is ModuleEnter or type(event) is ModuleExit:
                continue
            launches = self.stream[i] >= 0
            args = {"External id": self.first_id + i} | ({"correlation": self.first_id + i} if launches else {})
            start, end = self.host_start[i], self.host_end[i]
            yield self._slice(_HOST, _name(self.trace, i), "cpu_op", start, end, args)
            if launches:
                yield self._launch("s", i, _HOST, start)

    def device(self) -> Iterator[Json]:
        """What ran on the streams."""
        for i in np.flatnonzero(self.rank.stream >= 0).tolist():
            row = _FIRST_STREAM + self.stream[i]
            engine = Engine(int(self.rank.engine[i]))
            category = "gpu_memcpy" if engine in _COPIES else "kernel"
            start, end = self.start[i], self.end[i]
            yield self._slice(row, self._kernel(i, engine), category, start, end, self._arguments(i))
            if self.host_end[i] > self.host_start[i]:
                yield self._launch("f", i, row, start)

    def _kernel(self, i: int, engine: Engine) -> str:
        event, name = self.trace.events[i], _name(self.trace, i)
        if type(event) is Collective:
            kind = "".join(part.capitalize() for part in event.kind.split("_"))
            return f"ncclDevKernel_{kind} ({self.trace.groups[event.group].name})"
        return f"{_COPIES[engine]} ({name})" if engine in _COPIES else name

    def _arguments(self, i: int) -> Json:
        event, trace = self.trace.events[i], self.trace
        assert type(event) is Op or type(event) is Collective
        args: Json = {
            "device": self.rank.rank,
            "stream": self.stream[i],
            "correlation": self.first_id + i,
            "External id": self.first_id + i,
            "phase": event.phase.name,
        }
        if 0 <= event.module < len(trace.modules):
            args["module"] = trace.modules[event.module]
        if 0 <= event.source < len(trace.sources):
            args["source"] = trace.sources[event.source]
        if type(event) is Collective:
            args |= {"bytes": event.nbytes, "group": trace.groups[event.group].name}
            waited_ms = float(self.rank.transfer_ms[i]) - self.start[i]
            args["waited for peers (us)"] = round(waited_ms * 1e3, 3)
        else:
            signature = trace.signatures[event.signature]
            args["Input Dims"] = [list(meta.shape) for meta in signature.inputs[:8]]
            args["Input type"] = [meta.dtype for meta in signature.inputs[:8]]
        return args

    def _launch(self, phase: str, i: int, row: int, time_ms: float) -> Json:
        return _flow(phase, "ac2g", self.first_id + i, self.rank.rank, row, _us(time_ms, self.origin))


def _flow(phase: str, name: str, identity: int, pid: int, row: int, ts: float) -> Json:
    flow: Json = {"ph": phase, "id": identity, "pid": pid, "tid": row, "name": name, "cat": name, "ts": ts}
    if phase == "f":
        flow["bp"] = "e"
    return flow


def _name(trace: Trace, i: int) -> str:
    event = trace.events[i]
    if type(event) is Op:
        return trace.signatures[event.signature].name
    return f"nccl:{event.kind}" if type(event) is Collective else type(event).__name__


def _arrows(timeline: Timeline, origin: float) -> Iterator[Json]:
    """Arrows between streams, and between the ranks of a collective."""
    program = timeline.program
    base = timeline.step_end_ms[-2] if len(timeline.step_end_ms) > 1 else 0.0
    last = len(timeline.step_end_ms) - 1
    identity = 0
    for name, producer, consumer, leave, arrive in _pairs(timeline, program):
        if program.step[producer] != last or program.step[consumer] != last:
            continue
        identity += 1
        times = (leave - base, arrive - base)
        for phase, item, time_ms in zip("sf", (producer, consumer), times, strict=True):
            row = _FIRST_STREAM + program.stream[item]
            pid = program.ranks[program.rank[item]]
            yield _flow(phase, name, identity, pid, row, _us(time_ms, origin))


def _pairs(timeline: Timeline, program: Program) -> Iterator[tuple[str, int, int, float, float]]:
    """(name, from item, to item, leaving at, arriving at)."""
    run = timeline.execution
    for item, waits in enumerate(program.dependencies):
        for other in waits:
            if program.stream[other] != program.stream[item]:
                # An arrow leaves from within its slice.
                inside = min(_TICK_MS, (run.end[other] - run.start[other]) / 2)
                yield "synchronisation", other, item, run.end[other] - inside, run.start[item]
    for number, transfer in enumerate(program.transfers):
        late = run.last_member[number]
        begin = run.transfer_start[number]
        for member in transfer.members:
            if member != late:
                yield "collective", late, member, begin, begin
