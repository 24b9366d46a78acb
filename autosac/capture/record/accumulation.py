"""Gradients that autograd's engine adds up in place, where a capture sees an addition into new memory.

A tensor with several consumers gets several gradients. The engine adds each to what its `InputBuffer` holds already: in
place if nobody else owns that tensor and it is a plain one (``torch/csrc/autograd/input_buffer.cpp``, `accumulate`), out of
place for tensor subclasses, hence always in a capture. The peak of a backward can lie there.

Such an addition is recognised (`EngineAdditions.is_one`) by being an ``aten.add.Tensor`` without a Python frame between it
and the engine, after a node one of whose edges leads to where a gradient has arrived before. That nobody else owns the first
summand shows afterwards: its storage dies before anything else happens.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_ADD = torch.ops.aten.add.Tensor
_ENGINE = "_engine_run_backward"


class EngineAdditions:
    """Follows one run of the engine."""

    def __init__(self) -> None:
        self._received: set[tuple[Any, ...]] = set()
        self._node: tuple[Any, ...] | None = None
        self._edges: list[tuple[Any, ...]] = []
        self._met: set[tuple[Any, ...]] = set()

    def is_one(self, func: Any, args: Any, out: Any, node: Any) -> bool:
        """Whether this call, made while `node` was the last that ran, adds to a gradient that the engine holds."""
        if node is None:
            return False
        identity = _identity(node, 0)
        if identity != self._node:
            self._received.update(self._edges)
            self._node = identity
            self._edges = [_identity(target, number) for target, number in node.next_functions if target is not None]
            self._met = self._received.intersection(self._edges)
        return (
            func is _ADD
            and bool(self._met)
            and len(args) == 2
            and all(isinstance(a, torch.Tensor) and a.shape == out.shape and a.dtype == out.dtype for a in args)
            and _called_by_engine()
            and _alone(args[0])
        )


def _identity(node: Any, number: int) -> tuple[Any, ...]:
    """One input of an autograd node. Leaves (AccumulateGrad) have no sequence number, but a variable."""
    variable = getattr(node, "variable", None)
    return (id(variable) if variable is not None else node._sequence_nr(), node.name(), number)


def _alone(tensor: torch.Tensor) -> bool:
    """No other tensor shares the storage: it is referred to by this one, and by the handle that is asked here."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) == 2


def _called_by_engine() -> bool:
    """The nearest frame outside of capture is the engine's own: no Python code computes this gradient."""
    frame: FrameType | None = sys._getframe(1)
    own = "autosac.capture."
    while frame is not None and frame.f_globals.get("__name__", "").startswith(own):
        if frame.f_code.co_name == "run_backward":
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _ENGINE
