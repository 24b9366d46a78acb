"""Hand-made signatures for the calibration's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autosac.trace import Signature, TensorMeta


def _meta(shape: Sequence[int], dtype: str = "float32", stride: Sequence[int] | None = None) -> TensorMeta:
    """A tensor, contiguous if no stride is given."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorMeta(tuple(shape), tuple(stride) if stride is not None else tuple(reversed(strides)), dtype, "device")


@pytest.fixture(scope="session")
def meta() -> Callable[..., TensorMeta]:
    """Makes the description of a tensor."""
    return _meta


@pytest.fixture(scope="session")
def op() -> Callable[..., Signature]:
    """Makes a signature: name, input tensors, output tensors, other arguments by name."""

    def make(name: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta], **arguments: Any) -> Signature:
        return Signature(f"aten.{name}", tuple(inputs), tuple(outputs), tuple(arguments.items()))

    return make
