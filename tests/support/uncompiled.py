"""Inductor on the CPU up to the code that it would generate, for which the C++ compiler takes many seconds: what is removed,
saved and recomputed is decided before.

Test modules import this as ``uncompiled`` (see `pythonpath` in pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph of Inductor's. Random numbers depend on their seed alone, as in generated code."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a node."""
        if str(target) != "prims.inductor_random.default":
            return super().call_function(target, args, kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(args[1]))
            return super().call_function(target, args, kwargs)


def _interpreted(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Any:
    return make_boxed_func(_Interpreter(graph).run)


def inductor(options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """A backend for `torch.compile`: Inductor with these options, its graphs interpreted."""
    return partial(compile_fx, inner_compile=_interpreted, config_patches=options)
