"""What is meant where nothing is said: the defaults of the values that people, files and other rooms make, pinned.

See `test_stored_step` for how to write the expectations anew.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pinned import check

ROOMS = (
    *("trace", "plans", "titan", "target", "simulation", "memory_sim", "runtime_sim", "solvers"),
    *("estimator", "planning", "configurations"),
)


def modules() -> Iterator[ModuleType]:
    """Those of the rooms that capture nothing."""
    for room in ROOMS:
        found = importlib.import_module(f"autosac.{room}")
        yield found
        for inner in pkgutil.walk_packages(getattr(found, "__path__", ()), f"{found.__name__}."):
            yield importlib.import_module(inner.name)


def is_plain(value: Any) -> bool:
    """Whether a person can read it in a line."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def test_defaults() -> None:
    """Of every field of every dataclass, where it is a number, a text, a truth value, None, or a tuple of such."""
    lines = [
        f"{module.__name__.removeprefix('autosac.')} {kind.__qualname__}.{field.name} = {field.default!r}"
        for module in modules()
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and is_dataclass(kind)
        for field in fields(kind)
        if field.name in vars(kind).get("__annotations__", ())
        and field.default is not MISSING
        and is_plain(field.default)
    ]
    assert len(set(lines)) == len(lines) > 200
    check(Path(__file__).with_name("defaults.txt"), "\n".join(sorted(lines)))
