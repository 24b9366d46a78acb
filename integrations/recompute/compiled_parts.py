"""What the dispatcher does not see inside a unit that runs eagerly: compiled graphs, and Triton kernels.

A graph that Dynamo has compiled, of a module or of a function, is one entry on the tape of a unit that calls it (TorchTitan
compiles parts of a mixture-of-experts block, and the function that runs its experts), and one decision of a plan. It has no
operators: between them kernels run that nobody dispatches, in memory that is used several times. To make its saved tensors
again the graph is called again: with the same arguments, autocast state and random numbers, and what it saves then stands for
what it saved in the forward, by its position. What it saved and returned is held if that is planned, or if the graph changes
what it is given.

A Triton kernel that is launched from Python is an entry, too: it changes the tensors that its source says (`kernels`), or may
change every tensor that the unit made and that it is given.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from autosac.integrations.operators.dispatching import not_compiled
from autosac.integrations.operators.effects import TritonLaunch
from autosac.integrations.operators.facts import Facts
from autosac.integrations.operators.keys import quiet, tensors_in
from autosac.integrations.recompute.entries import CompiledPart
from autosac.integrations.recompute.generators import states_before
from autosac.integrations.recompute.memories import version_of
from autosac.integrations.recompute.tape import present
from autosac.plans import GRAPH

_DEVICES = ("cpu", "cuda")
_PART = Facts(func=None, name=GRAPH)
_GRAPHS = "__compiled_fn_"  # how Dynamo names what it compiles, among the globals of the code that calls it


def prepare() -> None:
    """Let the tape see compiled graphs and Triton's launches. To be called before a unit runs; it does its work once."""
    _see_graphs()
    _see_launches()


def _see_graphs() -> None:
    """Compiled graphs become entries of the tape that is being written: those that Dynamo has made, and will make."""
    dynamo: Any = sys.modules.get("torch._dynamo.output_graph")
    if dynamo is None or hasattr(dynamo.OutputGraph.call_user_compiler, "_autosac_part"):
        return
    original = dynamo.OutputGraph.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(output: Any, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return _visible(original(output, graph, *args, **kwargs), output.compiler_fn, graph)

    call_user_compiler._autosac_part = True  # type: ignore[attr-defined]
    dynamo.OutputGraph.call_user_compiler = call_user_compiler
    operators = made_as_operators()
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name in names if name.startswith(_GRAPHS) and name not in operators]:
            names[name] = not_compiled(_seen(names[name], leaves_unwritten=True))  # nothing is known of what is in it


def made_as_operators() -> set[str]:
    """The names of compiled graphs that are operators for dispatch modes, of those that Dynamo has made."""
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    codes = [code for reference in input_codes.seen if (code := reference()) is not None]
    entries = [entry for code in codes for entry in _debug_get_cache_entry_list(code)]
    return {name for entry in entries if _makes_operators(entry.backend) for name in entry.code.co_names}


def _makes_operators(backend: Any) -> bool:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return bool(getattr(backend, "config", {}).get("wrap_inductor_compiled_regions"))


def _visible(call: Callable[..., Any], backend: Any, graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """What a backend has made of a graph, as an entry of tapes, unless it is an operator for dispatch modes already."""
    if _makes_operators(backend):
        return call
    return _seen(call, leaves_unwritten=has_grouped_products(graph))


def has_grouped_products(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph, or one inside of it, has products of groups, which may end before the last row."""
    inside = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return any("grouped_mm" in str(node.target) for part in inside for node in part.graph.nodes)


def _seen(call: Callable[..., Any], *, leaves_unwritten: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        tape = present.tape
        if quiet.depth or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if present.observer is not None:
            return present.observer.run_graph(call, args, kwargs)
        if tape is None or tape.is_busy or tape.part is not None:
            return call(*args, **kwargs)
        needs_gradient = [t.requires_grad for t in tensors_in((args, kwargs))]
        part = CompiledPart(call, _autocast(), needs_gradient, leaves_unwritten=leaves_unwritten)
        occurrence = tape.launched[GRAPH]
        tape.launched[GRAPH] += 1
        entry = tape.begin(part, _PART, args, kwargs, occurrence)
        tape.part = part  # from here on no operator is the unit's
        try:
            entry.random = states_before(args, kwargs)
            out, changed = called_graph(call, args, kwargs)
        finally:
            tape.part = None
        decision = tape.policy.decision(_PART, occurrence, out) if tape.policy.size else None
        if changed:
            tape.changed_by(entry, changed)
        if changed or (decision is not None and decision.keep):
            part.hold_saved()
        part.saved.clear()
        tape.end(entry, out, None if decision is None else replace(decision, offload=False))
        return out

    return run


def called_graph(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """What a compiled graph returns, and which of its arguments it has changed."""
    given = tensors_in((args, kwargs))
    versions = [version_of(t) for t in given]
    out = call(*args, **kwargs)
    return out, [t for t, version in zip(given, versions, strict=True) if version_of(t) != version]


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
