"""What is known of one operator, looked up once: what a unit's forward asks of every call has to be quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autosac.integrations.operators.effects import is_foreign, is_wait, may_write, only_metadata
from autosac.integrations.operators.keys import is_counted, is_tagged_random, is_view, is_wrapper, op_name

_SKIPPED_NAMESPACES = frozenset({"prim", "profiler"})
_ALLOCATING = frozenset(
    f"aten.{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
# In place, without reading what was there. (Random operators do not, either.)
_OVERWRITING = frozenset(
    f"aten.{name}"
    for name in (
        "_foreach_copy_",
        "_foreach_zero_",
        "_resize_output_",
        "copy_",
        "fill_",
        "index_copy_",
        "index_fill_",
        "index_put_",
        "masked_fill_",
        "masked_scatter_",
        "resize_",
        "resize_as_",
        "scatter_",
        "set_",
        "zero_",
    )
)
_known: dict[int, Facts] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """One operator (`func`). `is_passed`: nothing has to be noted of it (views, detach, metadata, profiler calls).

    `only_allocates`: the content of what it returns means nothing.
    `only_changes`: all that it returns is what it changed. `overwrites`: it does not read what it changes. The others are
    those of `keys` and `effects`.
    """

    func: Any
    name: str
    is_passed: bool = False
    is_counted: bool = False
    only_metadata: bool = False
    only_allocates: bool = False
    only_changes: bool = False
    overwrites: bool = False
    may_write: bool = False
    may_draw: bool = False
    is_foreign: bool = False
    is_wait: bool = False


def facts_of(func: Any) -> Facts:
    """The facts of an operator. It is recognised by its address: operators are hashed in Python."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = _found(func)  # which holds `func`, so that nothing else gets its address
    return found


def _found(func: Any) -> Facts:
    counted = is_counted(func)
    schema = getattr(func, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return Facts(
        func=func,
        name=op_name(func),
        is_passed=not counted
        and (
            is_view(func)
            or is_wrapper(func)
            or func is torch.ops.aten.detach.default
            or getattr(func, "namespace", "") in _SKIPPED_NAMESPACES
        ),
        is_counted=counted,
        only_metadata=only_metadata(func),
        only_allocates=op_name(func).rpartition(".")[0] in _ALLOCATING,
        only_changes=schema is not None and all(r.alias_info is not None and r.alias_info.is_write for r in returns),
        overwrites=op_name(func).rpartition(".")[0] in _OVERWRITING
        or is_tagged_random(func)
        or (schema is not None and any(a.is_out for a in schema.arguments)),
        may_write=may_write(func),
        may_draw=is_tagged_random(func),
        is_foreign=is_foreign(func),
        is_wait=is_wait(func),
    )
