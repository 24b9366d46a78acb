"""Amounts of memory as people write them: parsing budgets, printing bytes."""

from __future__ import annotations

import math
import re

from autosac.errors import UsageError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_NO_GIBIBYTES = 10**6  # who writes such a number without a unit means bytes
_AMOUNT = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]{1,4})?)\s*([A-Za-z]+|%)?\s*")


def parse_budget(budget: str | float, gpu_bytes: int) -> int:
    """Bytes of a budget: ``"68GiB"``, ``"73 GB"``, ``"85%"`` of `gpu_bytes`, ``"0.85"`` or ``0.85`` of it; an int is bytes.

    UsageError for anything else, and for more than the GPU has.
    """
    text = text_of(budget)
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise UsageError(f"budget {text!r}: expected an amount such as 68GiB, 73GB or 85%")
    value, unit = float(match[1]), match[2]
    if value <= 0:
        raise UsageError(f"budget {text!r}: it must be more than zero")
    if unit is None and value <= 1:
        return _within(text, value * gpu_bytes, gpu_bytes)
    if unit is None:
        likely = "GiB" if value < _NO_GIBIBYTES else "B"
        raise UsageError(
            f"budget {text!r}: say the unit, for example {match[1]}{likely} (or a fraction of the GPU such as 0.85)"
        )
    if unit == "%":
        if value > 100:
            raise UsageError(f"budget {text!r}: more than the whole GPU")
        return _within(text, value / 100 * gpu_bytes, gpu_bytes)
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise UsageError(f"budget {text!r}: unknown unit {unit!r}; known are GiB, MiB, GB, MB and %")
    return _within(text, value * factor, gpu_bytes)


def text_of(budget: str | float) -> str:
    """A budget as people write it: an int is a number of bytes, another number a share."""
    return f"{budget}B" if isinstance(budget, int) else str(budget)


def parse_bytes(amount: str | int) -> int:
    """Bytes of an amount: ``"8GiB"``, ``"500 MB"``, or a number of bytes. UsageError for anything else."""
    text = text_of(amount)
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2] in (None, "%"):
        raise UsageError(f"amount {text!r}: expected bytes such as 8GiB or 500MB")
    return parse_budget(text, 2**62)


def _within(text: str, nbytes: float, gpu_bytes: int) -> int:
    """Whole bytes, at least one and no more than the GPU has."""
    if nbytes < 1:
        raise UsageError(f"budget {text!r}: it must be at least one byte")
    if nbytes > gpu_bytes:
        raise UsageError(f"budget {text!r}: more than the whole GPU, which has {format_bytes(gpu_bytes)} for programs")
    return int(nbytes)


_PRINTED = (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1))  # with how many digits


def format_bytes(nbytes: float) -> str:
    """``"67.84 GiB"``, ``"12.5 MiB"``, ``"512 B"``."""
    for unit, size, digits in _PRINTED:
        if abs(nbytes) >= size:
            return f"{nbytes / size:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def format_enough_bytes(nbytes: float) -> str:
    """As `format_bytes`, never rounded down: ``"66.3 MiB"`` for 66.21 MiB. Who asks for so much gets enough."""
    for unit, size, digits in _PRINTED:
        if abs(nbytes) >= size:
            return f"{math.ceil(nbytes / size * 10**digits) / 10**digits:.{digits}f} {unit}"
    return f"{math.ceil(nbytes)} B"


def format_ms(ms: float) -> str:
    """``"1,234.5 ms"``, or seconds from ten seconds on."""
    return f"{ms / 1000:,.2f} s" if ms >= 10_000 else f"{ms:,.1f} ms"


def format_probability(probability: float) -> str:
    """In percent, never rounded up: ``"99.99%"`` for 0.999987."""
    return f"{math.floor(probability * 1e4) / 1e2:.2f}%"
