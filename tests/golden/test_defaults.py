"""What is meant where nothing is said: the defaults of the values that people, files and other rooms make, pinned.

See `test_stored_step` for how to write the expectations anew.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pinned import check

ROOMS = (
    *("trace", "plans", "titan", "target", "simulation", "memory_sim", "runtime_sim", "solvers"),
    *(
        "estimator",
        "planning",
        "configurations",
        "derivation",
        "induction",
        "report",
        "display",
        "files",
        "chakra",
        "kineto",
    ),
    *("jobs", "runs", "bench"),
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


def of_fields() -> Iterator[str]:
    """Of every field of every dataclass, and of every NamedTuple."""
    for module in modules():
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__:
                continue
            found = {f.name: f.default for f in fields(kind)} if is_dataclass(kind) else {}
            found |= getattr(kind, "_field_defaults", {})
            own = vars(kind).get("__annotations__", ())
            for name, value in found.items():
                if name in own and value is not MISSING and is_plain(value):
                    yield f"{module.__name__.removeprefix('autosac.')} {kind.__qualname__}.{name} = {value!r}"


def of_hidden() -> Iterator[str]:
    """Fields of dataclasses that are not shown by `repr`, or not compared."""
    for module in modules():
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and is_dataclass(kind):
                for field in fields(kind):
                    place = f"{module.__name__.removeprefix('autosac.')} {kind.__qualname__}.{field.name}"
                    yield from [f"{place} is not shown"] if not field.repr else []
                    yield from [f"{place} is not compared"] if not field.compare else []


def of_parameters() -> Iterator[str]:
    """Of every parameter of the functions and methods that other modules call."""
    for module in modules():
        owners = [
            kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
        ]
        for owner in (module, *owners):
            for name, value in vars(owner).items():
                function = inspect.unwrap(getattr(value, "__func__", value))
                is_own = isinstance(function, FunctionType) and function.__module__ == module.__name__
                if not is_own or (name.startswith("_") and name not in ("__init__", "__call__")):
                    continue
                if function.__code__.co_filename != module.__file__:  # what dataclasses make
                    continue
                for parameter in inspect.signature(function).parameters.values():
                    if parameter.default is not parameter.empty and is_plain(parameter.default):
                        place = f"{module.__name__.removeprefix('autosac.')} {function.__qualname__}"
                        yield f"{place}({parameter.name}) = {parameter.default!r}"


def test_defaults() -> None:
    """Where they are numbers, texts, truth values, None, or tuples of such."""
    lines = [*of_fields(), *of_hidden(), *of_parameters()]
    assert len(lines) > 400
    check(Path(__file__).with_name("defaults.txt"), "\n".join(sorted(set(lines))))
