"""Shadow values: what is known of a simulated tensor, as a real tensor beside it (`values` says how they come about)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

MOST_KNOWN = 1 << 22  # elements: token ids, routing counts, masks
UNKNOWN_INTEGER = 1  # what stands for an integer that nobody knows

Later: TypeAlias = Callable[[], "torch.Tensor | None"]
"""Values that another rank has, as a flat tensor; None if they are unknown. May wait for that rank."""


_writes = [0]
_written: dict[int, int] = {}  # writes to memory of inference tensors, by its address


def note_write() -> None:
    """Known values have been written into. Their versions do not say so: below autograd nothing counts them."""
    _writes[0] += 1


def writes() -> int:
    """How often that has happened, to any of them."""
    return _writes[0]


def version(tensor: torch.Tensor) -> int:
    """How often the tensor has been changed; PyTorch does not count it for those that are made in inference mode."""
    if tensor.is_inference():
        return _written.get(tensor.untyped_storage()._cdata, 0)
    return tensor._version


def count_writes(tensors: Iterable[Any]) -> None:
    """These of an operator's arguments are about to be changed."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) and tensor.is_inference():
            memory = tensor.untyped_storage()._cdata
            _written[memory] = _written.get(memory, 0) + 1


def shadow(tensor: Any) -> torch.Tensor | None:
    """The shadow values of a fake tensor, or None."""
    values: Any = getattr(tensor, "_shadow", None)
    if values is not None and not isinstance(values, torch.Tensor):
        values = tensor._shadow = arrived(values, tensor)
    if values is None or (not values.untyped_storage().nbytes() and values.numel()):  # forgotten
        return None
    known: torch.Tensor = values
    return known


def known_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, which may be a real one; None if they are unknown."""
    return shadow(tensor) if isinstance(tensor, FakeTensor) else tensor


def known_lengths(lengths: torch.Tensor, longest: int) -> list[int]:
    """Lengths of sequences; all the longest that they can be if they are unknown."""
    known = known_values(lengths)
    return [longest] * lengths.numel() if known is None else known.reshape(-1).tolist()


def arrived(later: Later, tensor: torch.Tensor) -> torch.Tensor | None:
    """What another rank has sent, if it is what this tensor can hold."""
    with torch._C._DisableTorchDispatch():
        found = later()
        return found.view(tensor.shape) if found is not None and found.numel() == tensor.numel() else None


def forget(tensor: Any) -> None:
    """The tensor's values are unknown from now on, and so are those of all its views and its base.

    Shadows share memory as their tensors do: freeing it tells all of them.
    """
    values = shadow(tensor)
    if values is not None:
        tensor._shadow = None
        if values.untyped_storage().resizable():
            values.untyped_storage().resize_(0)


def overwrite(tensor: Any, values: torch.Tensor) -> None:
    """The tensor has new values, which its views and its base see, too."""
    known = shadow(tensor)
    if known is None:
        tensor._shadow = values.clone()  # whose they are may change
    else:
        known.copy_(values)
        note_write()
