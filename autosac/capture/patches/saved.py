"""What stands for simulated tensors in a file that is not written."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A simulated tensor that was saved: it takes no memory on the device until it is loaded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any, known: dict[Any, Any] | None = None) -> Any:
        """Everything else is itself. `known`: those of the same file, of which each is saved once."""
        if not isinstance(value, FakeTensor):
            return value.clone() if type(value) is torch.Tensor and known is not None else value
        saved = cls(tuple(value.shape), value.stride(), value.dtype, value.device)
        if known is None:
            return saved
        place = value.untyped_storage()._cdata, value.storage_offset(), saved.shape, saved.stride, saved.dtype
        return known.setdefault(place, saved)

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def loaded(self, device: Any) -> torch.Tensor:
        """A new tensor like it, on this device or (None) where it was."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


def contents_of(tree: Any) -> tuple[Any, int]:
    """What a file of these would hold, each tensor once, and how large it would be (bytes)."""
    saved: dict[Any, Any] = {}
    contents = pytree.tree_map(functools.partial(Saved.of, known=saved), tree)
    return contents, sum(each.nbytes for each in saved.values())


def loaded_from(contents: Any, device_for: Callable[[torch.device], torch.device]) -> Any:
    """A copy of what was saved; `device_for` says where a tensor of a device goes."""
    loaded: dict[Saved, torch.Tensor] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Saved):
            return copy.deepcopy(value)
        if value not in loaded:
            loaded[value] = value.loaded(device_for(value.device))
        return loaded[value]

    return pytree.tree_map(one, contents)
