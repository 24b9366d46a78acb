"""Selective recomputation of one checkpointed module, operator by operator, under a plan's decisions.

`torch.utils.checkpoint` runs the module's forward under one dispatch mode (`SavingMode`) and its
recomputation under another (`ReplayMode`). The first notes which operators ran and holds the results of those
to be kept; the second returns what is held and runs the rest. It is PyTorch's own scheme
(torch/utils/checkpoint.py, `_CachingTorchDispatchMode`) with these differences, each so that a plan can be
wrong without a gradient being wrong:

- each operator is compared with the plan while running: (operator, occurrence) must be known and its outputs
  must look as planned. At the first difference nothing is kept any more and the whole module is recomputed
  (`Memo.fall_back`);
- the same is done for decisions that cannot be right: tensors changed in place (see `aliases`), random
  operators of which a later one is recomputed and an earlier one is not, a kept tensor that was changed after
  the forward;
- what the plan offloads waits in host memory meanwhile (see `offload`);
- the recomputation must run the same operators in the same order, else it is an error, as in PyTorch.

A fallback warns once for each unit.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from autosac.integrations.aliases import AliasWatch, find_operator, written_arguments
from autosac.integrations.keys import (
    CountingMode,
    Keyer,
    fingerprint,
    is_collective,
    is_counted,
    is_random,
    is_view,
    op_name,
    quiet,
    tensors_in,
)
from autosac.integrations.offload import Offloader, Parcel
from autosac.plans import ANY_SIZE, Decision, Fingerprint, Unit

_RERUN = object()


class PlanMismatchWarning(UserWarning):
    """A checkpointed module does not do what its plan says; it is recomputed as a whole, which costs time
    only.
    """


@dataclass(frozen=True, slots=True)
class Argument:
    """Stands for the argument at this position (or of this name), which a mutating operator returned."""

    key: int | str


class UnitPolicy:
    """A unit's decisions made ready for dispatch, shared by all executions of the module."""

    def __init__(self, unit: Unit, *, preserve_rng_state: bool, offloader: Offloader | None = None) -> None:
        self.fqn = unit.fqn
        self.size = len(unit.decisions)
        self.preserve_rng_state = preserve_rng_state
        self.offloader = offloader
        self.watched = any(d.keep and _may_mutate(d.op) for d in unit.decisions)
        self._by_name: dict[str, list[Decision]] = {}
        for decision in unit.decisions:
            self._by_name.setdefault(decision.op, []).append(decision)
        self._by_func: dict[Any, list[Decision]] = {}
        self._warned = False

    def decisions(self, func: Any) -> list[Decision]:
        """The decisions about this operator, by occurrence."""
        rows = self._by_func.get(func)
        if rows is None:
            rows = self._by_func[func] = self._by_name.get(op_name(func), [])
        return rows

    def difference(self, func: Any, occurrence: int, out: Any) -> str:
        """What differs between the plan and this call, in words; empty if nothing does."""
        rows = self.decisions(func)
        if occurrence >= len(rows):
            return f"runs more calls of {op_name(func)} than the plan's {len(rows)}"
        planned, found = rows[occurrence].outputs, fingerprint(out)
        if found == planned or _alike(found, planned):
            return ""
        return f"{op_name(func)} (call {occurrence}) returns {_look(found)}; the plan has {_look(planned)}"

    def warn(self, reason: str, consequence: str = "recomputing all of it") -> None:
        """Say once that the module does not follow its plan, and what is done about it."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"module {self.fqn} {reason}: {consequence} (gradients stay right; said once)",
                PlanMismatchWarning,
                stacklevel=2,
            )


class Memo:
    """What one execution of a module leaves for its recomputation: the operators that ran, and what is held
    of them.
    """

    def __init__(self, policy: UnitPolicy) -> None:
        self.policy = policy
        self.funcs: list[Any] = []
        self.held: list[Any] = []
        self.versions: list[int] = []
        self.offloaded: list[int] = []  # positions in `held`
        self.previous: weakref.ref[Memo] | None = None
        self.complete = False
        self.fallen_back = False
        self.spent = False

    def fall_back(self, reason: str) -> None:
        """Hold nothing, recompute everything, and warn."""
        self.fallen_back = True
        self.release()
        self.policy.warn(reason)

    def release(self) -> None:
        """Let go of all that is held."""
        self.funcs, self.held, self.versions, self.offloaded = [], [], [], []

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors held, in order."""
        for value in self.held:
            if value is not _RERUN:
                yield from tensors_in(value)

    def offload(self) -> None:
        """Begin to copy to the host what the plan offloads."""
        offloader = self.policy.offloader
        if offloader is not None:
            for i in self.offloaded:
                self.held[i] = tree_map(offloader.send, self.held[i])
            self.versions = [tensor._version for tensor in self.tensors()]

    def parcels(self) -> Iterator[Parcel]:
        """What is offloaded and has not been given yet, in order."""
        for i in self.offloaded:
            for leaf in tree_leaves(self.held[i]):
                if isinstance(leaf, Parcel):
                    yield leaf

    def is_changed(self) -> bool:
        """Whether what is held is no more what the forward left."""
        changed = self.versions != [tensor._version for tensor in self.tensors()]
        return changed or any(parcel.is_changed() for parcel in self.parcels())


class SavingMode(CountingMode):
    """Runs the forward, compares it with the plan, holds what is to be kept."""

    def __init__(self, memo: Memo) -> None:
        super().__init__()
        self._memo = memo
        self._keyer = Keyer()
        self._watch = AliasWatch() if memo.policy.watched else None
        self._keeps_random = False

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """End the forward: the last checks that need all of it."""
        super().__exit__(kind, value, traceback)
        if kind is not None:
            return
        if not self._memo.fallen_back:
            self._complete()
        if self._memo.policy.offloader is not None:
            self._memo.policy.offloader.forward_ended(self._memo)

    def _complete(self) -> None:
        memo = self._memo
        memo.complete = True
        versions = [tensor._version for tensor in memo.tensors()]
        unsound = self._watch.violation() if self._watch else None
        if len(memo.funcs) != memo.policy.size:
            memo.fall_back(f"ran {len(memo.funcs)} operators; the plan has {memo.policy.size}")
        elif unsound is not None:
            memo.fall_back(f"cannot follow its plan, which {unsound}")
        elif self._watch is None and versions != memo.versions:
            memo.fall_back("changes in place what its plan keeps")
        memo.versions = [] if memo.fallen_back else versions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and follow the plan."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._memo.fallen_back:
            occurrence = self._keyer.occurrence(func)
            if occurrence >= 0:
                self._follow(func, occurrence, args, kwargs, out)
            elif self._watch is not None and is_view(func) and not quiet.depth:
                self._watch.see(op_name(func), func, args, kwargs, out, False)
        return out

    def _follow(self, func: Any, occurrence: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        memo, policy = self._memo, self._memo.policy
        difference = policy.difference(func, occurrence, out)
        if difference:
            memo.fall_back(difference)
            return
        decision = policy.decisions(func)[occurrence]
        keep = decision.keep
        if is_random(func, args, kwargs):
            self._check_random(func, keep)
            if memo.fallen_back:
                return
        if self._watch is not None:
            self._watch.see(op_name(func), func, args, kwargs, out, keep)
        memo.funcs.append(func)
        if not keep:
            memo.held.append(_RERUN)
            return
        held = _hold(func, args, kwargs, out)
        if decision.offload and _may_leave(func, decision):
            memo.offloaded.append(len(memo.held))
        memo.held.append(held)
        memo.versions.extend([tensor._version for tensor in tensors_in(held)])

    def _check_random(self, func: Any, keep: bool) -> None:
        policy = self._memo.policy
        if keep:
            self._keeps_random = True
        elif not policy.preserve_rng_state:
            raise RuntimeError(
                f"the plan recomputes the random operator {op_name(func)} of {policy.fqn} but has "
                "preserve_rng_state = false: gradients would be wrong; plan with preserve_rng_state = true"
            )
        elif self._keeps_random:
            self._memo.fall_back(
                f"cannot follow its plan, which recomputes the random {op_name(func)} after a kept one"
            )


class ReplayMode(CountingMode):
    """Runs the recomputation: returns what is held, runs the rest, and lets go of what it has returned."""

    def __init__(self, memo: Memo) -> None:
        super().__init__()
        self._memo = memo
        self._position = 0

    def __enter__(self) -> ReplayMode:
        """Begin the recomputation, if what is held is still what the forward left."""
        memo = self._memo
        if memo.spent:
            raise RuntimeError(
                "Trying to backward an extra time. You are only allowed to backward once on any region "
                "computed under selective activation checkpoint."
            )
        if not memo.fallen_back:
            if not memo.complete:
                memo.fall_back("runs a backward inside its forward")
            elif memo.is_changed():
                memo.fall_back("had kept tensors changed in place after its forward")
        if memo.policy.offloader is not None:
            memo.policy.offloader.backward_begins(memo)
        self._position = 0
        return super().__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """End the recomputation; what it did not come to (early stop) is not needed."""
        super().__exit__(kind, value, traceback)
        if not self._memo.fallen_back:
            self._memo.spent = True
            self._memo.release()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what is held of this operator, or run it."""
        kwargs = kwargs or {}
        memo = self._memo
        if memo.fallen_back or quiet.depth or not is_counted(func):
            return func(*args, **kwargs)
        i = self._position
        if i >= len(memo.funcs) or memo.funcs[i] is not func:
            expected = op_name(memo.funcs[i]) if i < len(memo.funcs) else "nothing"
            raise RuntimeError(
                f"{op_name(func)} runs in the recomputation of {memo.policy.fqn} where its forward ran "
                f"{expected} (operator {i}). This can happen if the operations of a checkpointed region are "
                "nondeterministic or depend on global state that changed between forward and backward."
            )
        self._position = i + 1
        held = memo.held[i]
        if held is _RERUN:
            return func(*args, **kwargs)
        memo.held[i] = None
        return _give(held, args, kwargs, fresh=memo.policy.watched)


def _may_mutate(name: str) -> bool:
    """Whether an operator may change its arguments; one that is not registered (yet) may."""
    func = find_operator(name)
    return func is None or bool(func._schema.is_mutable)


def _hold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """What to hold of a result: its tensors, detached; arguments that a mutating operator returns by their
    place.
    """
    if written_arguments(func):
        places = {id(value): Argument(i) for i, value in enumerate(args) if isinstance(value, torch.Tensor)}
        places |= {id(v): Argument(name) for name, v in kwargs.items() if isinstance(v, torch.Tensor)}
        return tree_map_only(torch.Tensor, lambda x: places.get(id(x)) or _detach(x), out)
    if isinstance(out, torch.Tensor):
        return _detach(out)
    return tree_map_only(torch.Tensor, _detach, out)


def _give(held: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, fresh: bool) -> Any:
    """The result that `held` stands for.

    `fresh` gives tensors a version counter of their own: autograd counts a mutation at every kept in-place
    operator although it does not run, and others may hold the same tensors.
    """

    def give(leaf: Any) -> Any:
        if isinstance(leaf, Argument):
            return args[leaf.key] if isinstance(leaf.key, int) else kwargs[leaf.key]
        if isinstance(leaf, Parcel):
            leaf = leaf.tensor()
        return leaf.data if fresh and isinstance(leaf, torch.Tensor) else leaf

    return give(held) if isinstance(held, torch.Tensor | Argument | Parcel) else tree_map(give, held)


def _detach(x: torch.Tensor) -> torch.Tensor:
    """An alias without autograd metadata that shares the version counter.

    Without the first, a held view could not become a view in the recomputation's graph, and tensor and graph
    would hold each other. For the second, the dispatch key that this runs below must be let in again.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _may_leave(func: Any, decision: Decision) -> bool:
    """Whether a result may be copied when its unit has ended, to a buffer that the next step can use again."""
    return not is_collective(func) and not any(ANY_SIZE in shape for shape, _ in decision.outputs)


def _alike(found: Fingerprint, planned: Fingerprint) -> bool:
    """Whether they agree wherever the plan does not leave a size open."""
    return len(found) == len(planned) and all(
        dtype == planned_dtype
        and len(shape) == len(planned_shape)
        and all(size == wanted or wanted == ANY_SIZE for size, wanted in zip(shape, planned_shape, strict=True))
        for (shape, dtype), (planned_shape, planned_dtype) in zip(found, planned, strict=True)
    )


def _look(outputs: Fingerprint) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in outputs) or "no tensor"
