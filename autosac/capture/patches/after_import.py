"""Calls a function as soon as a module has been imported, by whoever imports it, or does so inside of a context."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """`action` gets the module `name`: now if it is there, else once it is imported. Nothing is imported for it."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


def around_imports(package: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Modules of `package` that are not there yet are imported inside of `context()`."""
    sys.meta_path.insert(0, _AroundImports(package, context))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the module as the others would, and stands before its loader."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of the module that is waited for; None for all others."""
        if name != self._name:
            return None
        others = _behind(self)
        sys.meta_path.remove(self)
        return _wrapped(_found(others, name, path, target), contextlib.nullcontext, self._action)


class _AroundImports(importlib.abc.MetaPathFinder):
    """The same for all modules of a package."""

    def __init__(self, package: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._package, self._context = package, context

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of a module of the package; None for all others."""
        if name.startswith(f"{self._package}."):
            return _wrapped(_found(_behind(self), name, path, target), self._context, lambda _: None)
        return None


def _behind(finder: Any) -> list[Any]:
    """Those that are asked after this one."""
    return sys.meta_path[sys.meta_path.index(finder) + 1 :]


def _found(
    finders: list[Any], name: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    specs = (finder.find_spec(name, path, target) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)


def _wrapped(
    spec: importlib.machinery.ModuleSpec | None,
    context: Callable[[], AbstractContextManager[None]],
    action: Callable[[Any], None],
) -> importlib.machinery.ModuleSpec | None:
    if spec is not None and spec.loader is not None:
        spec.loader = _Loader(spec.loader, context, action)
    return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader inside of a context, then the action."""

    def __init__(
        self, own: Any, context: Callable[[], AbstractContextManager[None]], action: Callable[[Any], None]
    ) -> None:
        self._own, self._context, self._action = own, context, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As its own loader."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run it, then the action."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        with self._context():
            self._own.exec_module(module)
        self._action(module)
