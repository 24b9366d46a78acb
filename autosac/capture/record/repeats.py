"""Stretches of a step that repeat with other storages, events and works: logged once, compared, and copied.

The rows of a step refer to storages, events and works by number. A microbatch makes some of them (`Numbering`), is given
others, which differ from microbatch to microbatch (inputs), and shares the rest with all of them (parameters). In place of the
numbers that it makes or is given, a `RowStretch` has their positions among these. So two microbatches do the same if and only
if their stretches are equal, and the rows of a third one follow from its own numbers (`copy`).

A number that is made by one microbatch and used by another one stays a number, and the stretches differ; except, if that is
asked for, one that the microbatch `before` has made, or one that something `held` as the stretch began: what modules hold from
one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autosac.capture.device import device as simulated
from autosac.capture.record.recorder import Extent, Recorder
from autosac.trace import (
    IN_TURN,
    Alloc,
    Call,
    Collective,
    EventRecord,
    EventWait,
    Free,
    GraphLaunch,
    HostWait,
    Op,
    Phase,
    RecordStream,
    Region,
    Storage,
    WorkWait,
)

_FIRST_MADE = IN_TURN - 1  # `ALONE`, which is -1 for no number at all, and `IN_TURN` stay what they are
_FIRST_GIVEN = -(1 << 40)
_FIRST_BEFORE = -(1 << 50)
_FIRST_HELD = -(1 << 60)
Translation = Callable[[int], int]


class RepetitionError(Exception):
    """What was taken for a repetition is none: the job has to be captured whole."""


class _Numbers:
    """Numbers of one kind, and the positions that stand for them. `before`: those of the microbatch before, if it counts."""

    def __init__(self, before: _Numbers | None) -> None:
        self.made: list[int] = []
        self.given: list[int] = []
        self._before = before
        self._positions: dict[int, int] = {}
        self._held: Sequence[int] = ()
        self._held_positions: dict[int, int] = {}

    def make(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._positions[number] = _FIRST_MADE - len(self.made)
            self.made.append(number)

    def give(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._positions.setdefault(number, _FIRST_GIVEN - len(self.given))
            self.given.append(number)

    def hold(self, numbers: Sequence[int]) -> None:
        """What is held as a stretch begins; -1 stands for nothing."""
        self._held = numbers
        self._held_positions = {number: _FIRST_HELD - place for place, number in enumerate(numbers) if number >= 0}

    @staticmethod
    def is_given(position: int) -> bool:
        return _FIRST_BEFORE < position <= _FIRST_GIVEN

    def position(self, number: int) -> int:
        found = self._held_positions.get(number, self._positions.get(number))
        if found is None and self._before is not None:
            made = self._before._positions.get(number, 0)
            if _FIRST_GIVEN < made <= _FIRST_MADE:
                return _before(made)
        return number if found is None else found

    def number(self, position: int) -> int:
        if position > _FIRST_MADE:
            return position
        if position > _FIRST_GIVEN:
            return self.made[_FIRST_MADE - position]
        if position > _FIRST_BEFORE:
            return self.given[_FIRST_GIVEN - position]
        if position <= _FIRST_HELD:
            return self._held[_FIRST_HELD - position]
        assert self._before is not None
        return self._before.made[_FIRST_BEFORE - position]


def _before(position: int) -> int:
    """What stands, in the microbatch after, for what is made at this position."""
    return position - _FIRST_MADE + _FIRST_BEFORE


class Numbering:
    """The numbers of one microbatch, which is the step's `index`-th. `before`: those of the one before, if they count."""

    def __init__(self, index: int, before: Numbering | None = None) -> None:
        self.index = index
        self.storages: _Numbers = _Numbers(None if before is None else before.storages)
        self.events: _Numbers = _Numbers(None if before is None else before.events)
        self.works: _Numbers = _Numbers(None if before is None else before.works)

    def positions(self, row: Any) -> Any:
        """The row with positions in place of numbers."""
        return _translated(row, self.storages.position, self.events.position, self.works.position)

    def row(self, positions: Any) -> Any:
        """The inverse."""
        return _translated(positions, self.storages.number, self.events.number, self.works.number)


def _translated(row: Any, storage: Translation, event: Translation, work: Translation) -> Any:
    kind = type(row)
    if kind is Op:
        return row._replace(inputs=tuple(map(storage, row.inputs)), outputs=tuple(map(storage, row.outputs)))
    if kind is Alloc or kind is Free or kind is RecordStream:
        return row._replace(storage=storage(row.storage))
    if kind is Collective:
        return row._replace(
            work=work(row.work),
            batch=work(row.batch),
            inputs=tuple(map(storage, row.inputs)),
            outputs=tuple(map(storage, row.outputs)),
        )
    if kind is WorkWait:
        return row._replace(work=work(row.work))
    if kind is EventRecord or kind is EventWait or kind is HostWait:
        return row._replace(event=event(row.event))
    return row


@dataclass(frozen=True, kw_only=True)
class RowStretch:
    """What a microbatch logged between two places. `storages` are those it made, `originals` their numbers there (they are not
    compared), `phase` that of the step at the end.
    """

    rows: tuple[Any, ...]
    storages: tuple[Storage, ...]
    events: int
    works: int
    marks: tuple[int, ...]
    begun: tuple[int, ...]
    regions: tuple[Region, ...]
    phase: Phase
    originals: tuple[int, ...]

    def is_like(self, other: RowStretch) -> bool:
        """Whether both do the same."""
        return all(
            getattr(self, name) == getattr(other, name) for name in self.__dataclass_fields__ if name != "originals"
        )

    def held(self) -> set[int]:
        """Positions of the storages that begin here and do not end here."""
        return {row.storage for row in self.rows if type(row) is Alloc} - self.freed()

    def freed(self) -> set[int]:
        """Positions of the storages that end here."""
        return {row.storage for row in self.rows if type(row) is Free}

    def carried(self) -> set[int]:
        """Positions of the storages that begin here and that the next microbatch ends, as this one those of the one before."""
        freed = self.freed()
        return {position for position in self.held() if _before(position) in freed}


def stretch(recorder: Recorder, numbering: Numbering, before: Extent) -> RowStretch | None:
    """What has been logged since `before`; None if it cannot be copied."""
    after, log = recorder.extent(), recorder.log
    made = range(before.storages, after.storages)
    numbering.storages.make(made)
    numbering.events.make(range(before.events, after.events))
    numbering.works.make(range(before.works, after.works))
    rows = log.events[before.rows :]
    if not recorder.is_between or any(type(row) is GraphLaunch for row in rows):
        return None
    storage = numbering.storages.position
    return RowStretch(
        rows=tuple(map(numbering.positions, rows)),
        storages=tuple(recorder.storages.storages[before.storages :]),
        events=after.events - before.events,
        works=after.works - before.works,
        marks=tuple(map(numbering.events.position, log.marks.made[before.marks :])),
        begun=tuple(map(numbering.works.position, log.works.made[before.begun :])),
        regions=tuple(
            _moved(region, -before.rows, storage, -numbering.index if _repeats_forward(region, log.events) else None)
            for region in recorder.regions[before.regions :]
        ),
        phase=recorder.phases.phase,
        originals=tuple(made),
    )


def _repeats_forward(region: Region, rows: Sequence[Any]) -> bool:
    """Whether the region at its place in `rows` is of a recomputation. In place of inputs it has the forward's number."""
    phases = (row.phase for row in rows[region.first : region.last] if hasattr(row, "phase"))  # memory has none
    return next(phases, None) is Phase.RECOMPUTE


def _moved(region: Region, by: int, storage: Translation, forwards: int | None) -> Region:
    """The region so many rows later. `forwards`: what to add to the number of the forward that it repeats, if it does."""

    def each(storages: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(storage, storages))

    def moved(call: Call) -> Call:
        return call._replace(
            first=call.first + by,
            last=call.last + by,
            created=each(call.created),
            reads=each(call.reads),
            writes=each(call.writes),
            results=each(call.results),
        )

    inputs = each(region.inputs) if forwards is None else tuple(number + forwards for number in region.inputs)
    return region._replace(
        first=region.first + by,
        last=region.last + by,
        calls=tuple(map(moved, region.calls)),
        inputs=inputs,
        outputs=each(region.outputs),
    )


def copy(
    recorder: Recorder,
    numbering: Numbering,
    like: RowStretch,
    real: Callable[[int], bool],
    let_go: Callable[[], None],
) -> None:
    """Log what a stretch of another microbatch would have logged. The ends of `real` storages, which Python objects hold, are
    logged by their deaths, of which `let_go` is the cause. RepetitionError if they do not die there.
    """
    log, first = recorder.log, len(recorder.log.events)
    numbering.storages.make(recorder.storages.copied(like.originals))
    numbering.works.make(recorder.take_works(like.works))
    began = simulated.event_numbers.take(like.events)
    numbering.events.make(range(began, began + like.events))
    for positions in like.rows:
        row = numbering.row(positions)
        if type(row) is Free and real(row.storage):
            before = len(log.events)
            let_go()
            if log.events[before:] != [row]:
                raise RepetitionError("memory is held longer than in the microbatch before")
        else:
            log.events.append(row)
    after = len(log.events)
    let_go()
    if len(log.events) != after or after - first != len(like.rows):
        raise RepetitionError("memory is let go of that the microbatch before held")
    for event in like.marks:
        log.marks.add(numbering.events.number(event))
    for work in like.begun:
        log.works.add(numbering.works.number(work))
    recorder.regions += [
        _moved(
            region,
            first,
            numbering.storages.number,
            numbering.index if _repeats_forward(region, like.rows) else None,
        )
        for region in like.regions
    ]
    recorder.phases.phase = like.phase
