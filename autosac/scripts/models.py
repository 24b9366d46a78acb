"""Which of the models that a script trains plans are for: a generator and a discriminator, an actor and a critic, ...

What checkpointing can let go of is what their forwards leave on the device. It is the first one that is called, unless
another's forwards leave more than twice as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from autosac.capture.jobs.script_model import ModelOrder
from autosac.capture.patches import module_calls

_MUCH_MORE = 2


class ModelShares:
    """What the forwards of each model leave in a step. `active_bytes`: what the device holds now."""

    def __init__(self, active_bytes: Callable[[], int]) -> None:
        self._active_bytes = active_bytes
        self._order = ModelOrder()
        self._held: Counter[int] = Counter()
        self._depth = 0
        self._open = -1, 0  # the model whose forward runs, and what the device held before

    def install(self) -> None:
        """Follow all modules."""
        module_calls.follow(lambda module, _: self._enter(module), lambda *_: self._leave())

    def begin_step(self) -> None:
        """What counts is what comes now."""
        self._held.clear()
        self._depth = 0  # an exception may have left a module

    @property
    def largest(self) -> int:
        """The model that plans are for, by the order in which they are first called."""
        if not self._held:
            return 0
        ((number, held),) = self._held.most_common(1)
        return number if held > _MUCH_MORE * self._held[0] else 0

    def _enter(self, module: torch.nn.Module) -> None:
        self._depth += 1
        number = self._order.number(module)
        if self._depth == 1:
            self._open = number if torch.is_grad_enabled() else -1, self._active_bytes()

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        number, before = self._open
        if not self._depth and number >= 0:
            self._held[number] += max(0, self._active_bytes() - before)
