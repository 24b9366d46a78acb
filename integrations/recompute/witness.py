"""Comparing a recomputed tensor with the one that it stands for, without keeping that one.

On the CPU a witness is a checksum of all bytes: a recomputed tensor that differs in one bit is noticed. On other devices it
is a sample of the elements (`_SAMPLES`), compared with a tolerance: kernels that add up atomically do not repeat themselves
to the bit, and reading everything twice would cost time in every step. It finds what the tape cannot see: kernels that
write without the dispatcher, operators with a hidden state. What a kernel leaves unwritten is not compared (`undefined`).
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from autosac.integrations.operators.dispatching import skipped_by_dynamo
from autosac.integrations.recompute.memories import PLAIN, has_storage, plain_tensors

_SAMPLES = 64
_RELATIVE = 0.05
# Results of attention kernels that only dropout fills: without it they are memory that nobody has written.
_STATE_OF_DROPOUT = frozenset({"philox_seed", "philox_offset", "rng_state"})
_NEVER_FILLED = frozenset({"unused", "debug_attn_mask"})
_PARTLY_WRITTEN = {"aten::_ctc_loss": 1}  # by position: the loss writes as much as the targets are long
_JAGGED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2")
# Attention whose logsumexp has rows of whole 32s, written up to the queries: the dimension of these.
_PADDED = {"aten::_scaled_dot_product_efficient_attention": 2, "aten::_efficient_attention_forward": 1}
_VENDORS = ("cudnn", "_cudnn", "miopen", "mkldnn", "_batch_norm_with_update")


def of(tensor: torch.Tensor) -> Any:
    """The witness of a tensor's present content; None where there is nothing to look at."""
    _wait(tensor)
    plain = plain_tensors(tensor)
    if any(isinstance(t, FakeTensor) or t.device.type == "meta" or not has_storage(t) for t in plain):
        return None
    if all(t.device.type == "cpu" for t in plain):
        return tuple(_checksum(t) for t in plain)
    with _disable_current_modes(), torch.no_grad():
        return tuple(_sample(t) for t in plain)


def _wait(tensor: torch.Tensor) -> None:
    """Until communication has filled the tensor: what is saved before it is used has not been waited for."""
    if type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor):
        return
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        with _disable_current_modes(), torch.no_grad():
            tensor.trigger_wait()
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            _wait(part)


def undefined(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> list[torch.Tensor]:
    """The results of an operator whose content says nothing: a kernel leaves them unwritten, or some of their bytes.

    These are the generator's state of attention without dropout, padded sums of attention, the libraries' reserves, which
    are plain bytes, the table of the CTC loss, and grouped products whose last group ends before the last row or column.
    """
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.name in _JAGGED:
        return [out] if _is_partly_written(schema, args, kwargs) else []
    if schema is None or not isinstance(out, tuple):
        return []
    names = _NEVER_FILLED | _STATE_OF_DROPOUT if _without_dropout(schema, args, kwargs) else _NEVER_FILLED
    found = [value for value, result in zip(out, schema.returns, strict=True) if result.name in names]
    if schema.name in _PARTLY_WRITTEN:
        found.append(out[_PARTLY_WRITTEN[schema.name]])
    if schema.name in _PADDED and out[1].shape[-1:] != args[0].shape[_PADDED[schema.name] :][:1]:
        found.append(out[1])
    if schema.name.removeprefix("aten::").startswith(_VENDORS):
        found += [value for value in out if isinstance(value, torch.Tensor) and value.dtype is torch.uint8]
    return [value for value in found if isinstance(value, torch.Tensor)]


class Watch(TorchDispatchMode):
    """Within it, `undefined` results of operators are seen, of those that compiled code calls, too.

    What is made of a product of groups cannot be followed there: after one, no result says anything.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left: list[torch.Tensor] = []
        self._is_jagged = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and look at its results."""
        out = func(*args, **(kwargs or {}))
        found = undefined(func, args, kwargs or {}, out)
        if found and getattr(func, "_schema", None) is not None and func._schema.name in _JAGGED:
            self._is_jagged = True
        else:
            self._left += found
        return out

    def has_left(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is one of those results, or may be made of one."""
        return self._is_jagged or any(
            inner.untyped_storage()._cdata == left.untyped_storage()._cdata
            for inner in plain_tensors(tensor)
            for left in self._left
            if has_storage(inner)
        )


skipped_by_dynamo(Watch)


def _without_dropout(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(a.name == "dropout_p" for a in schema.arguments) and not _given("dropout_p", schema, args, kwargs)


def _is_partly_written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Of a grouped product: of one matrix the groups are rows or columns, up to the last one's end (TorchTitan's experts get
    more rows than they have tokens).
    """
    left, right, ends = args[0], args[1], _given("offs", schema, args, kwargs)
    if not isinstance(ends, torch.Tensor) or not ends.numel() or left.dim() == right.dim():
        return False
    rows: int = left.shape[0] if left.dim() == 2 else right.shape[1]
    return int(ends[-1]) < rows


def _given(name: str, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An argument that a call has, or its default."""
    for position, argument in enumerate(schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def differs(tensor: torch.Tensor, seen: Any) -> bool:
    """Whether a recomputed tensor is not the one that `seen` is the witness of."""
    if seen is None:
        return False
    now = of(tensor)
    if now is None or len(now) != len(seen):
        return True
    return any(_unlike(a, b) for a, b in zip(now, seen, strict=True))


def _unlike(a: Any, b: Any) -> bool:
    if isinstance(a, int):
        return bool(a != b)
    if a.shape != b.shape:
        return True
    scale = b.abs().mean()
    close = torch.isclose(a, b, rtol=_RELATIVE, atol=0.0, equal_nan=True) | ((a - b).abs() <= _RELATIVE * scale)
    return not bool(close.all())


def _checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the elements' bytes in logical order; read without an operator, which a recording mode would note."""
    if tensor.numel() == 0:
        return 0
    size = tensor.element_size()
    if tensor.is_contiguous():
        return zlib.crc32((ctypes.c_char * (tensor.numel() * size)).from_address(tensor.data_ptr()))
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if extent == tensor.numel():  # transposed; of what lies between rows nobody may have written the bytes
        return zlib.crc32((ctypes.c_char * (extent * size)).from_address(tensor.data_ptr()))
    with _disable_current_modes(), torch.no_grad():
        return _checksum(tensor.detach().contiguous())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = min(_SAMPLES, tensor.numel())
    places = torch.arange(count, device=tensor.device) * (tensor.numel() // max(count, 1))
    indices = torch.unravel_index(places, tensor.shape) if tensor.dim() else ()
    picked = tensor.detach()[indices].reshape(-1)
    if picked.is_complex():
        picked = torch.view_as_real(picked.resolve_conj()).reshape(-1)
    return picked.to(torch.float64) if picked.device.type != "mps" else picked.float()
