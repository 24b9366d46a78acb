"""PyTorch's global switches that decide bits: each operator of a unit's recomputation runs under those of its forward, and
outside of the function transforms around its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

if TYPE_CHECKING:
    from autosac.integrations.recompute.policy import UnitDecisions


class _Switch(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_PRECISIONS = tuple((backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn"))


def _precision(backend: str, op: str) -> str:
    found: str = torch._C._get_fp32_precision_getter(backend, op)
    return found


def _set_precision(backend: str, op: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, op, value)


def _float32_precisions() -> tuple[str, ...]:
    """How float32 is computed, as the kernels ask for it: what PyTorch's older and newer settings come to."""
    return tuple(_precision(*of) for of in _PRECISIONS)


def _set_float32_precisions(wanted: tuple[str, ...]) -> None:
    """Where they differ. What can take the value over from its backend does; "none" computes as "ieee"."""
    for (backend, op), value in zip(_PRECISIONS, wanted, strict=True):
        if _precision(backend, op) != value:
            _set_precision(backend, op, "none")
            if _precision(backend, op) != value:
                _set_precision(backend, op, "ieee" if value == "none" else value)


# The default dtype comes first: factory operators and mixed arithmetic without a dtype depend on it.
_SWITCHES = (
    _Switch(torch.get_default_dtype, torch.set_default_dtype),
    _Switch(_float32_precisions, _set_float32_precisions),
    _Switch(
        lambda: (
            torch._C._get_deterministic_algorithms(),
            torch._C._get_deterministic_algorithms_warn_only(),
        ),
        _set_deterministic,
    ),
    _Switch(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    _Switch(torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    _Switch(torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    _Switch(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    _Switch(torch.get_num_threads, torch.set_num_threads),
)


def present() -> tuple[Any, ...]:
    """How all switches are now."""
    return tuple(switch.read() for switch in _SWITCHES)


def change(now: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """Set the switches that are `now` as they are wanted."""
    for switch, value, other in zip(_SWITCHES, now, wanted, strict=True):
        if value != other:
            switch.write(other)


class Course:
    """The switches in the course of a unit's forward. `before`: those with which it began.

    Reading them takes as long as a tenth of an operator. So they are read before every operator of the first forwards
    (`audited`), and from then on if the unit has been seen to set some itself (`sets_switches` of what its forwards share).
    """

    def __init__(self, policy: UnitDecisions, *, audited: bool) -> None:
        self.before = present()
        self._policy = policy
        self._is_read = audited or policy.sets_switches

    def inside(self) -> tuple[Any, ...] | None:
        """The switches now, if the unit has set any of them."""
        now = present() if self._is_read else self.before
        if now == self.before:
            return None
        self._policy.sets_switches = True
        return now


@contextmanager
def restored(wanted: tuple[Any, ...]) -> Iterator[None]:
    """All switches as they were; afterwards as they are now."""
    now = present()
    changed = [i for i in range(len(now)) if now[i] != wanted[i]]
    try:
        for i in changed:
            _SWITCHES[i].write(wanted[i])
        yield
    finally:
        for i, value in enumerate(present()):
            if value != now[i]:
                _SWITCHES[i].write(now[i])


@contextmanager
def outside_transforms() -> Iterator[None]:
    """No transform is at work: neither one of torch.func nor the older vmap of autograd."""
    with temporarily_clear_interpreter_stack(), torch._C._PreserveDispatchKeyGuard():
        level = torch._C._vmapmode_increment_nesting() - 1
        for _ in range(level + 1):
            torch._C._vmapmode_decrement_nesting()
        try:
            yield
        finally:
            for _ in range(level):
                torch._C._vmapmode_increment_nesting()
