"""The distinct ranks of a script: which they are, and their captured steps.

One rank is shown: it prints, and it always runs. Others run beside it, silently, if they are needed:

- a rank that a running one sends to or receives from (point to point), and whom that one needs, and so on: with pipeline
  parallelism one rank of each stage;
- where all communication is among all ranks, the last rank, to see whether ranks behave alike; if it trains otherwise
  (`train_alike`), the one in the middle as well, unless the last one only has shorter parts of parameters.

Ranks for which one that ran stands are dropped (`scripts.alike`). All that did not run are taken to be like one that ran. The
steps of the ranks that remain are executed together.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autosac.capture.processors import available_processors
from autosac.errors import CaptureError
from autosac.files.temporary import temporary_folder
from autosac.files.writing import write_bytes_atomically
from autosac.scripts.alike import has_shorter_parts, stands_for, train_alike
from autosac.scripts.launch import RankProcess, ScriptError, ScriptResult
from autosac.scripts.request import TRACE, ScriptOutcome, ScriptRequest
from autosac.scripts.waits import awaited, marker
from autosac.simulation import Pipeline, Simulation, Target, simulation_of
from autosac.trace import Collective, Trace

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksResult:
    """The captured steps of the distinct ranks, the shown one's first, and how that one has ended. `ran`: all that ran."""

    traces: tuple[Trace, ...]
    outcome: ScriptOutcome
    ran: tuple[int, ...]


@contextlib.contextmanager
def running_ranks(request: ScriptRequest) -> Iterator[tuple[RanksResult, Path]]:
    """Run the distinct ranks of a script, or those in `request.only`, of which the first is shown.

    Also gives the folder of their messages: whoever runs one of these ranks again finds there what others sent to it
    (`ScriptRequest.shared`). Errors: as `run_script`.
    """
    with temporary_folder() as folder:
        ranks = _Ranks(request, folder)
        try:
            ranks.run()
        finally:
            ranks.end()
        yield ranks.result(), folder


class _Ranks:
    def __init__(self, request: ScriptRequest, folder: Path) -> None:
        only = request.only
        self._shown = only[0] if only else request.rank
        self._finds = not only
        self._folder = folder
        self._request = replace(request, shared=str(folder), rank=self._shown, shown=self._shown)
        self._processes: dict[int, RankProcess] = {}
        self._waiting = list(only[1:])
        self._probes: set[int] = set()
        self._put_off: set[int] = set()
        self._alike: dict[int, int] = {}
        self._ended: set[int] = set()
        self._traces: dict[int, Trace] = {}
        self._among_all: bool | None = None  # not known yet
        self._late = -1  # the rank that was tried after others had kept their step: it finds files that they have left
        self._cores = available_processors()
        self._is_over = False

    def run(self) -> None:
        """Until all have ended."""
        self._start(self._shown)
        world_size = self._request.world_size
        if world_size == 1 or (not self._finds and not self._waiting):
            self._say_together()
            self._processes[self._shown].wait()
            return
        if self._finds:
            self._probe(world_size - 1 if self._shown != world_size - 1 else 0)
        while not self._is_over and (len(self._ended) < len(self._processes) or self._waiting):
            self._read_messages()
            time.sleep(_POLL_S)
        self._find_alike()

    def end(self) -> None:
        """Of all processes."""
        for process in self._processes.values():
            process.end()

    def result(self) -> RanksResult:
        """After their end."""
        shown = self._processes[self._shown].result()
        distinct = [rank for rank in self._processes if rank not in self._alike and rank != self._shown]
        return RanksResult(
            traces=(shown.trace, *(self._trace(rank) for rank in sorted(distinct))),
            outcome=shown.outcome,
            ran=tuple(sorted(self._processes)),
        )

    def _probe(self, rank: int) -> None:
        self._probes.add(rank)
        self._waiting.append(rank)

    def _start(self, rank: int) -> None:
        is_shown = rank == self._shown
        request = self._request
        if not is_shown:  # no more steps than are compared
            request = replace(request, rank=rank, quiet=True, fast_forward=False, steps=1)
        for mark in ("ended", "put-off"):
            (self._folder / f"{mark}-{rank}").unlink(missing_ok=True)
        self._processes[rank] = RankProcess(request, self._folder / f"rank-{rank}", silent=not is_shown)

    def _read_messages(self) -> None:
        """What has changed."""
        for path in self._folder.glob("need-*"):
            rank, by = (int(part) for part in path.name.removeprefix("need-").split("-by-"))
            if by in self._processes and (by not in self._probes or self._is_among_all):
                self._need(rank)
        for rank, process in self._processes.items():
            if rank not in self._ended and process.has_ended:
                self._ended.add(rank)
                (self._folder / f"ended-{rank}").touch()
                self._check(rank, process)
        if self._is_over:
            return
        while self._waiting and self._busy() < self._cores:
            self._start(self._waiting.pop(0))
        self._compare()

    def _need(self, rank: int) -> None:
        """It has to run, whatever it is like."""
        self._probes.discard(rank)
        self._put_off.discard(rank)
        if rank not in self._processes and rank not in self._waiting and self._finds:
            self._waiting.append(rank)
            if not self._has_trace(self._shown):
                self._put_probes_off()

    def _put_probes_off(self) -> None:
        """End those that have not kept their step."""
        for rank in [rank for rank in self._probes if rank not in self._processes or not self._has_trace(rank)]:
            self._end_probe(rank, "put-off")
            self._processes.pop(rank, None)
            self._ended.discard(rank)
            self._put_off.add(rank)

    def _end_probe(self, rank: int, mark: str = "ended") -> None:
        self._probes.discard(rank)
        if rank in self._waiting:
            self._waiting.remove(rank)
        if rank in self._processes:
            self._processes[rank].end()
            (self._folder / f"{mark}-{rank}").touch()
            marker(self._folder, rank).unlink(missing_ok=True)

    @property
    def _is_among_all(self) -> bool:
        """Whether the shown rank has kept its step, and communicates with all ranks or with none."""
        if self._among_all is None and self._has_trace(self._shown):
            self._among_all = _among_all(self._trace(self._shown), self._request.world_size)
        return bool(self._among_all)

    def _busy(self) -> int:
        """Processes that compute."""
        running = [rank for rank in self._processes if rank not in self._ended]
        return sum(not marker(self._folder, rank).exists() for rank in running)

    def _check(self, rank: int, process: RankProcess) -> None:
        """An error of the shown rank is reported in the end; another one's now."""
        if rank == self._shown:
            self._is_over = not self._has_trace(rank)
            return
        if rank in self._probes and not self._has_trace(self._shown):
            return  # judged later: it may have missed what ranks like it would tell it
        if rank == self._late and not self._has_trace(rank):
            print(
                f"autosac: rank {rank}, which ran after the others to see whether it is like them, has failed: "
                "it is assumed to be",
                file=sys.stderr,
            )
            self._drop(rank)
            return
        self._judge(rank)

    def _judge(self, rank: int) -> ScriptResult | None:
        process = self._processes[rank]
        try:
            return process.result()
        except ScriptError:
            sys.stderr.write(process.said())
            print(f"autosac: this was rank {rank} (--rank {self._shown} runs only that one)", file=sys.stderr)
            raise
        except CaptureError as e:
            raise CaptureError(f"rank {rank}: {e}") from e

    def _drop(self, rank: int) -> None:
        self._end_probe(rank)
        self._alike[rank] = self._shown
        if rank in self._processes:
            self._ended.add(rank)

    def _compare(self) -> None:
        """When all have kept their step: who is like another one, and then tell the shown rank whom to meet."""
        if (self._folder / "together.json").exists() or not self._has_trace(self._shown):
            return
        if self._is_among_all:
            for rank in sorted(self._put_off):
                self._probe(rank)
            self._put_off.clear()
        else:
            for rank in tuple(self._probes):
                self._drop(rank)
        others = [rank for rank in self._processes if rank != self._shown and rank not in self._alike]
        for rank in others:
            if rank in self._ended and not self._has_trace(rank):
                self._judge(rank)
        if self._waiting or not all(self._has_trace(rank) or self._needs_shown(rank) for rank in others):
            return
        self._find_alike()
        shown, middle = self._trace(self._shown), self._request.world_size // 2
        unlike = [self._trace(rank) for rank in self._probes - self._alike.keys() if self._has_trace(rank)]
        differ = any(not train_alike(shown, rank) and not has_shorter_parts(shown, rank) for rank in unlike)
        if differ and middle not in self._processes:
            self._late = middle
            self._probe(middle)
            return
        self._say_together()

    def _needs_shown(self, rank: int) -> bool:
        """Whether it waits for what the shown rank does after its step: rank 0 evaluates and tells the others the result, and
        the others' step goes on until then.
        """
        seen: set[int] = set()
        while rank not in seen:
            seen.add(rank)
            sender = awaited(self._folder, rank)
            if rank == self._shown or sender is None or (self._folder / f"ended-{sender}").exists():
                return rank == self._shown and sender is not None
            rank = sender
        return False

    def _find_alike(self) -> None:
        """For which probes one that ran before stands."""
        for rank in self._probes - self._alike.keys():
            if not (self._has_trace(rank) and self._has_trace(self._shown)):
                continue
            before = [self._shown, *(other for other in self._processes if other < rank and other not in self._alike)]
            found = next(
                (other for other in before if other != rank and stands_for(self._trace(other), self._trace(rank))), None
            )
            if found is not None:
                self._alike[rank] = found

    def _say_together(self) -> None:
        others = [rank for rank in self._processes.keys() - self._alike.keys() - {self._shown} if self._has_trace(rank)]
        names = [str(self._processes[rank].folder) for rank in sorted(others)]
        write_bytes_atomically(self._folder / "together.json", json.dumps(names).encode())

    def _has_trace(self, rank: int) -> bool:
        return (self._processes[rank].folder / TRACE).exists()

    def _trace(self, rank: int) -> Trace:
        if rank not in self._traces:
            self._traces[rank] = self._processes[rank].trace()
        return self._traces[rank]


def ranks_of(traces: Sequence[Trace], target: Target) -> tuple[Simulation, ...]:
    """The ranks' steps, executed together."""
    simulations = tuple(simulation_of(trace, target) for trace in traces)
    return Pipeline(stages=simulations).joined() if len(simulations) > 1 else simulations


def _among_all(trace: Trace, world_size: int) -> bool:
    """Whether all that communicate are all ranks."""
    used = {event.group for event in trace.events if type(event) is Collective}
    return all(trace.groups[group].size in (1, world_size) for group in used)
