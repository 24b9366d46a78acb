"""From the un-checkpointed capture and captures of units that recompute to the capture in which chosen units recompute.

Every row of the step's skeleton is the same in all of these captures (this is checked), so each may come from any of them:
inside a unit, in forward and backward, from the capture in which that unit is checkpointed, elsewhere from the
un-checkpointed one. So do the recomputations and the `detach` between skeleton rows. A storage ends elsewhere in each capture,
because other references hold it: one end counts if whoever is at work there is as in that capture, and the last of
those that count is the end (`_Mixture._end`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autosac.derivation.gathers import Aligned
from autosac.derivation.steps import NEVER, CapturedSteps, NotDerivableError, Skeleton, Tables
from autosac.trace import (
    Alloc,
    Collective,
    Event,
    EventRecord,
    EventWait,
    Free,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    RecordStream,
    Region,
    StepBegin,
    Storage,
    Trace,
    WorkWait,
)

_NOBODY = -1
_ROOT = 0


class Mixer:
    """Steps in which chosen modules recompute all, from templates; what two such steps share is found once."""

    def __init__(self, observed: CapturedSteps) -> None:
        self._observed = observed
        self._known: dict[tuple[int, ...], _Matched] = {}

    def mixed(self, templates: Sequence[CapturedSteps], sources: Mapping[int, int]) -> Trace:
        """The step in which the modules of `sources` recompute all, each as in the template at that position. Of `templates`
        each stays at its position from call to call.

        NotDerivableError if the captures differ in more than checkpointing accounts for.
        """
        used = tuple(sorted(set(sources.values())))  # of the others nothing is taken, the ends of storages neither
        matched = self._known.get(used)
        if matched is None:
            matched = self._known[used] = _Matched([self._observed, *(templates[position] for position in used)])
        numbers = {position: k for k, position in enumerate(used, start=1)}
        return _Mixture(matched, {module: numbers[position] for module, position in sources.items()}).trace()


class _Matched:
    """Captures by position, with what is the same in all of them: 0 is the un-checkpointed one. Storages are told apart by
    (capture, id); those that are in the skeleton of all captures are called by capture 0's id, so are events and collectives.

    `owners`: for every row of the skeleton the module at work there. `units`: for every capture and module the unit that
    recomputes it there. `places`: for every capture, between which rows of the skeleton capture 0's storages end.
    """

    def __init__(self, captures: Sequence[CapturedSteps]) -> None:
        self.captures = captures
        self.tables = Tables([steps.trace for steps in captures])
        self.skeletons = self._common(captures)
        self.units = [self.inherited({b.module: k for b in c.recomputations}) for k, c in enumerate(captures)]
        self.owners = self._owned()
        self.names: list[dict[int, int]] = [{} for _ in captures]
        self.events: list[dict[int, int]] = [{} for _ in captures]
        self.works: list[dict[int, int]] = [{} for _ in captures]
        self._match()
        self.places = list(map(self._places, self.skeletons, self.names))
        # The recorded step's storage for storages of earlier steps: there it is known who is at work.
        self.counterparts = {same: storage for storage, earlier in captures[0].earlier.items() for same in earlier}

    def _common(self, captures: Sequence[CapturedSteps]) -> list[Skeleton]:
        """The skeletons of all captures, with the same rows."""
        skeletons = [Skeleton(steps, self.tables, k) for k, steps in enumerate(captures)]
        aligned = [Aligned(skeletons[0], other) for other in skeletons[1:]]
        hooks = {i: module for found in aligned for i, (module, _) in found.hooks.items()}
        others = [{found.pairs[i]: module for i, module in hooks.items() if i in found.pairs} for found in aligned]
        return [skeleton.without(rows) for skeleton, rows in zip(skeletons, [hooks, *others], strict=True)]

    def inherited(self, sources: Mapping[int, int]) -> list[int]:
        """For every module, what `sources` says of it or of the closest module around it; _NOBODY where there is none."""
        parents = self.captures[0].trace.module_parents
        found: list[int] = []
        for module, parent in enumerate(parents):
            found.append(sources.get(module, found[parent] if 0 <= parent < module else _NOBODY))
        return found

    def _owned(self) -> list[int]:
        """For every row of the skeleton, the module at work there, the root outside of forward and backward."""
        base, storages = self.captures[0], self.captures[0].trace.storages
        owner = _ROOT
        found = []
        for i in self.skeletons[0].rows:
            row = base.rows[i]
            kind = type(row)
            if kind is Op or kind is Collective or kind is ModuleEnter or kind is ModuleExit:
                owner = _module(row)
            elif kind is Alloc:
                owner = _module(storages[row.storage])
            elif kind is StepBegin:
                owner = _ROOT
            found.append(owner)
        return found

    def _match(self) -> None:
        """Which storage, event and collective of each capture is which of capture 0."""
        base = self.captures[0]
        for k, skeleton in enumerate(self.skeletons):
            rows = self.captures[k].rows
            for mine, theirs in zip(self.skeletons[0].rows, skeleton.rows, strict=True):
                row, same = rows[theirs], base.rows[mine]
                kind = type(row)
                if kind is Alloc:
                    self.names[k][row.storage] = same.storage
                elif kind is EventRecord or kind is EventWait:
                    if self.events[k].setdefault(row.event, same.event) != same.event:
                        raise NotDerivableError("other events are waited for")
                elif kind is Collective:
                    self.works[k][row.work] = same.work
                elif kind is RecordStream and self.names[k].get(row.storage) != same.storage:
                    raise NotDerivableError("other memory is used on another stream")

    @staticmethod
    def _places(skeleton: Skeleton, names: Mapping[int, int]) -> dict[int, int]:
        rows = skeleton.steps.rows
        at: dict[int, int] = {}
        for j, gap in enumerate(skeleton.gaps):
            for i in gap:
                row = rows[i]
                if type(row) is Free and row.storage in names:
                    at[names[row.storage]] = j
        return at


class _Mixture:
    """The step in which each module of `sources` recomputes all, as in the capture at that position."""

    def __init__(self, matched: _Matched, sources: Mapping[int, int]) -> None:
        self._matched = matched
        self._captures, self._tables, self._skeletons = matched.captures, matched.tables, matched.skeletons
        self._units, self._owners = matched.units, matched.owners
        self._source_of_module = matched.inherited(sources)
        self._storages = list(matched.captures[0].trace.storages)
        self._names, self._events, self._works = (
            list(map(dict, known)) for known in (matched.names, matched.events, matched.works)
        )
        self._new_event = 1 + max((event for events in self._events for event in events), default=-1)
        self._ends = self._chosen_ends()

    # ---- ends of storages -------------------------------------------------------------------------------------------

    def _chosen_ends(self) -> dict[int, int]:
        """For storages that end: the capture whose end it is."""
        places, counterparts = self._matched.places, self._matched.counterparts
        found: dict[int, int] = {}
        for storage in self._matched.names[0]:
            later = counterparts.get(storage)
            if later is None or all(at.get(later) == places[0].get(later) for at in places):
                later = storage
            found[storage] = self._end([at.get(later, NEVER) for at in places])
        return found

    def _end(self, places: Sequence[int]) -> int:
        """The capture with the last end of those that count."""
        best = -1
        for k, place in enumerate(places):
            owner = self._owners[place - 1] if 0 < place < NEVER else _ROOT
            source = self._source_of_module[owner]
            as_there = self._units[k][owner] == _NOBODY if source == _NOBODY else source == k
            if as_there and (best < 0 or place > places[best]):
                best = k
        if best < 0:
            raise NotDerivableError("it is not clear how long a storage is held")
        return best

    # ---- the result -------------------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """The mixed capture."""
        parts: list[list[Event]] = [[], []]
        base = self._skeletons[0]
        split = self._captures[0].split
        used = sorted({0, *self._source_of_module} - {_NOBODY})
        places: dict[tuple[int, int], int] = {}
        filled = list(map(any, zip(*(self._skeletons[k].gaps for k in used), strict=True)))  # in any capture
        for j in range(len(base.gaps)):
            row = base.rows[j] if j < len(base.rows) else len(self._captures[0].rows)
            before = self._source(self._owners[j - 1]) if j else 0
            after = self._source(self._owners[j]) if j < len(base.rows) else 0
            for k in self._order(used, before, after) if filled[j] else ():
                for i in self._skeletons[k].gaps[j]:
                    event = self._captures[k].rows[i]
                    if self._belongs(k, i):
                        if self._skeletons[k].inside[i] >= 0:
                            places[k, i - self._captures[k].split] = len(parts[1])
                        parts[i >= self._captures[k].split].append(self._translated(k, event))
            if j < len(base.rows):
                event = self._captures[after].rows[self._skeletons[after].rows[j]]
                parts[row >= split].append(self._translated(after, event))
        return replace(
            self._captures[0].trace,
            info=replace(self._captures[0].trace.info, checkpointing="plan"),
            signatures=self._tables.signatures,
            sources=self._tables.sources,
            groups=self._tables.groups,
            storages=tuple(self._storages),
            prologue=tuple(parts[0]),
            events=tuple(parts[1]),
            regions=self._recomputations(places),
        )

    def _recomputations(self, places: Mapping[tuple[int, int], int]) -> tuple[Region, ...]:
        """The regions of the recomputations that are in the result, which `places` says where they are."""
        found = []
        for k, capture in enumerate(self._captures):
            for region in capture.trace.regions if k else ():
                if self._source_of_module[region.module] != k:
                    continue
                calls = []
                for call in region.calls:
                    rows = [places[k, i] for i in range(call.first, call.last) if (k, i) in places]
                    first = rows[0] if rows else 0
                    calls.append(call._replace(first=first, last=first + len(rows)))
                entry, last = places[k, region.first], places[k, region.last - 1] + 1
                found.append(region._replace(first=entry, last=last, calls=tuple(calls)))
        return tuple(found)

    def _source(self, module: int) -> int:
        """The capture that a module's rows come from."""
        return max(self._source_of_module[module], 0)

    @staticmethod
    def _order(used: Sequence[int], before: int, after: int) -> list[int]:
        """Between two rows: first what belongs to the one before, last what belongs to the one after."""
        first = [] if before == after else [before]
        return [*first, *(k for k in used if k not in (before, after)), after]

    def _belongs(self, k: int, i: int) -> bool:
        """Whether what is between the skeleton's rows at row i of capture k comes from there."""
        event = self._captures[k].rows[i]
        if i in self._skeletons[k].hooks:
            return self._source(self._skeletons[k].hooks[i]) == k
        if type(event) is Free:
            end = self._ends.get(self._names[k].get(event.storage, -1))
            if end is not None:
                return end == k
        block = self._skeletons[k].inside[i]
        if block >= 0:
            return self._source(block) == k
        if type(event) is Op:
            return self._source(_module(event)) == k
        assert type(event) is Free or type(event) is Alloc or type(event) is RecordStream
        return self._source(_module(self._captures[k].trace.storages[event.storage])) == k

    def _translated(self, k: int, event: Any) -> Event:
        """The row in the result's numbering."""
        kind, translated = type(event), event
        tables = self._tables
        if kind is Op:
            signature, stream, module, phase, source, inputs, outputs = event
            return Op(
                tables.signature_maps[k][signature],
                stream,
                module,
                phase,
                tables.source_maps[k][source],
                tuple([self._name(k, s) for s in inputs]),
                tuple([self._name(k, s) for s in outputs]),
            )
        if kind is Free:
            return Free(self._name(k, event.storage))
        if kind is Alloc or kind is RecordStream:
            translated = event._replace(storage=self._name(k, event.storage))
        elif kind is Collective:
            translated = event._replace(
                group=tables.group_maps[k][event.group],
                work=self._work(k, event.work),
                signature=tables.signature_maps[k][event.signature],
                source=tables.source_maps[k][event.source],
                inputs=tuple([self._name(k, s) for s in event.inputs]),
                outputs=tuple([self._name(k, s) for s in event.outputs]),
            )
        elif kind is WorkWait:
            translated = event._replace(work=self._work(k, event.work))
        elif kind is EventRecord or kind is EventWait:
            translated = event._replace(event=self._event(k, event.event))
        row: Event = translated
        return row

    def _name(self, k: int, storage: int) -> int:
        """The storage's number in the result; one that only capture k has gets a new one."""
        if storage < 0:
            return storage
        name = self._names[k].get(storage)
        if name is None:
            found: Storage = self._captures[k].trace.storages[storage]
            name = self._names[k][storage] = len(self._storages)
            self._storages.append(found._replace(source=self._tables.source_maps[k][found.source]))
        return name

    def _event(self, k: int, event: int) -> int:
        known = self._events[k].get(event)
        if known is None:
            known = self._events[k][event] = self._new_event
            self._new_event += 1
        return known

    def _work(self, k: int, work: int) -> int:
        known = self._works[k].get(work)
        if known is None:
            known = self._works[k][work] = 1 + max(max(works.values(), default=0) for works in self._works)
        return known


def _module(row: Op | Collective | ModuleEnter | ModuleExit | Storage) -> int:
    """The module at work, if it is in its forward or backward; else the root."""
    return row.module if Phase.FORWARD <= row.phase <= Phase.RECOMPUTE else _ROOT
