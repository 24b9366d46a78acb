"""Values that depend on how many layers there are, learnt from two sizes and rendered for any.

Let k count the periods of layers beyond those of the smaller step, and j = 0 ... k - 1 the copies of an inserted run. Every
number in the rows of a trace (an index of a storage, a signature, an event; a size; the number in ``layers.7``) is taken
to be affine in both:

    v(j, k) = start + per_copy * j + per_layer * k

which covers references within a copy, to a fixed row, from the end, and to the mirrored copy (the backward's to the
forward's). `fit` reads the three unknowns off the last copy before the insertion in both steps, v(-1, 0) and v(-1, 1), and
off the inserted one, v(0, 1). A row that is no copy is given as v(0), v(1), v(1). What is no number must be equal.

A sequence that grows is a `Grown`: fixed elements and runs, found by `alignment`. Nothing here knows what a trace is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from autosac.induction.alignment import Refusal, insertions

# A number in a text that can be taken out and put back.
_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,17})(?!\d)")
ElementKey = Callable[[Any, int], Any]  # (element, 0 in the smaller step or 1 in the larger) -> what aligns it


class Plane:
    """start + per_copy * j + per_layer * k."""

    __slots__ = ("per_copy", "per_layer", "start")

    def __init__(self, start: int, per_copy: int, per_layer: int) -> None:
        self.start, self.per_copy, self.per_layer = start, per_copy, per_layer


class Text:
    """A text with numbers: `pattern` for str.format."""

    __slots__ = ("numbers", "pattern")

    def __init__(self, pattern: str, numbers: list[Any]) -> None:
        self.pattern, self.numbers = pattern, numbers


class TupleTemplate:
    """A tuple, or named tuple, of `kind`."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: type, fields: list[Any]) -> None:
        self.kind, self.fields = kind, fields


class TemplateSegment(NamedTuple):
    """Templates that stand once, or once per copy."""

    is_run: bool
    templates: list[Any]


class Grown:
    """A tuple that is longer with more layers."""

    __slots__ = ("segments",)

    def __init__(self, segments: list[TemplateSegment]) -> None:
        self.segments = segments


def pattern_of(text: str) -> str:
    """The text with its numbers left out."""
    return _NUMBER.sub("#", text)


# ---- learning -------------------------------------------------------------------------------------------------------


def fit(first: Any, second: Any, third: Any, element_key: Callable[[type, int], ElementKey], field: str) -> Any:
    """A template through three values (see the module's docstring); a value that is always the same is its own.

    `element_key(kind, i)` says how the elements of a row's i-th field are aligned. Refusal if no template fits.
    """
    if first == second == third:
        return first
    kind = type(first)
    if type(second) is not kind or type(third) is not kind:
        raise Refusal(f"{field} is of different types")
    if kind is int:
        return Plane(first + third - second, third - second, second - first)
    if kind is str:
        return _fit_text(first, second, third, field)
    if not isinstance(first, tuple):
        raise Refusal(f"{field} is {first!r}, {second!r}, {third!r}")
    if len(first) != len(second) or len(second) != len(third):
        raise Refusal(f"{field} differs in length")
    names: Sequence[str] = getattr(kind, "_fields", ())
    fields = []
    for i, (a, b, c) in enumerate(zip(first, second, third, strict=True)):
        if a == b == c:
            fields.append(a)
        elif type(a) is int:
            fields.append(Plane(a + c - b, c - b, b - a))
        else:
            name = f"{field}.{names[i]}" if names else field
            grows = isinstance(a, tuple) and b is c and len(a) != len(b)
            fields.append(
                fit_sequence(a, b, element_key(kind, i), element_key, name)
                if grows
                else fit(a, b, c, element_key, name)
            )
    return TupleTemplate(kind, fields)


def _fit_text(first: str, second: str, third: str, field: str) -> Text:
    pattern = pattern_of(first)
    if pattern_of(second) != pattern or pattern_of(third) != pattern:
        raise Refusal(f"{field} is {first!r}, {second!r}, {third!r}")
    numbers = [
        a if a == b == c else Plane(a + c - b, c - b, b - a)
        for a, b, c in zip(*(map(int, _NUMBER.findall(text)) for text in (first, second, third)), strict=True)
    ]
    escaped = _NUMBER.sub("\0", first).replace("{", "{{").replace("}", "}}")
    return Text(escaped.replace("\0", "{}"), numbers)


def fit_sequence(
    shorter: Sequence[Any],
    longer: Sequence[Any],
    key: ElementKey,
    element_key: Callable[[type, int], ElementKey],
    field: str,
) -> Grown:
    """A template of a sequence whose elements align by their keys."""
    index: dict[Any, int] = {}
    keys = [
        np.fromiter((index.setdefault(key(e, side), len(index)) for e in elements), np.int64, len(elements))
        for side, elements in enumerate((shorter, longer))
    ]
    segments: list[TemplateSegment] = []
    done = inserted = 0  # in `longer`; elements inserted so far
    for first, length in [*insertions(keys[0], keys[1], field), (len(longer), 0)]:
        fixed = zip(shorter[done - inserted : first - inserted], longer[done:first], strict=True)
        segments.append(TemplateSegment(False, [a if a == b else fit(a, b, b, element_key, field) for a, b in fixed]))
        copies = zip(
            shorter[first - inserted - length : first - inserted],
            longer[first - length : first],
            longer[first : first + length],
            strict=True,
        )
        segments.append(TemplateSegment(True, [fit(a, b, c, element_key, field) for a, b, c in copies]))
        inserted += length
        done = first + length
    return Grown(segments)


# ---- rendering ------------------------------------------------------------------------------------------------------


def render(template: Any, layers: int) -> Any:
    """The value of a template that stands once, with `layers` periods of layers added."""
    kind = type(template)
    if kind is Plane:
        return template.start + template.per_layer * layers
    if kind is TupleTemplate:
        values = [render(f, layers) if type(f) in _TEMPLATES else f for f in template.fields]
        return tuple.__new__(template.kind, values)
    if kind is Grown:
        return tuple(_elements(template, layers))
    if kind is Text:
        return template.pattern.format(*(render(number, layers) for number in template.numbers))
    return template


def _elements(template: Grown, layers: int) -> Iterator[Any]:
    for is_run, templates in template.segments:
        if is_run:
            yield from chain.from_iterable(zip(*(_copies(t, layers) for t in templates), strict=True))
        else:
            for t in templates:
                yield render(t, layers) if type(t) in _TEMPLATES else t


def _copies(template: Any, layers: int) -> Iterable[Any]:
    """The values of all copies j = 0 ... layers - 1 of a template in a run."""
    kind = type(template)
    if kind is Plane:
        first = template.start + template.per_layer * layers
        step = template.per_copy
        return range(first, first + step * layers, step) if step else repeat(first, layers)
    if kind is TupleTemplate:
        columns = [_copies(f, layers) if type(f) in _TEMPLATES else repeat(f, layers) for f in template.fields]
        rows = zip(*columns, strict=True)
        return rows if template.kind is tuple else map(partial(tuple.__new__, template.kind), rows)
    if kind is Text:
        return map(template.pattern.format, *(_copies(number, layers) for number in template.numbers))
    if kind is Grown:
        raise Refusal("a row of every layer grows with the number of layers")
    return repeat(template, layers)


_TEMPLATES = frozenset({Plane, Text, TupleTemplate, Grown})
