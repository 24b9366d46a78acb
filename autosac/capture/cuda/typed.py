"""`torch.cuda.FloatTensor` and the like: how programs named types before PyTorch had dtypes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Bool": torch.bool,
}


class _Typed(type):
    """A type of tensors that is asked for them, and whether one is of it."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype

    def __call__(cls, *arguments: Any, device: Any = "cuda") -> torch.Tensor:
        """Sizes, or what shall be in it."""
        if len(arguments) == 1 and not isinstance(arguments[0], (int, torch.Size)):
            data: torch.Tensor | Sequence[Any] = arguments[0]
            if isinstance(data, torch.Tensor):
                return data.to(device, cls.dtype)
            return torch.tensor(data, dtype=cls.dtype, device=device)
        sizes = arguments[0] if arguments and isinstance(arguments[0], torch.Size) else arguments or (0,)
        return torch.empty(sizes, dtype=cls.dtype, device=device)


_TYPES = {
    f"{name}Tensor": _Typed(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
    for name, dtype in _DTYPES.items()
}


def install() -> None:
    """Put the types into torch.cuda, and make `Tensor.type` and `set_default_tensor_type` know them."""
    vars(torch.cuda).update(_TYPES)
    tensor: Any = torch.Tensor
    cast, choose = tensor.type, torch.set_default_tensor_type
    chosen: list[_Typed] = []

    def typed(self: torch.Tensor, dtype: Any = None, *arguments: Any, **kwargs: Any) -> Any:
        found = _named(dtype)
        return cast(self, dtype, *arguments, **kwargs) if found is None else self.to("cuda", found.dtype)

    def set_default_tensor_type(t: Any, /) -> None:
        found = _named(t)
        if found is not None:
            chosen[:] = [found]
            torch.set_default_dtype(found.dtype)
            torch.set_default_device("cuda")
            tensor.__new__ = new  # ``torch.Tensor([1.0])`` is of the default type
            return
        if chosen:
            chosen.clear()
            torch.set_default_device(None)
        choose(t)

    def new(cls: Any, *arguments: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor and chosen:
            return chosen[0](*arguments, **kwargs)
        return torch._C.TensorBase.__new__(cls, *arguments, **kwargs)

    tensor.type = typed
    vars(torch)["set_default_tensor_type"] = set_default_tensor_type


def _named(dtype: Any) -> _Typed | None:
    """The type of torch.cuda that is meant."""
    if isinstance(dtype, str):
        module, _, name = dtype.rpartition(".")
        return _TYPES.get(name) if module == "torch.cuda" else None
    return dtype if isinstance(dtype, _Typed) else None
