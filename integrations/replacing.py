"""Functions of PyTorch that do something else from now on, in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """``owner.name(...)`` is ``around(original, ...)`` from now on; nothing changes if it is replaced already."""
    original = getattr(owner, name)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replaced)
