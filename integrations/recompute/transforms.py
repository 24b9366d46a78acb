"""Function transforms inside a unit's forward, and around its backward.

PyTorch refuses `torch.func.grad`, `vjp` and `jacrev` under saved-tensor hooks, by which a tape gets what autograd saves. So
the hooks of the tapes that are being written step aside as long as such a transform runs (`prepare`). What is saved meanwhile
is held as it is, as without a plan. The user's own hooks stay, and so does the error that they raise.

A backward may run inside of vmap (`is_grads_batched`, vectorized jacobians). What a unit saved is outside of it, and is made
again outside of it (`flags.outside_transforms`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autosac.integrations.recompute.tape import Tape

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def prepare() -> None:
    """Let units take derivatives inside. Once in a process."""
    original = torch.autograd.graph.disable_saved_tensors_hooks
    if hasattr(original, "_autosac"):
        return

    @contextlib.contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        aside = _take()
        try:
            with original(error_message):
                yield
        finally:
            for hooks in reversed(aside):
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    disable_saved_tensors_hooks.__doc__ = original.__doc__
    disable_saved_tensors_hooks._autosac = True  # type: ignore[attr-defined]
    torch.autograd.graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks


def _take() -> list[_Hooks]:
    """The innermost hooks of tapes, which are not in force from now on; innermost first."""
    taken: list[_Hooks] = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        if not isinstance(getattr(hooks[0], "__self__", None), Tape):
            break
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    return taken
