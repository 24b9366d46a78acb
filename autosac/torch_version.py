"""The releases of PyTorch that AutoSAC is tested with. Does not import PyTorch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = (2, 11)
NEWEST = (2, 15)


def tested_range() -> str:
    """The tested releases in words: ``"2.11 to 2.15"``."""
    return f"{_text(OLDEST)} to {_text(NEWEST)}"


def too_new() -> str | None:
    """One line about an installed torch that is newer than the tested ones; None if it is not."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    numbers = re.findall(r"\d+", installed)[:2]
    if len(numbers) < 2 or tuple(map(int, numbers)) <= NEWEST:
        return None
    return f"torch {installed} is newer than {_text(NEWEST)}, the newest release tested with AutoSAC: check its figures"


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
