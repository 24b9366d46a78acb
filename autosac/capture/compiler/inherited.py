"""Code that a process has inherited compiled (`autosac.capture.jobs.warming`) holds what it would hold had it been compiled
here.

Dynamo keeps what a function is called with when it compiles it, in a cycle of references. It collects garbage itself after a
compilation, but the cycle is still in use then, and what survives is looked at again in a full collection only, which
TorchTitan does not make. A job holds the inputs of some layers' attention so. Here, what inherited code is first called with
is kept to the end of the capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_kept: list[Any] = []
_calls: list[bool] = []
"""Calls of compiled functions under way, the innermost last: whether it has run inherited code that had not run before."""


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function."""
    _calls.append(False)
    try:
        return function(*args, **kwargs)
    finally:
        if _calls.pop():
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
