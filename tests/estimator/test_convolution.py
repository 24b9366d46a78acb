"""Convolutions: layout conversions and products, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.convolution import Convolutions
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
STREAM = 3350e3 * 0.88  # bytes a microsecond


def _us(signature: Signature, gpu: str = "h100-sxm-80gb", *, tf32: bool = True) -> float:
    (answer,) = Convolutions(load_hardware(gpu), tf32=tf32).estimate([signature])
    assert answer is not None
    return answer.ms * 1e3


def _last(meta: TensorMeta) -> TensorMeta:
    """The same images with channels last."""
    _, c, h, w = meta.shape
    return meta._replace(stride=(c * h * w, 1, c * w, c))


def _conv(x: TensorMeta, w: TensorMeta, y: TensorMeta, groups: int = 1) -> Signature:
    return Signature("aten.convolution.default", (x, w), (y,), (("groups", groups),))


def test_channels_last_needs_no_conversion(meta: Meta) -> None:
    """64 images of 256 channels, 3 x 3: the product at 55 % of the peak; contiguous ones pay for three transposes more."""
    x, w = meta((64, 256, 56, 56)), meta((256, 256, 3, 3))
    product = 3 + 2 * 64 * 256 * 56**2 * 256 * 9 / (989e6 * 0.55)
    assert _us(_conv(_last(x), w, _last(x))) == pytest.approx(product)
    images = 2 * 2 * 64 * 256 * 56**2 / STREAM
    assert _us(_conv(x, w, x)) == pytest.approx(product + 2 * images + 3)


def test_a_backward_is_its_parts(meta: Meta) -> None:
    """The gradients of input and weight are a forward each; what is not wanted is free."""
    x, w = _last(meta((64, 256, 56, 56))), meta((256, 256, 3, 3))

    def backward(*mask: bool) -> float:
        return _us(Signature("aten.convolution_backward.default", (x, x, w), (x, w), (("output_mask", mask),)))

    assert backward(True, True, True) == pytest.approx(2 * _us(_conv(x, w, x)))
    assert backward(False, True, False) == pytest.approx(_us(_conv(x, w, x)))


def test_three_channels_are_padded_and_slow(meta: Meta) -> None:
    """A patch embedding multiplies eight channels at 360 operations a cycle and processor; its three are transposed as 32."""
    x, w, y = meta((1, 3, 1008, 1008)), meta((1024, 3, 14, 14)), meta((1, 1024, 72, 72))
    product = 3 + 2 * 1024 * 72**2 * 8 * 196 / (360 * 132 * 1830)
    conversions = (2 * 2 * 1008**2 * 32 + 2 * 2 * 1024 * 196 * 32 + 2 * 2 * 1024 * 72**2) / STREAM
    assert _us(_conv(x, w, y)) == pytest.approx(product + conversions)


@pytest.mark.parametrize(
    ("dtype", "last", "share"), [("float16", True, 0.23), ("float32", True, 0.0127), ("float32", False, 0.06)]
)
def test_depthwise_by_type_and_layout(meta: Meta, dtype: str, last: bool, share: float) -> None:
    """7 x 7 over 1,408 channels by themselves, a share of the float32 peak."""
    x, w = meta((64, 1408, 14, 14), dtype), meta((1408, 1, 7, 7), dtype)
    x = _last(x) if last else x
    taps = 49 + 27 if dtype == "float16" else 49  # a position has costs of its own
    assert _us(_conv(x, w, x, 1408)) == pytest.approx(3 + 2 * 64 * 1408 * 14**2 * taps / (67e6 * share))


def test_float32_without_tensor_cores(meta: Meta) -> None:
    """70 % of the plain rate where TF32 is not allowed, in any layout."""
    x, w = meta((64, 256, 56, 56), "float32"), meta((256, 256, 3, 3), "float32")
    assert _us(_conv(x, w, x), tf32=False) == pytest.approx(3 + 2 * 64 * 256 * 56**2 * 256 * 9 / (67e6 * 0.70))


def test_a_cpu_and_other_operators_are_not_answered(meta: Meta) -> None:
    """Only convolutions on a device."""
    x = meta((64, 64))
    host = meta((1, 3, 8, 8), "float32", "cpu")
    signatures = [Signature("aten.mm.default", (x, x), (x,)), _conv(host, meta((4, 3, 3, 3), "float32", "cpu"), host)]
    assert Convolutions(load_hardware("h100-sxm-80gb")).estimate(signatures) == [None, None]
