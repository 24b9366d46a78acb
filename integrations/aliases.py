"""Whether a policy treats every tensor that is changed in place soundly.

A recomputed operator must read the values that it read in the forward. Kept tensors hold their final values,
so let S be a storage made inside the checkpointed module, w_0 the operator that made it and w_1, ..., w_k
those that changed it later. The recomputation is right if one of these holds:

1. none of the operators w_1, ..., w_k exists (nothing is changed);
2. w_0, ..., w_k are all kept, and so is every operator before w_k that reads S, unless it only makes a view;
3. none of w_0, ..., w_k is kept, and no view of S made before w_k.

`AliasWatch` observes one forward and `violation` returns the first storage for which none holds. Storages
from outside of the module (inputs, parameters, buffers) are free: keeping their mutators means not to repeat
a change. Only policies that keep a mutating operator need a watch: for the others the version counters of
kept tensors tell that a change happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autosac.integrations.keys import tensors_in

_written: dict[Any, tuple[tuple[int, str], ...]] = {}


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator's schema says it changes."""
    written = _written.get(func)
    if written is None:
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None and schema.is_mutable else ()
        written = tuple(
            (i, argument.name)
            for i, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        _written[func] = written
    return written


def find_operator(name: str) -> Any:
    """The operator overload of this name, None if it is not registered in this process."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None


@dataclass(slots=True)
class _Use:
    """What happened to one storage: its creator's decision, and those of its mutators, readers and views in
    order.
    """

    reference: StorageWeakRef
    creator: str | None
    creator_kept: bool
    last_write: int = -1
    writers: list[tuple[str, bool]] = field(default_factory=list)
    rerun_readers: list[tuple[int, str]] = field(default_factory=list)
    kept_views: list[tuple[int, str]] = field(default_factory=list)


class AliasWatch:
    """Follows the storages of one forward under a policy."""

    def __init__(self) -> None:
        # A weak reference keeps the storage's address from being given to another one, but frees its memory.
        self._uses: dict[int, _Use] = {}
        self._clock = 0

    def see(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, keep: bool) -> None:
        """Note one operator of the forward and what the policy does with it."""
        self._clock += 1
        places = written_arguments(func)
        written = _storages([args[i] if i < len(args) else kwargs.get(name) for i, name in places])
        read = _storages((args, kwargs))
        made = _storages(out)
        for address, storage in read.items():
            if address not in self._uses:
                self._uses[address] = _Use(StorageWeakRef(storage), None, False)
        for address, storage in made.items():
            if address not in self._uses:
                self._uses[address] = _Use(StorageWeakRef(storage), name, keep)
        is_view = not written and bool(made) and made.keys() <= read.keys()
        for address in written:
            self._uses[address].writers.append((name, keep))
            self._uses[address].last_write = self._clock
        for address in read.keys() - written.keys():
            use = self._uses[address]
            if keep and address in made:
                use.kept_views.append((self._clock, name))
            elif not keep and not is_view:
                use.rerun_readers.append((self._clock, name))

    def violation(self) -> str | None:
        """Why the policy is unsound for this forward, or None."""
        for use in self._uses.values():
            if use.creator is None or not use.writers:
                continue
            made_or_changed = [(use.creator, use.creator_kept), *use.writers]
            kept = [name for name, keep in made_or_changed if keep]
            rerun = [name for name, keep in made_or_changed if not keep]
            if kept and rerun:
                return f"keeps {kept[0]} but recomputes {rerun[0]} on the same memory"
            early_readers = [name for at, name in use.rerun_readers if at < use.last_write]
            if kept and early_readers:
                return f"recomputes {early_readers[0]}, which reads memory that a kept operator changes later"
            early_views = [name for at, name in use.kept_views if at < use.last_write]
            if rerun and early_views:
                return f"keeps {early_views[0]} of memory that recomputed operators change"
        return None


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The storages behind all tensors of a tree, by address; tensor subclasses count as the tensors inside
    them.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_in(tree):
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            found.update(_storages([getattr(tensor, name) for name in names]))
        else:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
    return found
