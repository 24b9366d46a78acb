"""Where FSDP gathers what a unit needs and has let go of: parameters of modules in the unit with FSDP units of their own.

Without checkpointing FSDP's hook does it, before the backward of such a module. A recomputation does it by itself, right
before the first operator that reads them; then the hook finds nothing to do. What FSDP does is the same in both places, but
for the module that it is counted to. So its rows leave the skeletons of both captures (`Aligned`), and in a plan's step they
move to where the plan's first operator needs them, or to the hook if no operator that runs again does (`Gather`).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from autosac.derivation.steps import CapturedSteps, NotDerivableError, Skeleton
from autosac.trace import UNSHARD, Alloc, Collective, Event, Free, Op, RecordStream, Storage


class GatheredRows(NamedTuple):
    """Rows of one capture in which a recomputation gathers the parameters of `module`."""

    module: int
    rows: range


def gatherings(steps: CapturedSteps) -> list[GatheredRows]:
    """Those of a capture under a plan, in order."""
    if not steps.recomputations:
        return []
    return sorted(
        (
            GatheredRows(call.occurrence, range(call.first + steps.split, call.last + steps.split))
            for region in steps.trace.regions
            for call in region.calls
            if call.op == UNSHARD
        ),
        key=lambda gathering: gathering.rows.start,
    )


class Aligned:
    """The un-checkpointed capture's skeleton beside that of a capture under a plan, or under the job's own checkpointing.

    `hooks`: rows of the un-checkpointed one that the other has in a recomputation, with the module whose parameters are
    gathered, and the other's row. `pairs`: its other rows, each with the other's.

    Under the job's own checkpointing nothing tells which rows of a recomputation gather: any may, in their order.
    """

    def __init__(self, base: Skeleton, other: Skeleton) -> None:
        self.hooks: dict[int, tuple[int, int]] = {}
        self.pairs: dict[int, int] = {}
        self._base, self._other = base, other
        blocks = other.steps.recomputations if other.steps.is_own else ()
        inside = [GatheredRows(block.module, range(block.first, block.last)) for block in blocks]
        self._align_step(inside or gatherings(other.steps))
        for i, (module, row) in list(self.hooks.items()):
            if type(base.steps.rows[i]) is Alloc:
                for mine, theirs in zip(earlier_places(base.steps, i), earlier_places(other.steps, row), strict=True):
                    self.hooks[mine] = (module, theirs)
        mine, theirs = (_until(skeleton, skeleton.steps.split) for skeleton in (base, other))
        rows = [n for n in range(mine) if base.rows[n] not in self.hooks]
        if [base.keys[n] for n in rows] != other.keys[:theirs]:
            raise NotDerivableError("other rows of the step before depend on checkpointing")
        self.pairs.update(zip((base.rows[n] for n in rows), other.rows[:theirs], strict=True))

    def _align_step(self, found: Sequence[GatheredRows]) -> None:
        base, other = self._base, self._other
        coming = deque(found)
        waiting: deque[tuple[int, int]] = deque()  # gathered before this place: the module, the row
        j, total = _until(other, other.steps.split), len(other.rows)
        for n in range(_until(base, base.steps.split), len(base.rows)):
            i, key = base.rows[n], base.keys[n]
            at = other.rows[j] if j < total else len(other.steps.rows)
            while coming and coming[0].rows.start < at:
                module, rows = coming.popleft()
                waiting += [(module, row) for row in rows if type(other.steps.rows[row]) is not Free]
            if j < total and key == other.keys[j]:
                self.pairs[i] = at
                j += 1
                continue
            work = _work(base, i)
            while other.steps.is_own and waiting and work != _work(other, waiting[0][1]):
                waiting.popleft()  # an operator that runs again
            if not waiting or work != _work(other, waiting[0][1]):
                raise NotDerivableError("other rows of the step depend on checkpointing")
            self.hooks[i] = waiting.popleft()
        if j < total or ((coming or waiting) and not other.steps.is_own):
            raise NotDerivableError("a recomputation gathers other parameters than the backward")


def _until(skeleton: Skeleton, row: int) -> int:
    """How many rows of the skeleton are before a row of its capture."""
    return bisect.bisect_left(skeleton.rows, row)


def _work(skeleton: Skeleton, i: int) -> tuple[object, ...]:
    """What FSDP does in a row, whatever module it is counted to, and on whatever stream: its hooks have their own."""
    kind, key = type(skeleton.steps.rows[i]), skeleton.key(i)
    if kind is Op:
        return (kind, key[0])
    return (kind, key[0], key[1]) if kind is Alloc or kind is Collective else (kind,)


class Hook(NamedTuple):
    """What FSDP's hook does where a template gathers in a recomputation: `parts` are rows of the template, each with the row
    after which they come then; `storages` describes those that are made here. All are counted to the hook's module.
    """

    parts: tuple[tuple[int, tuple[Any, ...]], ...]
    storages: Mapping[int, Storage]


def hooks_of(base: Skeleton, other: Skeleton, sources: Sequence[int]) -> dict[range, Hook]:
    """The hook for every gathering of `other`, a capture under a plan, by its rows. `sources`: base's in other's numbering."""
    aligned = Aligned(base, other)
    bare = base.without({i: module for i, (module, _) in aligned.hooks.items()})
    gap = _places(bare, aligned.hooks)
    partner = {row: i for i, (_, row) in aligned.hooks.items()}
    rows, storages = base.steps.rows, base.steps.trace.storages
    hooks = {}
    for gathering in gatherings(other.steps):
        parts: dict[int, list[Any]] = {}
        described: dict[int, Storage] = {}
        place = -1
        for i in gathering.rows:
            row = other.steps.rows[i]
            if i in partner:
                theirs = rows[partner[i]]
                place = _after_detaches(other, *gap[partner[i]])
                if type(row) is Alloc:
                    storage = storages[theirs.storage]
                    described[row.storage] = storage._replace(source=sources[storage.source])
                else:
                    row = _placed(row, theirs, sources)
            parts.setdefault(place, []).append(row)
        hooks[gathering.rows] = Hook(tuple((place, tuple(part)) for place, part in parts.items()), described)
    return hooks


def _placed(row: Any, theirs: Any, sources: Sequence[int]) -> Any:
    """The row with the module, source and streams of another capture's."""
    same = {name: getattr(theirs, name) for name in ("module", "phase", "stream", "other") if name in row._fields}
    if "source" in row._fields:
        same["source"] = sources[theirs.source]
    return row._replace(**same)


def _places(bare: Skeleton, hooks: Collection[int]) -> dict[int, tuple[int, int]]:
    """For every row of hooks: its gap, and how many `detach` of the node before are there before it."""
    found = {}
    for j, rows in enumerate(bare.gaps):
        detaches = 0
        for i in rows:
            if i in hooks:
                found[i] = (j, detaches)
            elif type(bare.steps.rows[i]) is Op:
                detaches += 1
    return found


def _after_detaches(skeleton: Skeleton, gap: int, detaches: int) -> int:
    """The last row in a gap before the next node of the backward takes what was saved for it, which are `detach` as well."""
    last = skeleton.rows[gap - 1]
    for i in skeleton.gaps[gap]:
        if type(skeleton.steps.rows[i]) is Op:
            detaches -= 1
        if skeleton.inside[i] >= 0 or detaches < 0:
            break
        last = i
    return last


class Edit(NamedTuple):
    """Rows of a template that go away, and what comes right after row `after` in their place."""

    gone: tuple[int, ...]
    after: int
    rows: tuple[Any, ...]


class Gather:
    """One gathering of a template, in `rows`, by a unit whose operators run again in the rows `reruns`."""

    def __init__(self, template: CapturedSteps, rows: range, reruns: Sequence[range], hook: Hook) -> None:
        self._template = template
        self._rows = rows
        self.hook = hook
        found = template.rows
        self._readers = [
            c
            for c, again in enumerate(reruns)
            if any(type(found[i]) is Op and not hook.storages.keys().isdisjoint(found[i].inputs) for i in again)
        ]

    def first_reader(self, needed: Set[int]) -> int | None:
        """The first operator that reads what is gathered, of those that run again; None: FSDP's hook gathers."""
        return next((c for c in self._readers if c in needed), None)

    def is_moved(self, needed: Set[int]) -> bool:
        """Whether another operator is the first, if only these run again."""
        return not self._readers or self.first_reader(needed) != self._readers[0]

    def moved(self, after: int, deleted: Set[int]) -> Iterator[Edit]:
        """The same rows right after row `after` of the recorded step, and in the steps before it; `deleted` rows are gone."""
        rows = self._template.rows
        yield Edit(tuple(self._rows), after, tuple(rows[i] for i in self._rows))
        for gone, place in zip(self._earlier(), self._places_before(after, deleted), strict=True):
            yield Edit(gone, place, tuple(rows[i] for i in gone))

    def by_hook(self, numbers: Mapping[int, int], deleted: Set[int]) -> Iterator[Edit]:
        """FSDP's hook gathers. `numbers` are the new ones of what is made, in this step and the earlier ones."""
        rows = self._template.rows
        yield Edit(tuple(self._rows), self._rows.start, ())
        for after, part in self.hook.parts:
            yield Edit((), after, tuple(renamed(row, numbers) for row in part))
        after, _ = self.hook.parts[-1]
        for gone, place in zip(self._earlier(), self._places_before(after, deleted), strict=True):
            yield Edit(gone, place, tuple(renamed(rows[i], numbers) for i in gone))

    def _earlier(self) -> list[tuple[int, ...]]:
        """The same rows of the earlier steps, of which only allocations and ends are recorded."""
        template = self._template
        changes = [i for i in self._rows if type(template.rows[i]) in (Alloc, Free)]
        return list(zip(*(earlier_places(template, i) for i in changes), strict=True))

    def _places_before(self, after: int, deleted: Set[int]) -> list[int]:
        """For each earlier step, the last of its rows that happen up to row `after` of the recorded one."""
        template = self._template
        found: list[tuple[int, ...]] = []
        for i in range(after, template.split - 1, -1):
            row = template.rows[i]
            kind = type(row)
            if (kind is Alloc or kind is Free) and i not in deleted and row.storage in template.earlier:
                found.append(earlier_places(template, i))
                if kind is Alloc:
                    return [max(places) for places in zip(*found, strict=True)]
        raise NotDerivableError("nothing is allocated before")


def earlier_places(steps: CapturedSteps, i: int) -> tuple[int, ...]:
    """Where what happens in row i, an allocation or an end, happens in the steps before the recorded one."""
    row = steps.rows[i]
    places = steps.begins if type(row) is Alloc else steps.ends
    try:
        return tuple(places[same] for same in steps.earlier[row.storage])
    except KeyError:
        raise NotDerivableError("the first step gathers other parameters than the recorded one") from None


def renamed(row: Any, names: Mapping[int, int]) -> Event:
    """The row with other names of storages."""
    kind, found = type(row), row
    if kind is Op or kind is Collective:
        if not names.keys().isdisjoint(row.inputs) or not names.keys().isdisjoint(row.outputs):
            found = row._replace(
                inputs=tuple(names.get(s, s) for s in row.inputs), outputs=tuple(names.get(s, s) for s in row.outputs)
            )
    elif (kind is Alloc or kind is Free or kind is RecordStream) and row.storage in names:
        found = row._replace(storage=names[row.storage])
    result: Event = found
    return result
