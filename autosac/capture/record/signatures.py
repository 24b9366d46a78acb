"""From an operator call to the trace's Signature: what its cost can depend on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import current_flash_attention_impl

from autosac.capture.device.masks import COMPUTED, share_of
from autosac.capture.device.operators import per_operator
from autosac.capture.record.distinct_values import DistinctValues
from autosac.errors import UsageError
from autosac.trace import Scalar, Signature, TensorMeta

Work: TypeAlias = Sequence[tuple[str, Scalar]]
"""What a generated kernel does, by name: "nbytes" that it moves, "rows", and elements that are "reduced" in each."""

# No kernel is launched: allocations without initialisation, metadata, aliases.
_METADATA_ONLY = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten.detach.default",
    "aten.alias.default",
    "aten.lift_fresh.default",
    "aten._unsafe_view.default",
    "_c10d_functional.wait_tensor.default",
    "aten._reshape_alias.default",
    "aten._conj.default",
    "aten._neg_view.default",
    "aten.view_as_real.default",
    "aten.view_as_complex.default",
    "aten.as_strided.default",
    "aten.unbind.int",
    "aten.split_with_sizes.default",
    "aten.split.Tensor",
}
_NUMBERS = ("bool", "int", "SymInt")
_RANDOM_PREFIXES = (
    "aten._scaled_dot_product_",
    "aten._fused_sdp_choice",
    "aten._flash_attention",
    "aten._efficient_attention",
)
_FLEXIBLE = ("flex_attention", "flex_attention_backward")
_FLASH_PREFIXES = (
    *_FLEXIBLE,
    "aten._flash_attention",
    "aten._scaled_dot_product_flash_attention",
    "torch_attn._varlen_attn",
)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@per_operator
def operator_name(func: Any) -> str:
    """``aten.mm.default``; higher-order operators by their name."""
    return str(func)


@per_operator
def launches_nothing(func: Any) -> bool:
    """The operator launches nothing on the device."""
    metadata = torch.Tag.inplace_view in getattr(func, "tags", ()) or operator_name(func) in _METADATA_ONLY
    return metadata or bool(getattr(func, "is_view", False)) or _is_question(func)


def _is_question(func: Any) -> bool:
    """It says on the host how another one is to be run (`_use_cudnn_ctc_loss`): it returns numbers, and writes nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.returns or mutated_arguments(func):
        return False
    return all(str(returned.type) in _NUMBERS for returned in schema.returns)


@per_operator
def mutated_arguments(func: Any) -> tuple[str, ...]:
    """Names of the arguments that the operator writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def is_random(func: Any, arguments: tuple[tuple[str, Scalar], ...]) -> bool:
    """The call draws from the device's generator; attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if operator_name(func).startswith(_RANDOM_PREFIXES):
        return any(name == "dropout_p" and bool(value) for name, value in arguments)
    return True


def tensor_meta(tensor: torch.Tensor, target: str) -> TensorMeta:
    """Shape, stride, dtype and place of a tensor.

    UsageError for nested ones, which only observed modules show: their sizes are no numbers.
    """
    if tensor.is_nested:
        raise UsageError(
            "no plan can be made for modules that compute with nested (jagged) tensors: plan the script without them"
        )
    device = tensor.fake_device.type if isinstance(tensor, FakeTensor) else tensor.device.type
    stride = tuple(map(int, tensor.stride())) if tensor.layout is torch.strided else ()
    place = "device" if device == target else "cpu"
    return TensorMeta(tuple(map(int, tensor.shape)), stride, _dtype_name(tensor.dtype), place)


def scalar_arguments(func: Any, args: Any, kwargs: Any) -> tuple[tuple[str, Scalar], ...]:
    """Non-tensor arguments by schema name, defaults left out."""
    schema = getattr(func, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    found: list[tuple[str, Scalar]] = []
    for position, value in enumerate(args):
        scalar = _scalar(value)
        if scalar is not None:
            found.append((names[position] if position < len(names) else str(position), scalar))
    for name, value in kwargs.items():
        scalar = _scalar(value)
        if scalar is not None:
            found.append((name, scalar))
    share = share_of(func, args) if schema is None else None
    return (*found, (COMPUTED, share)) if share is not None else tuple(found)


@per_operator
def is_attention(func: Any) -> bool:
    """Its kernels may be those of another FlashAttention: the same call has not always the same signature."""
    return operator_name(func).startswith(_FLASH_PREFIXES)


def _implementation(func: Any, args: Any) -> tuple[tuple[str, Scalar], ...]:
    """Whose FlashAttention runs, if it is not PyTorch's own; flexible attention can be told to run version 4."""
    if not is_attention(func):
        return ()
    if any(isinstance(options, dict) and options.get("BACKEND") == "FLASH" for options in args):
        return (("implementation", "FA4"),)
    active = None if operator_name(func) in _FLEXIBLE else current_flash_attention_impl()
    return () if active is None else (("implementation", active),)


def _scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return _dtype_name(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (bool, int, float)) for v in value):
        return tuple(value)
    return None


class SignatureTable:
    """The distinct signatures of a trace, in order of appearance."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.distinct: DistinctValues[Signature] = DistinctValues()
        self._wrapped: dict[tuple[int, int], int] = {}

    def add(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """The index of the signature of one call."""
        arguments = (*scalar_arguments(func, args, kwargs), *_implementation(func, args))
        signature = Signature(
            name=operator_name(func),
            inputs=tuple(tensor_meta(t, self.target) for t in inputs),
            outputs=tuple(tensor_meta(t, self.target) for t in outputs),
            arguments=arguments,
            is_view=launches_nothing(func),
            is_random=is_random(func, arguments),
            mutates=self._mutated_positions(func, args, kwargs),
        )
        return self.distinct.add(signature)

    def add_kernel(self, name: str, tensors: list[torch.Tensor], written: Sequence[int] = (), work: Work = ()) -> int:
        """The index of a kernel that was launched without an operator; its `work` stands in the place of arguments."""
        metas = tuple(tensor_meta(t, self.target) for t in tensors)
        mutates = tuple(i for i in written if i < len(tensors))
        signature = Signature(name=name, inputs=metas, outputs=(), arguments=tuple(work), mutates=mutates)
        return self.distinct.add(signature)

    def wrapped(self, plain: int, wrappers: int) -> int:
        """The index of a signature that is like the one at `plain`, but for its wrappers."""
        known = self._wrapped.get((plain, wrappers))
        if known is None:
            signature = self.finished()[plain]
            known = self._wrapped[plain, wrappers] = self.distinct.add(signature._replace(wrappers=wrappers))
        return known

    @staticmethod
    def _mutated_positions(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Positions in the flattened list of input tensors that are written to."""
        names = mutated_arguments(func)
        if not names:
            return ()
        schema_names = [a.name for a in func._schema.arguments]
        positions: list[int] = []
        count = 0
        for name, value in [*zip(schema_names, args, strict=False), *kwargs.items()]:
            tensors = [
                v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, torch.Tensor)
            ]
            if name in names:
                positions += range(count, count + len(tensors))
            count += len(tensors)
        return tuple(positions)

    def finished(self) -> tuple[Signature, ...]:
        """All signatures."""
        return tuple(self.distinct.index)
