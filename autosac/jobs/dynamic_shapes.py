"""Dynamic shapes: sizes that depend on data, found by comparing captures with different expert load imbalance.

A plan recognises the operators of a module by the shapes of what they return. Behind a router these vary from step to step:
tokens that a rank receives under expert parallelism. A dimension is dynamic (`autosac.plans.ANY_SIZE`) if it differs
between two executions of the same call, by operator and occurrence, in modules of the same kind (``layers.*.moe``), within
a capture or between two with different loads. What is a coincidence in one layer is none in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from autosac.plans import ANY_SIZE
from autosac.trace import Call, Collective, Op, Region, TensorMeta, Trace

_Key: TypeAlias = "tuple[str, str, int]"  # module's kind, operator, occurrence
_Sizes: TypeAlias = "tuple[tuple[int, ...], ...]"
_NUMBER = re.compile(r"\d+")


def routers_layer(trace: Trace) -> int | None:
    """The number in the name of the first layer whose exchanges depend on routing; None if there is no such layer.

    Those are layers with a histogram of tokens over experts, in jobs that exchange tokens (all_to_all) or whose experts run
    one by one instead of in a grouped product.
    """
    if not has_router(trace):
        return None
    names = {signature.name for signature in trace.signatures}
    exchanged = any(type(event) is Collective and event.kind == "all_to_all" for event in trace.events)
    if not exchanged and any("grouped_mm" in name for name in names):
        return None
    for event in trace.events:
        if type(event) is Op and trace.signatures[event.signature].name == "aten.histc.default":
            number = _NUMBER.search(trace.modules[event.module])
            return int(number[0]) if number else None
    return None


def has_router(trace: Trace) -> bool:
    """Whether tokens are counted by expert: the step is one of a mixture."""
    return any(signature.name == "aten.histc.default" for signature in trace.signatures)


def with_dynamic_shapes(trace: Trace, other: Trace) -> Trace:
    """The trace with -1 for the sizes in its regions' calls that differ from what `other`, of another load, has for them."""
    opened: dict[_Key, list[set[int]]] = {}
    modules = set(trace.modules)
    for captured in (trace, other):
        first: dict[tuple[str, str, int], _Sizes] = {}  # by module, not by kind: kinds may be of different widths
        for module, call in _calls(captured):
            if module not in modules:
                continue
            known = first.setdefault((module, call.op, call.occurrence), _sizes(call))
            _compare(opened, module, call, known)
    sizes = {(module, call.op, call.occurrence): _sizes(call) for module, call in _calls(trace)}
    for module, call in _calls(other):
        _compare(opened, module, call, sizes.get((module, call.op, call.occurrence), _sizes(call)))
    if not opened:
        return trace
    return replace(trace, regions=tuple(_opened(trace, region, opened) for region in trace.regions))


def _kind(module: str) -> str:
    return _NUMBER.sub("*", module)


def _sizes(call: Call) -> _Sizes:
    return tuple(meta.shape for meta in call.outputs)


def _calls(trace: Trace) -> Iterator[tuple[str, Call]]:
    for region in trace.regions:
        for call in region.calls:
            if call.occurrence >= 0:
                yield trace.modules[region.module], call


def _compare(opened: dict[_Key, list[set[int]]], module: str, call: Call, known: _Sizes) -> None:
    """Open the dimensions in which a call differs from another of the same operator."""
    found = _sizes(call)
    if found == known or [len(shape) for shape in found] != [len(shape) for shape in known]:
        return
    dims = opened.setdefault((_kind(module), call.op, call.occurrence), [set() for _ in found])
    for mine, a, b in zip(dims, found, known, strict=False):
        mine.update(i for i, (left, right) in enumerate(zip(a, b, strict=True)) if left != right)


def _opened(trace: Trace, region: Region, opened: dict[_Key, list[set[int]]]) -> Region:
    kind = _kind(trace.modules[region.module])
    calls = []
    for call in region.calls:
        dims = opened.get((kind, call.op, call.occurrence))
        if dims is not None and call.occurrence >= 0:
            call = call._replace(outputs=tuple(map(_without, call.outputs, dims)))
        calls.append(call)
    return region._replace(calls=tuple(calls))


def _without(meta: TensorMeta, dims: set[int]) -> TensorMeta:
    return meta._replace(shape=tuple(ANY_SIZE if i in dims else size for i, size in enumerate(meta.shape)))
