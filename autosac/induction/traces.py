"""The trace of a step with many equal layers, from three steps of the same job with few.

    T(n), T(n + p)  --fit-->  template  --render at 2-->  must equal T(n + 2p)  --render at k-->  T(n + kp)

This is induction over the number of layers: the two smaller steps give the hypothesis (`templates`), the third tests it, row
by row and number by number; p is the period of the kinds of layers (1 if all are alike). A job that does not grow by
repetition (`alignment`), or not in affine numbers (`templates`), or that the hypothesis does not predict, is refused.

What is aligned are rows of the trace's tables and events, and the elements of lists that grow (an optimizer's, gradient
clipping's), by keys that leave out every number which may depend on the layers (`_Side`): a storage is known by who made it
and, if both steps have such a storage of that size, by its size.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from autosac.induction.templates import ElementKey, fit, fit_sequence, pattern_of, render
from autosac.trace import Alloc, Call, Free, Phase, Region, Signature, Storage, TensorMeta, Trace, TraceInfo

# Fields of rows that are indices or sizes which change with the layers; they do not tell what a row is.
_UNSTABLE = frozenset({"first", "last", "event", "work", "batch", "nbytes", "peer"})
_PARTS = (
    "info",
    "modules",
    "module_parents",
    "module_classes",
    "sources",
    "groups",
    "streams",
    "signatures",
    "storages",
    "prologue",
    "events",
    "regions",
)
assert set(_PARTS) == {field.name for field in fields(Trace)}


class _Begin(NamedTuple):
    """Where the recorded step begins in a history."""


class _Turn(NamedTuple):
    """Where a pass over the layers begins that nothing else may tell from the one before (`_Turns`)."""


_BEGIN = _Begin()
_TURN = _Turn()
_NO_EVENTS = frozenset({_Begin, _Turn, Storage, Region})


class _Tree(NamedTuple):
    """A value of JSON as a tuple: `kind` is dict (of pairs), list, sorted (a sorted list of texts) or float."""

    kind: str
    content: Any


class TraceFamily:
    """The traces of a job over its number of layers. `two` are those of n and n + p layers. Refusal if they are no family."""

    def __init__(self, two: Sequence[Trace]) -> None:
        smaller, larger = two
        sides = _sides(smaller, larger)
        element_key = _element_keys(sides)

        def rows(name: str, key: ElementKey) -> Any:
            return fit_sequence(getattr(smaller, name), getattr(larger, name), key, element_key, name)

        names = [list(zip(t.modules, t.module_parents, t.module_classes, strict=True)) for t in two]
        self._modules = fit_sequence(
            names[0], names[1], lambda row, _: (pattern_of(row[0]), row[2]), element_key, "modules"
        )
        infos = [_freeze(trace.info.document()) for trace in two]
        self._info = fit(infos[0], infos[1], infos[1], element_key, "info")
        self._rows = {
            "sources": rows("sources", lambda text, _: text),
            "groups": rows("groups", lambda group, _: group),
            "streams": rows("streams", lambda text, _: text),
            "signatures": rows("signatures", lambda row, side: sides[side].signature(row)),
        }
        self._history = fit_sequence(
            _history(smaller), _history(larger), lambda row, side: sides[side].row(row), element_key, "events"
        )

    def member(self, periods: int) -> Trace:
        """The trace of n + `periods` * p layers."""
        modules = render(self._modules, periods)
        history = render(self._history, periods)
        begin = next(i for i, row in enumerate(history) if type(row) is _Begin)
        return Trace(
            info=TraceInfo.of(_thaw(render(self._info, periods))),
            modules=tuple(row[0] for row in modules),
            module_parents=tuple(row[1] for row in modules),
            module_classes=tuple(row[2] for row in modules),
            storages=tuple(row for row in history if type(row) is Storage),
            prologue=tuple(row for row in history[:begin] if type(row) not in _NO_EVENTS),
            events=tuple(row for row in history[begin:] if type(row) not in _NO_EVENTS),
            regions=tuple(row for row in history[begin:] if type(row) is Region),
            **{name: render(template, periods) for name, template in self._rows.items()},
        )


def _history(trace: Trace) -> list[Any]:
    """Prologue, events, storages (before their allocation) and regions (before their first event) as one sequence.

    Together they tell apart what would look the same by itself: the layers of one microbatch and those of the next. So do the
    turns where the layers' numbers start again: a middle pipeline stage allocates nothing else between two microbatches.
    """
    history: list[Any] = []
    turns = _Turns(trace)
    storages, regions = deque(trace.storages), deque(trace.regions)
    for part in (trace.prologue, trace.events):
        for i, event in enumerate(part):
            while part is trace.events and regions and regions[0].first <= i:
                history.append(regions.popleft())
            if type(event) is Alloc:
                while len(trace.storages) - len(storages) <= event.storage:
                    if turns.before(storages[0]):
                        history.append(_TURN)
                    history.append(storages.popleft())
            history.append(event)
        if part is trace.prologue:
            history.append(_BEGIN)
    return [*history, *regions, *storages]


class _Turns:
    """Where the forward's allocations go back to an earlier layer, or the backward's to a later one."""

    def __init__(self, trace: Trace) -> None:
        numbers = (re.search(r"(?<=\.)\d+", name) for name in trace.modules)
        self._layers = [int(found[0]) if found else -1 for found in numbers]
        self._last: dict[Phase, int] = {}

    def before(self, row: Storage) -> bool:
        """Whether there is one before this storage, of all in their order."""
        layer = self._layers[row.module] if row.module >= 0 else -1
        if layer < 0 or row.phase not in (Phase.FORWARD, Phase.BACKWARD):
            return False
        last = self._last.get(row.phase, layer)
        self._last[row.phase] = layer
        return layer < last if row.phase is Phase.FORWARD else layer > last


def difference(a: Trace, b: Trace) -> str | None:
    """The first place where two traces differ, None if they are equal in everything."""
    for part in _PARTS:
        left, right = getattr(a, part), getattr(b, part)
        if left == right:
            continue
        if isinstance(left, TraceInfo):
            left, right = left.document(), right.document()
            keys = [key for key in left if key not in right or left[key] != right[key]]
            return f"{part}: {', '.join(keys) or 'more entries'}"
        for i, (x, y) in enumerate(zip(left, right, strict=False)):
            if x != y:
                return f"{part}[{i}]: {str(x)[:150]} is not {str(y)[:150]}"
        return f"{part}: {len(left)} and {len(right)} entries"
    return None


def ends_once(trace: Trace) -> bool:
    """Whether every storage that ends is alive then."""
    alive = set[int]()
    for event in (*trace.prologue, *trace.events):
        if type(event) is Alloc:
            alive.add(event.storage)
        elif type(event) is Free:
            if event.storage not in alive:
                return False
            alive.remove(event.storage)
    return True


# ---- keys -----------------------------------------------------------------------------------------------------------


class _Side:
    """How the rows of one of the two traces are known."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.modules = [pattern_of(name) for name in trace.modules]
        self.common_storages: frozenset[Any] = frozenset()
        self.common_signatures: frozenset[Signature] = frozenset()
        self.common_metas: frozenset[TensorMeta] = frozenset()
        self._storages: list[Any] = []
        self._signatures: list[Any] = []
        self._fields: dict[type, list[tuple[int, Any]]] = {}

    def finish(self) -> None:
        """What is common to both sides is known: number the tables' rows."""
        self._storages = [self.storage(row) for row in self.trace.storages]
        self._signatures = [hash(self.signature(row)) for row in self.trace.signatures]
        self._fields.clear()

    def sized(self, row: Storage) -> Any:
        """A storage by what made it, and its size."""
        return (row.op, row.stream, row.label, row.phase, self.module(row.module), row.source, row.nbytes)

    def storage(self, row: Storage) -> Any:
        """The key of a storage."""
        sized = self.sized(row)
        return hash(sized if sized in self.common_storages else sized[:-1])

    def signature(self, row: Signature) -> Any:
        """The key of a signature."""
        return row if row in self.common_signatures else (row.name, row.is_view, row.is_random, row.wrappers)

    def meta(self, meta: TensorMeta) -> Any:
        """The key of a tensor's description."""
        return meta if meta in self.common_metas else None

    def module(self, index: int) -> str:
        """The key of a module."""
        return self.modules[index] if index >= 0 else ""

    def storage_at(self, index: int) -> Any:
        """The key of the storage with an index, -1 if it is none."""
        return self._storages[index] if index >= 0 else -1

    def row(self, row: Any) -> Any:
        """The key of an event, a storage, a region or a call."""
        kind = type(row)
        if kind is Storage:
            return kind, self.storage(row)
        known = self._fields.get(kind)
        if known is None:
            known = self._fields[kind] = self._stable_fields(row)
        return (kind, *[row[i] if lookup is None else lookup(row[i]) for i, lookup in known])

    def _stable_fields(self, row: Any) -> list[tuple[int, Callable[[int], Any] | None]]:
        lookups: dict[str, Callable[[int], Any]] = {
            "storage": self.storage_at,
            "signature": self._signatures.__getitem__,
            "module": self.module,
        }
        return [
            (i, lookups.get(name))
            for i, name in enumerate(row._fields)
            if name not in _UNSTABLE and not isinstance(row[i], tuple)
        ]


def _sides(smaller: Trace, larger: Trace) -> tuple[_Side, _Side]:
    sides = _Side(smaller), _Side(larger)
    storages = [{side.sized(row) for row in side.trace.storages} for side in sides]
    metas = [{m for s in side.trace.signatures for m in (*s.inputs, *s.outputs)} for side in sides]
    for side in sides:
        side.common_storages = frozenset(storages[0] & storages[1])
        side.common_signatures = frozenset({*smaller.signatures} & {*larger.signatures})
        side.common_metas = frozenset(metas[0] & metas[1])
        side.finish()
    return sides


def _element_keys(sides: tuple[_Side, _Side]) -> Callable[[type, int], ElementKey]:
    """How the elements of the lists in a row's fields are known: storages, descriptions of tensors, calls, names, numbers."""

    def plain(element: Any, side: int) -> Any:
        if type(element) is int:
            return int
        if type(element) is TensorMeta:
            return sides[side].meta(element)
        if type(element) is Call:
            return sides[side].row(element)
        if type(element) is str:
            return pattern_of(element)
        if isinstance(element, tuple):
            return tuple(plain(e, side) for e in element)
        return element

    def storage(element: Any, side: int) -> Any:
        return sides[side].storage_at(element) if type(element) is int else plain(element, side)

    def element_key(kind: type, _: int) -> ElementKey:
        return plain if kind in (Signature, TensorMeta, tuple, _Tree) else storage

    return element_key


# ---- what the trace is of ---------------------------------------------------------------------------------------------


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return _Tree("dict", tuple((key, _freeze(v)) for key, v in value.items()))
    if isinstance(value, (list, tuple)):
        if len(value) > 1 and all(isinstance(v, str) for v in value) and list(value) == sorted(value):
            return _Tree("sorted", tuple(sorted(value, key=_natural)))
        return _Tree("list", tuple(_freeze(v) for v in value))
    if isinstance(value, float) and value.is_integer():
        return _Tree("float", int(value))
    return value


def _natural(text: str) -> list[tuple[int, str]]:
    """The order in which layers.2 comes before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in text.split(".")]


def _thaw(value: Any) -> Any:
    if not isinstance(value, _Tree):
        return value
    if value.kind == "dict":
        return {key: _thaw(v) for key, v in value.content}
    if value.kind == "float":
        return float(value.content)
    return sorted(value.content) if value.kind == "sorted" else [_thaw(v) for v in value.content]
