"""Convolutions: layout conversions and products, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.convolution import Convolutions
from autosac.estimator.kernels import Kernels, Streams
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
STREAM = 3350e3 * 0.88  # bytes a microsecond


def _us(signature: Signature, gpu: str = "h100-sxm-80gb", *, tf32: bool = True) -> float:
    (answer,) = Convolutions(Streams(load_hardware(gpu)), tf32=tf32).estimate([signature])
    assert answer is not None
    return answer.ms * 1e3


def _last(meta: TensorMeta) -> TensorMeta:
    """The same images with channels last."""
    _, c, h, w = meta.shape
    return meta._replace(stride=(c * h * w, 1, c * w, c))


def _conv(x: TensorMeta, w: TensorMeta, y: TensorMeta, groups: int = 1) -> Signature:
    return Signature("aten.convolution.default", (x, w), (y,), (("groups", groups),))


def _tiles_us(tiles: float, depth: float) -> float:
    """Whole waves of tiles of 128 x 128 on 132 processors, at 60 % of the peak."""
    return math.ceil(tiles / 132) * 2 * 128**2 * depth / (989e6 * 0.60 / 132)


def test_channels_last_needs_no_conversion(meta: Meta) -> None:
    """64 images of 256 channels, 3 x 3: 1,568 x 2 tiles in 24 waves; contiguous ones pay for three transposes more."""
    x, w = meta((64, 256, 56, 56)), meta((256, 256, 3, 3))
    product = 3 + _tiles_us(1568 * 2, 256 * 9)
    assert _us(_conv(_last(x), w, _last(x))) == pytest.approx(product)
    images = 2 * 2 * 64 * 256 * 56**2 / STREAM
    assert _us(_conv(x, w, x)) == pytest.approx(product + 2 * images + 3)


def test_a_backward_is_its_parts(meta: Meta) -> None:
    """The input's gradient is a forward; the weight's is split along positions and has no waves; a bias's is a sum."""
    x, w = _last(meta((64, 256, 56, 56))), meta((256, 256, 3, 3))

    def backward(*mask: bool) -> float:
        return _us(Signature("aten.convolution_backward.default", (x, x, w), (x, w), (("output_mask", mask),)))

    weight = 3 + 2 * 64 * 56**2 * 256 * 256 * 9 / (989e6 * 0.60)
    assert backward(True, False, False) == pytest.approx(_us(_conv(x, w, x)))
    assert backward(False, True, False) == pytest.approx(weight)
    (total,) = Kernels(Streams(load_hardware("h100-sxm-80gb"))).estimate(
        [Signature("aten.sum.dim_IntList", (x,), (meta((256,)),), (("dim", (0, 2, 3)),))]
    )
    assert total is not None
    assert backward(False, True, True) == pytest.approx(weight + total.ms * 1e3, rel=1e-5)


def test_few_channels_fill_whole_tiles(meta: Meta) -> None:
    """32 output channels take as long as 128; a bias of contiguous images is added by 1.5 elements a cycle and processor."""
    x, bias = _last(meta((64, 64, 64, 64))), meta((32,))
    few, many = (_us(_conv(x, meta((n, 64, 3, 3)), _last(meta((64, n, 64, 64))))) for n in (32, 128))
    assert few == pytest.approx(many)
    contiguous, w, y = meta((64, 64, 64, 64)), meta((32, 64, 3, 3)), meta((64, 32, 64, 64))
    plain = _us(_conv(contiguous, w, y))
    added = _us(_conv(contiguous, w, y)._replace(inputs=(contiguous, w, bias)))
    assert added == pytest.approx(plain + 64 * 32 * 64**2 / (1.5 * 132 * 1830))


def test_pytorchs_own_depthwise_kernels(meta: Meta) -> None:
    """3 x 3 in bfloat16: 9 + 11.25 taps a position forward; 9 blocks for each channel and 8 images at once backward."""
    x, w = meta((64, 576, 19, 19)), meta((576, 1, 3, 3))
    position = (9 + 11.25) / (8.63 * 132 * 1830)
    assert _us(_conv(x, w, x, 576)) == pytest.approx(2.6 + 64 * 576 * 361 * position)
    arguments = (("groups", 576), ("stride", (2, 2)), ("output_mask", (True, True, False)))
    y = meta((64, 576, 10, 10))
    backward = _us(Signature("aten.convolution_backward.default", (y, x, w), (x, w), arguments))
    inputs = 1.35 * 64 * 576 * 361 * position
    weights = 576 * 9 / 132 * 64 / 8 * (0.2 + (0.04 + 0.36 / 9) * 4)
    assert backward == pytest.approx(2 * 2.6 + inputs + weights)


def test_three_channels_are_padded_and_slow(meta: Meta) -> None:
    """A patch embedding multiplies eight channels at 360 operations a cycle and processor; its three are transposed as 32."""
    x, w, y = meta((1, 3, 1008, 1008)), meta((1024, 3, 14, 14)), meta((1, 1024, 72, 72))
    product = 3 + 2 * 1024 * 72**2 * 8 * 196 / (360 * 132 * 1830)
    conversions = (2 * 2 * 1008**2 * 32 + 2 * 2 * 1024 * 196 * 32 + 2 * 2 * 1024 * 72**2) / STREAM
    assert _us(_conv(x, w, y)) == pytest.approx(product + conversions)


@pytest.mark.parametrize(
    ("dtype", "last", "share"), [("float16", True, 0.23), ("float16", False, 0.23), ("float32", True, 0.0127)]
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
    assert Convolutions(Streams(load_hardware("h100-sxm-80gb"))).estimate(signatures) == [None, None]
