"""The releases of PyTorch that AutoSAC is tested with. Does not import PyTorch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = (2, 11)
NEWEST = (2, 15)


def tested_range() -> str:
    """The tested releases in words: ``"2.11 to 2.15"``."""
    return f"{_text(OLDEST)} to {_text(NEWEST)}"


def installed_release() -> tuple[int, int] | None:
    """The installed PyTorch's release, such as (2, 13); None if there is none or its version is unreadable."""
    try:
        numbers = re.findall(r"\d+", version("torch"))
    except PackageNotFoundError:
        return None
    return (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 else None


def too_new() -> str | None:
    """One line about an installed torch that is newer than the tested ones; None if it is not."""
    release = installed_release()
    if release is None or release <= NEWEST:
        return None
    return f"torch {version('torch')} is newer than {_text(NEWEST)}, the newest release tested with AutoSAC: check its figures"


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
