"""Code that a process has inherited compiled (`autosac.capture.jobs.warming`) holds what it would hold had it been compiled
here.

Dynamo keeps what a function is called with when it compiles it, in a cycle of references: all of it up to PyTorch 2.13, less
since. It collects garbage itself after a compilation, but the cycle is still in use then, and what survives is looked at again
in a full collection only, which TorchTitan does not make. A job holds the inputs of some layers' attention so. Here, what
inherited code is first called with is kept to the end of the capture, if `compiling` has seen that Dynamo keeps that
function's.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_kept: list[Any] = []
_watched: list[tuple[Callable[..., Any], weakref.ref[Any]]] | None = None
keeping: set[Callable[..., Any]] = set()  # functions of whose first call Dynamo keeps something
_calls: list[bool] = []
"""Calls of compiled functions under way, the innermost last: whether it has run inherited code that had not run before."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Other processes will inherit what is compiled inside. What that is called with must have been let go of in the end."""
    global _watched
    watched = _watched = []
    try:
        yield
    finally:
        _watched = None
        gc.collect(1)  # as Dynamo does
        keeping.update(function for function, reference in watched if reference() is not None)


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function."""
    if _watched is not None:
        # Masks are functions of tensors.
        given = (x for x in args if hasattr(x, "untyped_storage") or inspect.isfunction(x))
        _watched.extend((function, weakref.ref(x)) for x in given)
    _calls.append(False)
    try:
        return function(*args, **kwargs)
    finally:
        if _calls.pop() and function in keeping:
            _kept.append((args, kwargs))


class FirstRun:
    """Made with compiled code; called whenever that runs."""

    def __init__(self) -> None:
        self.process = os.getpid()  # where its code was compiled, or ran last

    def __call__(self) -> None:
        """Note the first run in a process that has inherited the code."""
        if self.process != (here := os.getpid()):
            self.process = here
            if _calls:
                _calls[-1] = True
