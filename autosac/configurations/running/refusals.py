"""What TorchTitan refuses is learnt, and not tried again.

A layout's *features* are the knobs that it turns away from their usual values, and the pairs of them, with these values or,
for degrees, any above 1: a tensor degree of 4, tensor and context parallelism together. A feature is to blame for a refusal if

- `_ALIKE` layouts with it were refused for the same reason,
- they differ from each other in two more knobs at least, so that it is not those that are to blame,
- for any degree above 1, two degrees at least were refused,
- one of them had as many replicas, and a pipeline if this one has (fewer ranks share parameters then: FSDP refuses experts
  that its ranks do not divide), and
- no layout with it was ever taken.

Layouts with such a feature are then refused for its reason without a capture, if they have all other features, too, that the
refused ones have in common and that were never taken: any of these may be the cause. That is an induction and no proof:
reports say for how many layouts it was made. Sizes (microbatch, number of GPUs) are no features: what they cause is memory,
and memory is no refusal.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from autosac.configurations.space.layout import Layout

_ALIKE = 8
_SIZES = frozenset({"gpu", "global_batch", "microbatch", "shard"})
_KNOBS = tuple(field.name for field in fields(Layout) if field.name not in _SIZES)
_USUAL = {field.name: field.default for field in fields(Layout)}  # the GPU has none

Feature = tuple[tuple[str, Any], ...]  # knobs with their values; None: any degree above 1


class Refusals:
    """What was refused, and taken, so far."""

    def __init__(self) -> None:
        self._refused: dict[Feature, dict[str, list[Layout]]] = defaultdict(lambda: defaultdict(list))
        self._common: dict[tuple[Feature, str], frozenset[Feature]] = {}  # features of all that were refused
        self._taken: set[Feature] = set()
        self._known: set[Layout] = set()

    def refused(self, layout: Layout, reason: str) -> None:
        """A layout was tried and refused."""
        if layout not in self._known:
            self._known.add(layout)
            features = frozenset(_features(layout))
            for feature in features:
                self._refused[feature][reason].append(layout)
                self._common[feature, reason] = self._common.get((feature, reason), features) & features

    def taken(self, layout: Layout) -> None:
        """A layout was tried and can be captured."""
        if layout not in self._known:
            self._known.add(layout)
            self._taken.update(_features(layout))

    def reason(self, layout: Layout) -> str | None:
        """Why a layout would be refused; None if nothing says that it would."""
        if layout in self._known:
            return None
        features = list(_features(layout))
        own = self._taken.union(features)
        for feature in features:
            if feature not in self._taken:
                for reason, layouts in self._refused[feature].items():
                    if self._common[feature, reason] <= own and _is_to_blame(feature, layouts, layout):
                        return reason
        return None


def hopeful(layouts: Iterable[Layout], reasons: Sequence[str]) -> Iterator[Layout]:
    """`unlike` layouts, until so many of them were refused, always in the same words. `reasons` grows meanwhile."""
    for layout in unlike(layouts):
        if len(reasons) >= _ALIKE and len(set(reasons)) == 1:
            return
        yield layout


def unlike(layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Those that have a knob at a value that none before had; after them those with such a pair of knobs. If all of them are
    refused, hardly any of the others is not: two settings may each need the other one.
    """
    distinct = list(dict.fromkeys(layouts))
    chosen: dict[Layout, None] = {}
    for together in (1, 2):
        seen = {some for layout in chosen for some in _choices(layout, together)}
        for layout in distinct:
            if layout not in chosen and not seen.issuperset(_choices(layout, together)):
                seen.update(_choices(layout, together))
                chosen[layout] = None
                yield layout


def _choices(layout: Layout, together: int) -> Iterator[Feature]:
    """The values of so many knobs at a time."""
    return itertools.combinations([(name, getattr(layout, name)) for name in ("gpu", *_KNOBS)], together)


def _features(layout: Layout) -> Iterator[Feature]:
    turned = [
        [(name, value), (name, None)] if type(value) is int else [(name, value)]
        for name in _KNOBS
        if (value := getattr(layout, name)) != _USUAL[name]
    ]
    for one in turned:
        yield from ((choice,) for choice in one)
    for one, other in itertools.combinations(turned, 2):
        yield from itertools.product(one, other)


def _copies(layout: Layout) -> tuple[int, bool]:
    """Why fewer ranks than there are share parameters: replicas, a pipeline."""
    return layout.replicate, layout.pipeline > 1


def _is_to_blame(feature: Feature, layouts: list[Layout], asked: Layout) -> bool:
    if len(layouts) < _ALIKE or _copies(asked) not in map(_copies, layouts):
        return False
    values = {name: len({getattr(layout, name) for layout in layouts}) for name in _USUAL}
    if any(value is None and values[name] < 2 for name, value in feature):
        return False
    named = {name for name, _ in feature}
    return sum(count > 1 for name, count in values.items() if name not in named and name != "gpu") >= 2
