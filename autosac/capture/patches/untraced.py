"""Functions that Dynamo calls as they are, where it would trace them into what it compiles.

``opt.step()`` in a compiled function runs the optimizer's hooks, and reads the clock: Dynamo would inline these with all that
they call. As with `torch.compiler.disable`, which imports the compiler, the graph ends before such a call and goes on after
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._C._dynamo import eval_frame

_NEVER = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def leave_untraced(function: FunctionType) -> None:
    """Nothing of this function is compiled, nor of what it calls."""
    vars(function)["_torchdynamo_disable"] = True
    eval_frame.set_code_exec_strategy(function.__code__, _NEVER)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, of which nothing is compiled, nor of what it calls."""

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    leave_untraced(call)  # type: ignore[arg-type] # a function
    return call
