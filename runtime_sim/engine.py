"""The discrete-event engine: executes a linked program and says when every item ran, and why not before.

State changes only at the times on one heap; ties are decided by item number, so a run is reproducible to the
bit.

- An item is *eligible* when its host has issued it and all that it waits for has ended (`_eligible`).
- A rank's compute engine and its two copy engines serve one kernel at a time; among the eligible ones the
  side streams' come first (PyTorch gives FSDP's streams a high priority), then the one that was issued first
  (TorchSim Algorithm 5, `_arbitrate`).
- A communication kernel occupies its stream as soon as it is eligible, but no link. Its transfers begin when
  all of their members have arrived (Maya's waitmap, `_arrive`), so ranks cannot block each other by holding
  links. Transfers in the same direction over the same links share them fairly (`sharing`).
- Rates (`_rerate`): work `w` proceeds as dw/dt = 1 / (interference * share), constant between two events: a
  kernel's interference is the overlap model's factor while a transfer is under way on its GPU, a transfer's
  while one of its GPUs computes.
- A host runs ahead until it has to wait: for items (HostWait) or for room in a stream's launch queue
  (`_run_host`).

The engine stops when nothing can happen any more. If something is unfinished then, the program is deadlocked.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from autosac.runtime_sim.program import Engine, Program
from autosac.runtime_sim.sharing import max_min_rates

HOST = -1
"""As a cause: the item waited for its launch."""

_COMMUNICATION = Engine.COMMUNICATION
_ISSUE = -1  # version of the heap's "reaches the device" entries


class Execution:
    """A run of a program. After `run`, per item (ms): `issue`, `start`, `end`; `cause`: the item it followed,
    or HOST.

    `freed_by`: the item that it waited for to leave its engine, or -1; `released_by`: the item that last kept
    the host waiting before it issued this one, or -1. Per transfer: `transfer_start`, `transfer_end`,
    `last_member`. Per rank and host point: `resume`, the host's time after it.
    """

    def __init__(self, program: Program, launch_latency_ms: float, queue_depth: int) -> None:
        count, transfers = len(program.ms), len(program.transfers)
        self.program = program
        self.launch_latency_ms = launch_latency_ms
        self.queue_depth = queue_depth
        self.issue, self.start, self.end = [0.0] * count, [-1.0] * count, [-1.0] * count
        self.cause, self.freed_by, self.released_by = [HOST] * count, [-1] * count, [-1] * count
        self.transfer_start, self.transfer_end = [-1.0] * transfers, [-1.0] * transfers
        self.last_member = [-1] * transfers
        self.resume: list[list[float]] = [[0.0] * len(points) for points in program.points]
        # Dependencies: one more for the launch.
        self._pending = [len(waits) + 1 for waits in program.dependencies]
        self._followers: list[list[int]] = [[] for _ in range(count)]
        for item, waits in enumerate(program.dependencies):
            for other in waits:
                self._followers[other].append(item)
        # Hosts: next point, time, items that are waited for, who released it last; items launched per stream.
        ranks = len(program.points)
        self.cursor = [0] * ranks
        self.host_ms = [0.0] * ranks
        self.host_waits: list[set[int]] = [set() for _ in range(ranks)]
        self.last_released = [-1] * ranks
        self._waiting_hosts: dict[int, list[int]] = {}
        self._launched: list[list[list[int]]] = [[[] for _ in names] for names in program.stream_names]
        # Engines (rank * 3 + engine, -1 for communication) and transfers under way.
        self._slots = [
            -1 if engine == _COMMUNICATION else 3 * rank + engine
            for rank, engine in zip(program.rank, program.engine, strict=True)
        ]
        self._ready = [0.0] * count
        self._waiting: list[list[int]] = [[] for _ in range(3 * ranks)]
        self._running = [-1] * (3 * ranks)
        self._freed = [-1] * (3 * ranks)
        self._contended: dict[int, None] = {}
        self._disturbed: dict[int, None] = {}
        self._reshared: dict[int, None] = {}  # ranks whose links are shared anew
        self._crowding = [1.0] * transfers  # by how much a transfer is slower than alone, because of others
        self._uses = [(t.limit, tuple(t.uses.items())) for t in program.transfers]
        self._shared: dict[tuple[Any, ...], list[float]] = {}  # rates of transfers with such uses
        self._absent = [len(t.members) + len(t.missing) + (t.after_start >= 0) for t in program.transfers]
        self._announced = {t.after_start: number for number, t in enumerate(program.transfers) if t.after_start >= 0}
        self._legs_left = {item: len(legs) for item, legs in program.legs.items()}
        self._active: list[dict[int, None]] = [{} for _ in range(ranks)]
        # Running work: items, then transfers. The heap holds (time, work, version).
        self._left = [*program.ms, *(t.ms for t in program.transfers)]
        self._rate = [0.0] * (count + transfers)
        self._since = [0.0] * (count + transfers)
        self._version = [0] * (count + transfers)
        self._heap: list[tuple[float, int, int]] = []

    def run(self) -> bool:
        """Execute everything; False if something can never be executed."""
        for rank in range(len(self.host_ms)):
            self._run_host(rank)
        heap, count, version = self._heap, len(self.start), self._version
        while heap:
            now = heap[0][0]
            while heap and heap[0][0] <= now:
                _, work, stamp = heappop(heap)
                if stamp == _ISSUE:
                    self._eligible(work, now, HOST)
                elif stamp == version[work]:
                    if work < count:
                        self._complete(work, now)
                    else:
                        self._end_transfer(work - count, now)
            if self._contended:
                self._arbitrate(now)
            if self._disturbed:
                self._rerate(now)
        return all(end >= 0 for end in self.end) and all(
            cursor == len(points) for cursor, points in zip(self.cursor, self.program.points, strict=True)
        )

    # ---- hosts ---------------------------------------------------------------------------------------------

    def _run_host(self, rank: int, paid: bool = False) -> None:
        """Let the host go on until it has to wait. `paid`: it has been waiting at this point, whose cost is
        paid.
        """
        points, resume, launched = self.program.points[rank], self.resume[rank], self._launched[rank]
        stream, end, depth = self.program.stream, self.end, self.queue_depth
        latency_ms, released_by = self.launch_latency_ms, self.last_released[rank]
        issue, pending, heap = self.issue, self._pending, self._heap
        cursor, host_ms = self.cursor[rank], self.host_ms[rank]
        while cursor < len(points):
            cost_ms, item, waits, sync_ms, _ = points[cursor]
            if not paid:
                host_ms += cost_ms
            paid = False
            if item >= 0:
                queue = launched[stream[item]]
                if len(queue) >= depth and end[room := queue[-depth]] < 0:
                    self._wait(rank, {room})
                    break
                queue.append(item)
                launch_ms = issue[item] = host_ms + latency_ms
                self.released_by[item] = released_by
                left = pending[item] = pending[item] - 1
                if not left:
                    heappush(heap, (launch_ms, item, _ISSUE))
            else:
                unfinished = {i for i in waits if end[i] < 0} if waits else None
                if unfinished:
                    self._wait(rank, unfinished)
                    break
                host_ms += sync_ms
            resume[cursor] = host_ms
            cursor += 1
        self.cursor[rank], self.host_ms[rank] = cursor, host_ms

    def _wait(self, rank: int, unfinished: set[int]) -> None:
        """A host waits for items."""
        self.host_waits[rank] = unfinished
        for other in unfinished:
            self._waiting_hosts.setdefault(other, []).append(rank)

    def _release_hosts(self, item: int, now: float) -> None:
        for rank in self._waiting_hosts.pop(item):
            waits = self.host_waits[rank]
            waits.discard(item)
            if not waits:
                if now > self.host_ms[rank]:
                    self.host_ms[rank], self.last_released[rank] = now, item
                self._run_host(rank, paid=True)

    # ---- items ---------------------------------------------------------------------------------------------

    def _eligible(self, item: int, now: float, cause: int) -> None:
        self.cause[item] = cause
        self._ready[item] = now
        slot = self._slots[item]
        if slot < 0:
            self.start[item] = now
            for leg in self.program.legs[item]:
                self._arrive(leg.transfer, item, now)
            if item in self._announced:
                self._arrive(self._announced[item], item, now)
        else:
            self._waiting[slot].append(item)
            self._contended[slot] = None

    def _complete(self, item: int, now: float) -> None:
        pending, issue = self._pending, self.issue
        self.end[item] = now
        slot = self._slots[item]
        if slot >= 0:
            self._running[slot] = -1
            self._freed[slot] = item
            self._contended[slot] = None
            if not slot % 3 and self._active[slot // 3]:
                self._disturbed[slot // 3] = None
        for follower in self._followers[item]:
            left = pending[follower] = pending[follower] - 1
            if not left:
                if issue[follower] > now:
                    heappush(self._heap, (issue[follower], follower, _ISSUE))
                else:
                    self._eligible(follower, now, item)
        if item in self._waiting_hosts:
            self._release_hosts(item, now)

    def _arbitrate(self, now: float) -> None:
        """Give every free engine to the first of the kernels that are eligible for it."""
        for slot in self._contended:
            waiting = self._waiting[slot]
            if not waiting or self._running[slot] >= 0:
                continue
            if len(waiting) == 1:
                item = waiting.pop()
            else:
                item = min(waiting, key=self._priority)
                waiting.remove(item)
            self.start[item] = now
            if self._ready[item] < now:
                self.freed_by[item] = self._freed[slot]
            self._running[slot] = item
            self._since[item] = now
            if not slot % 3 and self._active[slot // 3]:
                self._disturbed[slot // 3] = None
            else:
                self._set_rate(item, 1.0, now)
        self._contended.clear()

    def _priority(self, item: int) -> tuple[bool, int]:
        return self.program.stream[item] == 0, item

    # ---- transfers and rates -------------------------------------------------------------------------------

    def _arrive(self, number: int, item: int, now: float) -> None:
        self.last_member[number] = item
        self._absent[number] -= 1
        if self._absent[number]:
            return
        transfer = self.program.transfers[number]
        self.transfer_start[number] = now
        self._since[len(self.start) + number] = now
        for rank in transfer.ranks:
            self._active[rank][number] = None
            self._disturbed[rank] = self._reshared[rank] = None

    def _end_transfer(self, number: int, now: float) -> None:
        transfer = self.program.transfers[number]
        self.transfer_end[number] = now
        for rank in transfer.ranks:
            del self._active[rank][number]
            self._disturbed[rank] = self._reshared[rank] = None
        for item in transfer.members:
            self._legs_left[item] -= 1
            if not self._legs_left[item]:
                self._complete(item, now)

    def _rerate(self, now: float) -> None:
        """Adjust the rates on all ranks where something began or ended."""
        transfers, running, count = self.program.transfers, self._running, len(self.start)
        touched: dict[int, None] = {}
        for rank in self._disturbed:
            active, item = self._active[rank], running[3 * rank]
            if item >= 0:
                slowest = 1.0
                if active:
                    slowdowns = self.program.slowdowns[item]
                    for number in active:
                        slowest = max(slowest, slowdowns[transfers[number].inter_node])
                self._set_rate(item, 1.0 / slowest, now)
            if active:
                touched.update(active)
        self._disturbed.clear()
        if self._reshared:
            touched.update(self._share())
        for number in touched:
            transfer, slowdown = transfers[number], self._crowding[number]
            if transfer.slowdown > 1 and any(running[3 * rank] >= 0 for rank in transfer.ranks):
                slowdown *= transfer.slowdown
            self._set_rate(count + number, 1.0 / slowdown, now)

    def _share(self) -> dict[int, None]:
        """Divide the links where transfers began or ended. The transfers that may be faster or slower now."""
        transfers = self.program.transfers
        found = dict.fromkeys(number for rank in self._reshared for number in self._active[rank])
        self._reshared.clear()
        open_ = list(found)
        while open_:  # and those that share links with them, directly or by way of others
            for rank in transfers[open_.pop()].ranks:
                for other in self._active[rank]:
                    if other not in found:
                        found[other] = None
                        open_.append(other)
        uses = tuple([self._uses[number] for number in found])
        rates = self._shared.get(uses)
        if rates is None:
            rates = max_min_rates([transfers[n].limit for n in found], [transfers[n].uses for n in found])
            self._shared[uses] = rates
        for number, rate in zip(found, rates, strict=True):
            self._crowding[number] = transfers[number].limit / rate
        return found

    def _set_rate(self, work: int, rate: float, now: float) -> None:
        old = self._rate[work]
        if rate == old:
            return
        left = max(0.0, self._left[work] - (now - self._since[work]) * old)
        self._left[work], self._since[work], self._rate[work] = left, now, rate
        self._version[work] += 1
        heappush(self._heap, (now + left / rate, work, self._version[work]))
