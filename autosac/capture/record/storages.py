"""The allocations of the simulated device.

A storage lives from the operator that first returns it to the death of its last reference (a weakref on the storage
object), and through `UntypedStorage.resize_`, with which FSDP2 frees and re-allocates its unsharded parameters: every such
allocation is a storage of its own in the trace.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.record.log import EventLog
from autosac.capture.record.phases import OperatorPlace
from autosac.trace import Alloc, Free, Label, Op, Phase, Storage

_NO_SPARSE = (
    "sparse tensors cannot be simulated: their sizes and times depend on their values (Embedding and EmbeddingBag with "
    "sparse=True make sparse gradients)"
)
_WITH_STORAGE = (torch.strided, torch.jagged)
_ADDITION_EVENTS = 4  # an addition of the engine has logged its allocation among the last so many events


class _Live:
    """A storage object that is alive now, and the id of its present allocation (-1 while it is empty)."""

    __slots__ = ("reference", "storage")

    def __init__(self) -> None:
        self.reference: weakref.ref[Any] | None = None
        self.storage = -1


class StorageTable:
    """All allocations on the device type `target`; logs their begins and ends, also before the recorded step."""

    def __init__(self, log: EventLog, target: str) -> None:
        self.storages: list[Storage] = []
        self.streams: set[int] = {0}
        self.devices: set[int] = set()  # their indices
        self._log = log
        self._target = target
        self._labels: dict[int, Label] = {}
        self._live: dict[int, _Live] = {}
        # An addition that was in place if its first summand dies next: (summand's key, its output's key, events so far).
        self._addition: tuple[int, int, int] | None = None
        self._silent: set[int] | None = None
        self._copies: list[tuple[int, int]] = []  # (a copy, what it is a copy of)

    def of(self, tensor: torch.Tensor) -> int:
        """The present allocation that holds a tensor, -1 if it is not on the device."""
        storage = tensor.untyped_storage()
        live = self._live.get(id(storage))
        return live.storage if live is not None and live.reference is not None and live.reference() is storage else -1

    def returned(self, tensor: Any, name: str, stream: int, place: OperatorPlace, label: Label) -> int:
        """The allocation that holds an operator's result: a new one (with `label`) if it is not known yet."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != self._target:
            return -1
        if tensor.layout not in _WITH_STORAGE:
            raise NotImplementedError(_NO_SPARSE)
        storage = tensor.untyped_storage()
        key = id(storage)
        live = self._live.get(key)
        if live is not None and live.reference is not None and live.reference() is storage:
            return live.storage
        live = _Live()
        nbytes = storage.nbytes()
        if nbytes:
            live.storage = self._allocate(nbytes, name, stream, place, label)
            self.devices.add(tensor.fake_device.index or 0)
        live.reference = weakref.ref(storage, lambda _: self._died(key, live))
        self._live[key] = live
        return live.storage

    def copied(self, originals: Sequence[int]) -> list[int]:
        """New allocations like these, whose begins and ends somebody else logs; they get the same labels in the end."""
        first = len(self.storages)
        self.storages += [self.storages[original] for original in originals]
        copies = list(range(first, len(self.storages)))
        self._copies += zip(copies, originals, strict=True)
        return copies

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """What tensors hold of these allocations is of others from now on, which end with them."""
        for live in self._live.values():
            live.storage = numbers.get(live.storage, live.storage)

    def held(self) -> set[int]:
        """The allocations that tensors hold."""
        return {live.storage for live in self._live.values() if live.storage >= 0}

    @contextlib.contextmanager
    def silent(self) -> Iterator[set[int]]:
        """Ends of allocations are noted in the set that this gives, and not logged. What is resized has none afterwards."""
        self._silent = set()
        try:
            yield self._silent
        finally:
            self._silent = None

    def hold(self, tensor: torch.Tensor, storage: int) -> None:
        """The memory of a tensor that is known is this allocation from now on; -1 for none."""
        self._live[id(tensor.untyped_storage())].storage = storage

    def adopt(self, tensor: torch.Tensor, storage: int) -> None:
        """The allocation holds this tensor, which nobody has seen yet: it ends with it."""
        held = tensor.untyped_storage()
        key, live = id(held), _Live()
        live.storage = storage
        live.reference = weakref.ref(held, lambda _: self._died(key, live))
        self._live[key] = live

    def _allocate(self, nbytes: int, name: str, stream: int, place: OperatorPlace, label: Label) -> int:
        position = len(self.storages)
        self.streams.add(stream)
        self.storages.append(Storage(nbytes, stream, label, place.phase, place.module, place.source, name))
        self._log.events.append(Alloc(position))
        return position

    def note(self, operator: Op, name: str) -> None:
        """An allocation of nothing that stays, where the operator ran: it says what the operator's library keeps there."""
        self._allocate(
            0, name, operator.stream, OperatorPlace(operator.phase, operator.module, operator.source), Label.NONE
        )

    def _died(self, key: int, live: _Live) -> None:
        if self._addition is not None:
            summand, total, position = self._addition
            self._addition = None
            if key == summand and position == len(self._log.events):
                self._added_in_place(live, self._live[total])
        if live.storage >= 0:
            self._ended(live)
        if self._live.get(key) is live:
            del self._live[key]

    def _ended(self, live: _Live) -> None:
        if self._silent is None:
            self._log.events.append(Free(live.storage))
        else:
            self._silent.add(live.storage)
        live.storage = -1

    def holds(self, storage: torch.UntypedStorage, nbytes: int) -> bool:
        """Whether resizing this storage to `nbytes` changes nothing: it is unknown, or has that size."""
        live = self._live.get(id(storage))
        if live is None or live.reference is None or live.reference() is not storage:
            return True
        return (self.storages[live.storage].nbytes if live.storage >= 0 else 0) == nbytes

    def resized(self, storage: torch.UntypedStorage, nbytes: int, stream: int, place: OperatorPlace) -> None:
        """`UntypedStorage.resize_` of a known storage: the old allocation ends, a new one begins."""
        live = self._live[id(storage)]
        if live.storage >= 0:
            self._ended(live)
        if nbytes and self._silent is None:
            label = Label.NONE if place.phase is Phase.SETUP else Label.UNSHARDED_PARAMETER
            live.storage = self._allocate(nbytes, "resize_", stream, place, label)

    # ---- additions of gradients -------------------------------------------------------------------------------------

    def forget_addition(self) -> None:
        """Another operator has come between: the last addition was none in place."""
        self._addition = None

    @property
    def awaits_addition(self) -> bool:
        """Whether what dies next may change what has been logged."""
        return self._addition is not None

    @property
    def settled(self) -> int:
        """How many of the log's events will stay as they are, whatever dies next."""
        events = len(self._log.events)
        return events if self._addition is None else max(0, events - _ADDITION_EVENTS)

    def expect_addition(self, summand: torch.Tensor, total: torch.Tensor) -> None:
        """The operator that has just been logged may be an addition of the engine (accumulation.py)."""
        keys = id(summand.untyped_storage()), id(total.untyped_storage())
        if keys[0] in self._live and keys[1] in self._live:
            self._addition = (*keys, len(self._log.events))

    def _added_in_place(self, summand: _Live, total: _Live) -> None:
        """The engine's addition wrote into its first summand: its allocation lives on, there was no new one."""
        events = self._log.events
        allocation = events.index(Alloc(total.storage), max(0, len(events) - _ADDITION_EVENTS))
        del events[allocation]
        if self._log.recording:
            operator = events[-1]
            assert type(operator) is Op
            events[-1] = operator._replace(outputs=(summand.storage,))
        total.storage, summand.storage = summand.storage, -1

    # ---- labels -----------------------------------------------------------------------------------------------------

    def of_all(self, tree: Any) -> tuple[int, ...]:
        """The storages (distinct, in order) of all tensors in a tree, tensor subclasses opened."""
        found: dict[int, None] = {}
        for leaf in pytree.tree_leaves(tree):
            for tensor in _plain_tensors(leaf):
                storage = self.of(tensor)
                if storage >= 0:
                    found[storage] = None
        return tuple(found)

    def label(self, tree: Any, label: Label) -> None:
        """Label the storages of all tensors in a tree that have no such label yet."""
        for storage in self.of_all(tree):
            self._labels.setdefault(storage, label)

    def label_inputs(self, tree: Any) -> None:
        """Label what a model is called with, unless a model has made it or it is known as something else."""
        for storage in self.of_all(tree):
            known = self.storages[storage]
            if known.label is Label.NONE and known.phase in (Phase.SETUP, Phase.OTHER):
                self.storages[storage] = known._replace(label=Label.INPUT)

    def finished(self) -> tuple[Storage, ...]:
        """All storages with their labels."""
        labels = self._labels
        for copy, original in self._copies:
            if original in labels:
                labels.setdefault(copy, labels[original])
        return tuple(s._replace(label=labels[i]) if i in labels else s for i, s in enumerate(self.storages))


def _plain_tensors(value: Any) -> list[torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        return []
    while is_functorch_wrapped_tensor(value):  # inside of torch.func's transformations: grad, vmap
        value = get_unwrapped(value)
    if isinstance(value, FakeTensor) or not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [tensor for name in names for tensor in _plain_tensors(getattr(value, name))]
