"""How dispatch modes call operators, and what keeps the compiler away from code that runs around operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autosac.integrations.operators.keys import tensors_in

_Function = TypeVar("_Function", bound=Callable[..., object])


def not_compiled(function: _Function) -> _Function:
    """Mark a function, and all it calls, as nothing to compile: it may run between the graphs of compiled code.

    torch._disable_dynamo does the same and costs 8 us a call.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def skipped_by_dynamo(cls: type) -> None:
    """Mark a mode's __torch_dispatch__, which TorchDispatchMode has wrapped in torch._disable_dynamo."""
    function = cls.__dict__["__torch_dispatch__"]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    cls.__torch_dispatch__ = not_compiled(function)  # type: ignore[attr-defined]


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator from a mode."""
    if any(tensor.is_complex() for tensor in tensors_in((args, kwargs))):
        return with_conjugates(func, args, kwargs)
    return func(*args, **kwargs)


def with_conjugates(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator with complex tensors from a mode. PyTorch leaves out there what resolves conjugates: `linalg.pinv`,
    which makes some in its kernel, would take them for what they are not.
    """
    with (
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Conjugate, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Negative, False),
    ):
        return func(*args, **kwargs)
