"""Who follows where forwards of modules begin and end: hooks of all modules, and calls of those that are compiled in place.

`Module.compile` puts the hooks of a module inside of what is compiled. Dynamo would trace them into its graphs, where they do
nothing, so such calls are followed around the compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Enter = Callable[[torch.nn.Module, Any], None]
Leave = Callable[..., None]

_followers: list[tuple[Enter, Leave]] = []


def follow(enter: Enter, leave: Leave) -> None:
    """``enter(module, args)`` before each forward, and ``leave(module, args, kwargs, out)`` after it; ``leave(module, args,
    None)`` if an exception has left it, as early-stopped recomputation does. Who comes first is called first.
    """
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    def begin(module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            enter(module, args)

    def end(module: torch.nn.Module, args: Any, *rest: Any) -> None:
        if not torch.compiler.is_compiling():
            leave(module, args, *rest)

    register_module_forward_pre_hook(begin)
    register_module_forward_hook(end, with_kwargs=True, always_call=True)
    _followers.append((enter, leave))
    if len(_followers) == 1:
        _follow_compiled_calls()


def _follow_compiled_calls() -> None:
    compile_in_place = torch.nn.Module.compile

    @functools.wraps(compile_in_place)
    def compile_and_tell(self: Any, *args: Any, **kwargs: Any) -> None:
        compile_in_place(self, *args, **kwargs)
        self._compiled_call_impl = _told(self, self._compiled_call_impl)

    module: Any = torch.nn.Module
    module.compile = compile_and_tell


def _told(module: torch.nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def call(*inputs: Any, **named: Any) -> Any:
        for enter, _ in _followers:
            enter(module, inputs)
        try:
            out = compiled(*inputs, **named)
        except BaseException:
            for _, leave in _followers:
                leave(module, inputs, None)
            raise
        for _, leave in _followers:
            leave(module, inputs, named, out)
        return out

    return call
