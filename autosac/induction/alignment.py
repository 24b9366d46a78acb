"""Where one sequence of keys becomes another by repeating runs that are in it already.

Given the keys of a trace's rows at n layers (`shorter`) and at n + p layers (`longer`), `insertions` finds the runs that
the p layers more have added: each is a repetition of what stands right before it, so that

    longer = ... x x' y ...        shorter = ... x y ...        keys of x' = keys of x

The common prefix is taken as long as it goes; where it ends, a run of `longer` is skipped whose length d lets the sequences
go on together for longest (of several the one with which both end, else the smallest). If an insertion of length d exists
at all, the greedy prefix only moves it to the right within the periodic part around it (rotating it), which is still an
insertion of length d.

Within that periodic part (all copies of the layers) the run may be placed anywhere. It is placed in the middle, for the copies
at its ends (first and last layers) may differ in what their rows refer to, though not in their keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


class Refusal(Exception):
    """The steps do not grow with the layers in a way that is understood; says where."""


class Insertion(NamedTuple):
    """`longer[first:first + length]` has been added; `longer[first - length:first]` is the copy before it."""

    first: int
    length: int


def insertions(shorter: Keys, longer: Keys, what: str) -> list[Insertion]:
    """The runs by which `longer` exceeds `shorter`, in order. Refusal if there are no such runs."""
    found: list[Insertion] = []
    position, shift, free = 0, 0, 0  # in `shorter`; how much has been inserted; end of the last insertion in `longer`
    while True:
        position += _common(shorter[position:], longer[position + shift :])
        here = position + shift
        if here == len(longer) and position == len(shorter):
            return found
        length = _length(shorter[position:], longer, here, len(longer) - here - (len(shorter) - position))
        if length is None:
            raise Refusal(f"{what}: rows {position} and {here} differ")
        first = _centre(longer, here, length, free)
        if first is None:
            raise Refusal(f"{what}: too few equal layers around row {here}")
        found.append(Insertion(first, length))
        shift += length
        free = first + length


def _common(a: Keys, b: Keys) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    first, size = 0, 64
    while first < n:
        differs = a[first : min(first + size, n)] != b[first : min(first + size, n)]
        if differs.any():
            return first + int(differs.argmax())
        first, size = first + size, size * 4
    return n


def _length(rest: Keys, longer: Keys, here: int, surplus: int) -> int | None:
    """How many keys of `longer` from `here` on repeat those before and, left out, let `rest` go on for longest; of several the
    number with which both end, else the least.
    """
    limit = min(surplus, here)
    if len(rest) == 0:
        candidates: Any = [surplus] if 0 < surplus <= here else []
    else:
        candidates = np.flatnonzero(longer[here + 1 : here + 1 + limit] == rest[0]) + 1
    best: tuple[tuple[int, bool], int] | None = None
    for length in map(int, candidates):
        if not np.array_equal(longer[here - length : here], longer[here : here + length]):
            continue
        agreement = _common(rest, longer[here + length :])
        found = agreement, agreement == len(rest) and length == surplus
        if best is None or found > best[0]:
            best = (found, length)
    return best[1] if best is not None else None


def _centre(longer: Keys, here: int, length: int, free: int) -> int | None:
    """The middle of where the insertion at `here` may begin so that the copy before it is not before `free`."""
    back = longer[free:here][::-1]
    ahead = longer[free + length : here + length][::-1]
    periodic = _common(back, ahead)
    if periodic < length:
        return None
    return here - (periodic - length) // 2
