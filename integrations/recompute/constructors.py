"""Tensors of subclasses that are made from sizes while operators are recorded.

`torch.Tensor`'s constructor lets the dispatcher allocate, and gives the result the subclass. What a dispatch mode returns
is a plain tensor already, of which PyTorch can make no other class: it raises (`torch.nn.attention.bias` makes its masks so).
So such tensors are made outside of all modes (`prepare`). For a unit they come from outside, and are held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def prepare() -> None:
    """Let modules make such tensors under dispatch modes. Once in a process."""
    tensor: Any = torch.Tensor
    original = tensor.__new__
    if hasattr(original, "_autosac"):
        return

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor or any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            return original(cls, *args, **kwargs)
        with _disable_current_modes():
            return original(cls, *args, **kwargs)

    new._autosac = True  # type: ignore[attr-defined]
    # Dynamo, if it is imported later, compares the constructor's signature with its own stand-in's: that of the original.
    new.__wrapped__ = original  # type: ignore[attr-defined]
    tensor.__new__ = staticmethod(new)
