"""What the dispatcher does not see inside a unit that runs eagerly: compiled modules, and Triton kernels.

A compiled module inside a unit (TorchTitan compiles the parts of a mixture-of-experts block one by one) is one entry on the
tape. To make its saved tensors again it is called again, as PyTorch's checkpointing would: with the same arguments, autocast
state and random numbers, and what it saves then stands for what it saved in the forward, by its position. A Triton kernel that
is launched from Python is an entry, too: it changes the tensors that its source says (`kernels`), or may change every tensor
that the unit made and that it is given.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autosac.integrations.operators.effects import TritonLaunch
from autosac.integrations.operators.facts import Facts
from autosac.integrations.operators.keys import quiet, tensors_in
from autosac.integrations.recompute.entries import CompiledPart
from autosac.integrations.recompute.generators import states_before
from autosac.integrations.recompute.tape import present

_DEVICES = ("cpu", "cuda")
_PART = Facts(func=None, name="compiled")


def prepare(module: nn.Module) -> None:
    """Let the tape see what is compiled inside `module`, and Triton's launches."""
    for inner in module.modules():
        if "_orig_mod" in inner._modules:
            own = vars(inner)
            if "forward" in own and not hasattr(own["forward"], "_autosac_part"):
                own["forward"] = _seen(own["forward"])
        elif inner._compiled_call_impl is not None and not hasattr(inner._compiled_call_impl, "_autosac_part"):
            inner._compiled_call_impl = _seen(inner._compiled_call_impl)
    _see_launches()


def _seen(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        tape = present.tape
        if tape is None or tape.is_busy or tape.part is not None or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        part = CompiledPart(call, _autocast(), [t.requires_grad for t in tensors_in((args, kwargs))])
        entry = tape.begin(part, _PART, args, kwargs)
        entry.random = states_before(args, kwargs)
        tape.part = part
        try:
            out = call(*args, **kwargs)
        finally:
            tape.part = None
        tape.end(entry, out, None)
        return out

    run._autosac_part = True  # type: ignore[attr-defined]
    return run


def _autocast() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What sets autocast as it is now."""
    states = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in _DEVICES
    ]

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype, cached in states:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield

    return restored


def launched(
    call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kernel: Any = None
) -> Any:
    """Launch a kernel by `call`, as an entry of the tape that is being written. `kernel`: the ``JITFunction``, if known."""
    tape = present.tape
    if tape is None or tape.is_busy or tape.part is not None or kwargs.get("warmup"):
        return call(*args, **kwargs)
    launch = TritonLaunch(call, name, kernel)
    facts = Facts(func=launch, name=f"triton.{launch.name}", may_write=True)
    tape.launched[facts.name] += 1
    quiet.depth += 1  # copies of what it is about to change are no operators of the unit
    try:
        entry = tape.begin(launch, facts, args, kwargs, -tape.launched[facts.name])
    finally:
        quiet.depth -= 1
    out = call(*args, **kwargs)
    tape.end(entry, None, None)
    return out


def _see_launches() -> None:
    """Triton's launches become entries of the tape that is being written. Once in a process."""
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        return
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    original = JITFunction.run
    if hasattr(original, "_autosac_part"):
        return

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return launched(functools.partial(original, self), getattr(self, "__name__", "kernel"), args, kwargs, self)

    run._autosac_part = True  # type: ignore[attr-defined]
    JITFunction.run = run
