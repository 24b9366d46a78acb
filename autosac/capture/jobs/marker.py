"""A function of the script, found by its name, whose calls are reported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from autosac.errors import UsageError


class Marker:
    """``name`` of a function, or ``Class.name`` of a method, of the script or (``package.module.name``) of a module."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def install(self) -> None:
        """When the script has defined it. UsageError if it has not."""
        owner, attribute = self._find()
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._action()

        setattr(owner, attribute, call)

    def _find(self) -> tuple[Any, str]:
        """The object that holds it when it is called."""
        parts = self._name.split(".")
        places = [("__main__", parts)]
        places += [(".".join(parts[:i]), parts[i:]) for i in range(len(parts) - 1, 0, -1)]
        for module, path in places:
            owner: Any = sys.modules.get(module)
            for attribute in path[:-1]:
                owner = getattr(owner, attribute, None)
            if callable(getattr(owner, path[-1], None)):
                return owner, path[-1]
        raise UsageError(
            f"--step-marker {self._name}: neither the script nor a module that it imports has such a function"
        )
