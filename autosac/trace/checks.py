"""Checks of a trace file's document: types, ranges, and that what is referred to exists.

A capture may have been edited, or damaged in a way that leaves it readable. The tables are checked column by column before
anything is made of them (`check_document`), so that everything behind a loaded trace can rely on it. What is wrong is a
ValueError that names the place in the document, the value and what is allowed. `TraceInfo` is checked by its annotations. The
tables are not: they hold millions of values, and what a number may be depends on the lengths of other tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

from autosac.display.printable import printable
from autosac.errors import SimulationError
from autosac.files.documents import is_deeper
from autosac.limits import MOST_GPUS
from autosac.trace.info import MOST, MOST_BYTES, TraceInfo
from autosac.trace.rows import IN_TURN

_MOST_STREAMS = 4096
_MOST_DIMENSIONS = 64
_INFO_DEPTH = 16
_KINDS = frozenset(
    {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    }
)
_PLACES = frozenset({"device", "cpu"})
_REASONS = frozenset({"item", "stream", "event", "device"})

Column = Sequence[Any]
Check = Callable[[Column, str], None]


def fail(place: str, value: Any, allowed: str) -> NoReturn:
    """ValueError on one line."""
    text = printable(repr(value))
    raise ValueError(f"{place} is {text if len(text) <= 60 else text[:57] + '...'}: expected {allowed}")


IMPOSSIBLE_CALL = (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError)
"""What a rule for an operator may raise if the operator cannot have been called with the tensors that a trace says."""


def impossible_call(signature: Any) -> SimulationError:
    """The error for such a signature."""
    shapes = ", ".join(str(list(meta.shape)) for meta in signature.inputs)
    return SimulationError(
        f"the operator {printable(repr(signature.name))} cannot have been called with tensors of {shapes}"
    )


# ---- columns -------------------------------------------------------------------------------------------------


def _whole(least: int, most: int, what: str = "") -> Check:
    """Whole numbers within these bounds."""

    def check(column: Column, place: str) -> None:
        if not column:
            return
        if set(map(type, column)) != {int} or min(column) < least or max(column) > most:
            i = next(i for i, v in enumerate(column) if type(v) is not int or not least <= v <= most)
            allowed = f"a whole number from {least} to {most}" + (f" ({what})" if what else "")
            fail(f"{place}[{i}]", column[i], allowed)

    return check


def _wholes(least: int, most: int, what: str = "") -> Check:
    """Lists of whole numbers within these bounds."""
    inner = _whole(least, most, what)

    def check(column: Column, place: str) -> None:
        _lists(column, place)
        flat = list(chain.from_iterable(column))
        if flat and (set(map(type, flat)) != {int} or min(flat) < least or max(flat) > most):
            for i, row in enumerate(column):
                inner(row, f"{place}[{i}]")

    return check


def _lists(column: Column, place: str) -> None:
    if column and set(map(type, column)) != {list}:
        i = next(i for i, v in enumerate(column) if type(v) is not list)
        fail(f"{place}[{i}]", column[i], "a list")


def _texts(column: Column, place: str) -> None:
    if column and set(map(type, column)) != {str}:
        i = next(i for i, v in enumerate(column) if type(v) is not str)
        fail(f"{place}[{i}]", column[i], "a text")


def _flags(column: Column, place: str) -> None:
    if column and set(map(type, column)) != {bool}:
        i = next(i for i, v in enumerate(column) if type(v) is not bool)
        fail(f"{place}[{i}]", column[i], "true or false")


def _one_of(names: frozenset[str]) -> Check:
    def check(column: Column, place: str) -> None:
        _texts(column, place)
        if not names.issuperset(column):
            i = next(i for i, v in enumerate(column) if v not in names)
            fail(f"{place}[{i}]", column[i], f"one of {', '.join(sorted(names))}")

    return check


def _metas(*, least: int = 0) -> Check:
    """Lists of [shape, stride, dtype, place]; sizes may be from `least` on."""

    def check(column: Column, place: str) -> None:
        _lists(column, place)
        for i, metas in enumerate(column):
            for j, meta in enumerate(metas):
                where = f"{place}[{i}][{j}]"
                if type(meta) is not list or len(meta) != 4:
                    fail(where, meta, "[shape, stride, dtype, place]")
                shape, stride, dtype, home = meta
                _wholes(least, MOST_BYTES)([shape], f"{where} (shape)")
                _wholes(0, MOST_BYTES)([stride], f"{where} (stride)")
                if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
                    fail(where, meta, "a stride for every size")
                if math.prod(shape) > MOST_BYTES:
                    fail(f"{where} (shape)", shape, f"at most {MOST_BYTES} elements")
                if type(dtype) is not str or type(home) is not str or home not in _PLACES:
                    fail(where, meta, "the name of a dtype, and device or cpu")

    return check


def _arguments(column: Column, place: str) -> None:
    """Lists of [name, plain value]."""
    _lists(column, place)
    for i, pairs in enumerate(column):
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str:
                fail(f"{place}[{i}]", pair, "[name, value]")
            if type(pair[1]) is dict or is_deeper(pair[1], 8):
                fail(f"{place}[{i}]", pair, "a plain value")


def _dims(column: Column, place: str) -> None:
    """Lists of [size, stride] of a process group."""
    _lists(column, place)
    for i, dims in enumerate(column):
        for dim in dims:
            if type(dim) is not list or len(dim) != 2:
                fail(f"{place}[{i}]", dim, "[size, stride]")
            _whole(1, MOST_GPUS)(dim, f"{place}[{i}]")
        if math.prod(size for size, _ in dims) > MOST_GPUS:
            fail(f"{place}[{i}]", dims, f"at most {MOST_GPUS} ranks")


def _table(columns: Any, names: Sequence[str], checks: Mapping[str, Check], place: str) -> int:
    """Check a table of columns; how many rows it has."""
    if type(columns) is not list or len(columns) not in (0, len(names)):
        fail(place, columns, f"a list of {len(names)} columns")
    if not columns:
        return 0
    _lists(columns, place)
    for name, column in zip(names, columns, strict=True):
        if len(column) != len(columns[0]):
            fail(f"{place}.{name}", column, f"{len(columns[0])} rows, as {names[0]} has")
        checks[name](column, f"{place}.{name}")
    return len(columns[0])


# ---- the document --------------------------------------------------------------------------------------------


def check_document(document: dict[str, Any], fields: Mapping[str, tuple[str, ...]], phases: int, labels: int) -> None:
    """Check everything that has a type, a range or a reference. `fields`: of the record types, by their names.

    KeyError for a part that is missing.
    """
    _info(document["info"])
    modules = document["modules"]
    if type(modules) is not list or len(modules) != 3:
        fail("modules", modules, "names, parents and classes")
    count = _table(
        modules,
        ("names", "parents", "classes"),
        {"names": _texts, "parents": _whole(-1, max(len(modules[0]) - 1, -1)), "classes": _texts},
        "modules",
    )
    for i, parent in enumerate(modules[1]):
        if parent >= i:
            fail(f"modules.parents[{i}]", parent, f"a module before {i}")
    sources, streams = document["sources"], document["streams"]
    for name, texts in (("sources", sources), ("streams", streams)):
        _lists([texts], name)
        _texts(texts, name)
    if len(streams) > _MOST_STREAMS:
        fail("streams", f"{len(streams)} names", f"at most {_MOST_STREAMS}")
    groups = _table(document["groups"], fields["Group"], _GROUP, "groups")
    signatures = _table(document["signatures"], fields["Signature"], _signature_checks(), "signatures")
    for i in range(signatures):
        _wholes(0, len(document["signatures"][1][i]) - 1, "an input")(
            [document["signatures"][6][i]], f"signatures.mutates[{i}]"
        )
    common: dict[str, Check] = {
        "module": _whole(0, count - 1, "a module"),
        "source": _whole(0, len(sources) - 1, "a source"),
        "phase": _whole(0, phases - 1, "a phase"),
        "stream": _whole(0, _MOST_STREAMS, "a stream"),
        "op": _texts,
        "signature": _whole(0, signatures - 1, "a signature"),
    }
    storages = _table(
        document["storages"],
        fields["Storage"],
        {**common, "nbytes": _whole(0, MOST_BYTES, "bytes"), "label": _whole(0, labels - 1, "a label")},
        "storages",
    )
    rows = _event_checks(common, storages, groups)
    waits = {**rows, "stream": _whole(-1, _MOST_STREAMS, "a stream"), "event": _whole(-1, MOST, "an event")}
    for part in ("prologue", "events"):
        _events(document[part], fields, rows, waits, part)
    total = len(document["events"]["order"])
    _operators(document, fields["Op"])
    _regions(document["regions"], fields, {**common, "storages": rows["inputs"]}, total)


_GROUP: dict[str, Check] = {
    "name": _texts,
    "offset": _whole(0, MOST_GPUS),
    "dims": _dims,
    "explicit": _wholes(0, MOST_GPUS, "a rank"),
}


def _signature_checks() -> dict[str, Check]:
    return {
        "name": _texts,
        "inputs": _metas(),
        "outputs": _metas(),
        "arguments": _arguments,
        "is_view": _flags,
        "is_random": _flags,
        "mutates": _wholes(0, MOST),
        "wrappers": _whole(0, MOST),
    }


def _event_checks(common: Mapping[str, Check], storages: int, groups: int) -> dict[str, Check]:
    """The columns of all kinds of events."""
    used = _wholes(-1, storages - 1, "a storage")
    return {
        **common,
        "inputs": used,
        "outputs": used,
        "storage": _whole(0, storages - 1, "a storage"),
        "event": _whole(0, MOST, "an event"),
        "other": common["stream"],
        "work": _whole(-1, MOST),
        "kind": _one_of(_KINDS),
        "nbytes": _whole(0, MOST_BYTES, "bytes"),
        "group": _whole(0, groups - 1, "a group"),
        "asynchronous": _flags,
        "peer": _whole(-1, MOST_GPUS, "a rank"),
        "batch": _whole(IN_TURN, MOST),
        "reason": _one_of(_REASONS),
        "step": _whole(0, MOST),
        "events": _whole(0, MOST),
    }


def _events(
    document: Any,
    fields: Mapping[str, tuple[str, ...]],
    rows: Mapping[str, Check],
    waits: Mapping[str, Check],
    part: str,
) -> None:
    if type(document) is not dict:
        fail(part, document, "the order and the columns of events")
    order, columns = document["order"], document["columns"]
    _lists([order], f"{part}.order")
    _whole(0, MOST)(order, f"{part}.order")
    if type(columns) is not dict:
        fail(f"{part}.columns", columns, "a table for each kind of event")
    for kind, table in columns.items():
        if kind not in fields:
            fail(f"{part}.columns", kind, "kinds of events")
        _table(table, fields[kind], waits if kind == "HostWait" else rows, f"{part}.{kind}")


def _operators(document: dict[str, Any], names: tuple[str, ...]) -> None:
    """An operator has as many storages as its signature has tensors."""
    tables = document["signatures"]
    for part in ("prologue", "events"):
        table = document[part]["columns"].get("Op") or []
        if not table:
            continue
        signature = table[names.index("signature")]
        for name, position in (("inputs", 1), ("outputs", 2)):
            wanted = [len(metas) for metas in tables[position]]
            for i, (used, s) in enumerate(zip(table[names.index(name)], signature, strict=True)):
                if len(used) != wanted[s]:
                    fail(f"{part}.Op.{name}[{i}]", used, f"{wanted[s]} storages, as its signature says")


def _regions(regions: Any, fields: Mapping[str, tuple[str, ...]], common: Mapping[str, Check], events: int) -> None:
    _lists([regions], "regions")
    place = _whole(0, events, "an event")
    for i, region in enumerate(regions):
        where = f"regions[{i}]"
        if type(region) is not list or len(region) != len(fields["Region"]) + 1:
            fail(where, region, f"{len(fields['Region']) + 1} parts")
        module, first, last, calls, inputs, outputs, table = region
        common["module"]([module], where)
        place([first, last], where)
        if first > last or calls != []:
            fail(where, [first, last, calls], "a range of events, and no calls beside the table")
        common["storages"]([inputs, outputs], where)
        call = {
            "op": _texts,
            "occurrence": _whole(-MOST, MOST),
            "outputs": _metas(least=-1),
            "first": place,
            "last": place,
            "is_view": _flags,
            "is_random": _flags,
            "must_save": _flags,
            "created": common["storages"],
            "reads": common["storages"],
            "writes": common["storages"],
            "results": common["storages"],
        }
        if _table(table, fields["Call"], call, f"{where}.calls"):
            _results(table, fields["Call"], f"{where}.calls")


def _results(table: Sequence[Column], names: tuple[str, ...], where: str) -> None:
    """A call has as many results as outputs."""
    counts = zip(*(map(len, table[names.index(name)]) for name in ("outputs", "results")), strict=True)
    for i, (wanted, found) in enumerate(counts):
        if found != wanted:
            fail(f"{where}.results[{i}]", table[names.index("results")][i], f"{wanted} storages, as it has outputs")


# ---- info ----------------------------------------------------------------------------------------------------


def _info(info: Any) -> None:
    if is_deeper(info, _INFO_DEPTH):
        fail("info", "a table", f"at most {_INFO_DEPTH} levels of nesting")
    found = TraceInfo.of(info)
    if found.rank >= found.world_size:
        fail("info.rank", found.rank, f"a rank of the world of {found.world_size}")
