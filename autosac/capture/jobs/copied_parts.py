"""What a microbatch does in its parts, noted where it runs and logged once more where it is copied.

`Stage` knows what the microbatches of a model, or of a pipeline stage, have done in this step. Two microbatches are compared
in each kind of part, 1 and 2 (`COMPARED`) if nothing else is said; what both have done alike is the pattern of those that
follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.device.elements import take, typical
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.fsdp_units import UnitsChange
from autosac.capture.jobs.held_tensors import HeldTensor
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import Numbering, RepetitionError, RowStretch, copy, stretch
from autosac.integrations.apply import forwards_of

COMPARED = (1, 2)
_SIMPLE = (bool, int, float, str)
FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"


class _Result(NamedTuple):
    """A tensor that a stretch returns: the position of its storage, its layout, and its class with what that keeps beside it
    (DTensor), if it is no plain tensor.
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wrapped: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a microbatch does in one of its three parts: its stretch, what it returns (`results`, in a tree `like`), how often
    each unit of a plan runs forward, and the `state` of the modules afterwards. `elements`: typical ones of the results, which
    are not compared. `units`: what it does to FSDP's units, if anybody has looked; `held`: what objects of the model hold
    afterwards.
    """

    stretch: RowStretch
    results: tuple[_Result | None, ...]
    like: Any
    forwards: tuple[int, ...]
    state: tuple[Any, ...]
    elements: tuple[float | None, ...]
    units: UnitsChange | None = None
    held: tuple[HeldTensor, ...] = ()

    def is_like(self, other: Part) -> bool:
        """Whether both do the same."""
        names = ("results", "like", "forwards", "state", "units", "held")
        return all(getattr(self, name) == getattr(other, name) for name in names) and self.stretch.is_like(
            other.stretch
        )


@dataclass
class Stage:
    """What is known of a stage's microbatches since the schedule has begun. `chained`: they run one after the other, and what
    one has made may end in the next.
    """

    numbers: dict[int, Numbering] = field(default_factory=dict)
    parts: dict[tuple[Hashable, int], Part | None] = field(default_factory=dict)
    patterns: dict[Hashable, Part | None] = field(default_factory=dict)  # of the parts that both have run
    copied: set[int] = field(default_factory=set)
    real: set[int] = field(default_factory=set)  # storages of copied microbatches that tensors hold
    chained: bool = False

    def of(self, index: int) -> Numbering:
        """A microbatch's numbers."""
        if index not in self.numbers:
            self.numbers[index] = Numbering(index, self.numbers.get(index - 1) if self.chained else None)
        return self.numbers[index]

    def pattern(self, kind: Hashable) -> Part | None:
        """What microbatches do in this kind of part, if two have done the same."""
        if kind not in self.patterns and all((kind, index) in self.parts for index in COMPARED):
            one, other = (self.parts[kind, index] for index in COMPARED)
            self.patterns[kind] = other if one is not None and other is not None and one.is_like(other) else None
        return self.patterns.get(kind)

    def is_closed(self, elsewhere: Collection[int] = ()) -> bool:
        """Whether all that a microbatch makes ends with it, but for what it returns, and what ends `elsewhere`."""
        return is_closed([part for (_, index), part in self.parts.items() if index == COMPARED[1]], elsewhere)


def is_closed(parts: Sequence[Part | None], elsewhere: Collection[int] = ()) -> bool:
    """Whether all that a microbatch makes in its parts ends there or in the next one, but for what it returns, what FSDP's
    units and objects of the model hold, and what ends `elsewhere`.
    """
    held, freed, returned = set[int](), set[int](), set[int]()
    for part in filter(None, parts):
        held |= part.stretch.held() - part.stretch.carried()
        freed |= part.stretch.freed()
        returned |= {result.storage for result in part.results if result is not None}
        if part.units is not None:
            returned |= set(part.units.storages)
        returned |= {held.storage for held in part.held}
    return held - freed <= returned.union(elsewhere)


class Copies:
    """Notes and copies parts of microbatches."""

    def __init__(self, mode: SimulatedDeviceMode, recorder: Recorder) -> None:
        self._mode, self._recorder = mode, recorder

    def _noted(
        self, known: Stage, index: int, module: torch.nn.Module, action: Callable[[], Any]
    ) -> tuple[Any, Part | None]:
        """What a part of a microbatch returns, and what it does; None if that cannot be copied."""
        recorder = self._recorder
        before, forwards = recorder.extent(), forwards_of(module)
        found = action()
        numbering = known.of(index)
        noted = stretch(recorder, numbering, before)
        leaves, like = pytree.tree_flatten(found)
        results = [self._result(leaf, numbering) for leaf in leaves]
        known_leaves = all(leaf is None or result for leaf, result in zip(leaves, results, strict=True))
        if noted is None or not known_leaves:
            return found, None
        ran = tuple(now - then for now, then in zip(forwards_of(module), forwards, strict=True))
        state, elements = state_of(module), tuple(map(typical, leaves))
        return found, Part(
            stretch=noted, results=tuple(results), like=like, forwards=ran, state=state, elements=elements
        )

    def _pattern(self, known: Stage, kind: Hashable) -> Part:
        part = known.pattern(kind)
        if part is None:
            raise RepetitionError(f"microbatches differ in their {kind}")
        return part

    def _copy(self, known: Stage, kind: Hashable, index: int, let_go: Callable[[], None] = lambda: None) -> Any:
        """Log a part of a microbatch like another one's; what it returns."""
        part, numbering = self._pattern(known, kind), known.of(index)
        copy(self._recorder, numbering, part.stretch, known.real.__contains__, let_go)
        if known.chained:  # what modules hold is this microbatch's from now on
            before = known.of(index - 1).storages
            carried = part.stretch.carried()
            self._recorder.storages.renumber({before.number(p): numbering.storages.number(p) for p in carried})
        made: dict[int, torch.Tensor] = {}
        leaves = [None if result is None else self._made(result, numbering, made) for result in part.results]
        for leaf, element in zip(leaves, part.elements, strict=True):
            take(leaf, element)
        known.real |= made.keys()
        return pytree.tree_unflatten(leaves, part.like)

    def _result(self, leaf: Any, numbering: Numbering) -> _Result | None:
        """How to make a tensor like this one; None if it is more than its layout."""
        wrapped: tuple[Any, ...] = ()
        plain = leaf
        if type(leaf).__name__ == "DTensor":
            names, beside = leaf.__tensor_flatten__()
            inner = {name: getattr(leaf, name) for name in names}
            (name,) = (name for name, value in inner.items() if isinstance(value, torch.Tensor))
            plain = inner.pop(name)
            wrapped = (type(leaf), name, inner, beside, leaf.shape, leaf.stride())
        if type(plain) is not FakeTensor or plain.storage_offset() or plain.layout is not torch.strided:
            return None
        position = numbering.storages.position(self._recorder.storages.of(plain))
        layout = tuple(map(int, plain.shape)), tuple(map(int, plain.stride()))
        if position >= -1 or plain.untyped_storage().nbytes() != _span(*layout) * plain.element_size():
            return None
        return _Result(position, *layout, plain.dtype, plain.fake_device, wrapped)

    def _made(self, result: _Result, numbering: Numbering, made: dict[int, torch.Tensor]) -> torch.Tensor:
        storage = numbering.storages.number(result.storage)
        if storage in made:
            raise RepetitionError("results share their memory")
        with self._mode.unrecorded(), torch.no_grad():
            tensor = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=result.device)
        self._recorder.storages.adopt(tensor, storage)
        made[storage] = tensor
        if not result.wrapped:
            return tensor
        kind, name, inner, beside, shape, stride = result.wrapped
        whole: torch.Tensor = kind.__tensor_unflatten__({name: tensor, **inner}, beside, shape, stride)
        return whole.requires_grad_(False)  # a leaf that needs a gradient would be held by the graph of the losses' sum


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements a tensor without an offset needs."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def state_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """The numbers, texts and truth values that modules hold, such as a count of their calls."""
    return tuple(value for module in model.modules() for value in vars(module).values() if isinstance(value, _SIMPLE))
