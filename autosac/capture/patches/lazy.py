"""Lazy modules (`nn.LazyLinear`, ...): their parameters get a shape in the first forward, which no simulated tensor can.

They stay on the host until then. What was to happen to them before (``model.cuda()``, ``model.bfloat16()``) happens next.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

_MOVES = "_autosac_moves"  # of a module whose parameters have no shape


def install() -> None:
    """For all of them."""
    module: Any = nn.Module
    lazy: Any = LazyModuleMixin
    apply, infer = module._apply, lazy._infer_parameters

    @functools.wraps(apply)
    def move(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = {name: p for name, p in (*self._parameters.items(), *self._buffers.items()) if is_lazy(p)}
        if not waiting:
            return apply(self, fn, *args, **kwargs)
        self.__dict__.setdefault(_MOVES, []).append(fn)
        for child in self.children():
            child._apply(fn, *args, **kwargs)
        return self

    @functools.wraps(infer)
    def initialise(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        out = infer(self, module, *args, **kwargs)
        for fn in module.__dict__.pop(_MOVES, ()):
            module._apply(fn)
        return out

    module._apply, lazy._infer_parameters = move, initialise
