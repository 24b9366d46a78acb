"""Names of modules for people: natural order, and equal modules that follow each other under one name, ``layers.0-11``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"[0-9]{1,18}")


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A key to sort by: layers.2 before layers.10."""
    return [(False, int(part), part) if _NUMBER.fullmatch(part) else (True, 0, part) for part in name.split(".")]


def without_numbers(name: str) -> str:
    """The name without its numbers: ``layers.*``."""
    return ".".join("*" if _NUMBER.fullmatch(part) else part for part in name.split("."))


def alike(items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Any]) -> list[list[T]]:
    """Items that follow each other, differ in a number of their names only, and have equal keys, together."""
    return [list(group) for _, group in groupby(items, key=lambda item: (without_numbers(name(item)), key(item)))]


def span(names: Sequence[str]) -> str:
    """One name for modules of one family: ``layers.0-11``, or ``layers.0, 2, 5-7``; first and last where more parts differ."""
    parts = [name.split(".") for name in names]
    places = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if not places:
        return names[0]
    if len(places) > 1:
        return f"{names[0]} ... {names[-1]}"
    (place,) = places
    first = parts[0]
    numbers = sorted({int(each[place]) for each in parts})
    return ".".join([*first[:place], ranges(numbers), *first[place + 1 :]])


def ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers, those without a gap as a range: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def occurrences(operators: Iterable[str]) -> str:
    """Operators with the numbers of their calls, ``mm#0``, in short: ``mm #0-3, silu #0``."""
    calls: dict[tuple[str, str], list[int]] = {}
    for operator in operators:
        match = re.fullmatch(r"(.*)#(\d+)(.*)", operator)
        assert match is not None, operator
        calls.setdefault((match[1], match[3]), []).append(int(match[2]))
    return ", ".join(f"{name} #{ranges(sorted(numbers))}{rest}" for (name, rest), numbers in calls.items())
