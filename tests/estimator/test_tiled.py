"""The tile model of float32 products, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.estimator import TiledMatmul, load_hardware
from autosac.trace import Signature

H100 = load_hardware("h100-sxm-80gb")
_PER_PROCESSOR = 67e12 * 0.785 / 132


def _ms(signature: Signature) -> float:
    (answer,) = TiledMatmul(H100).estimate([signature])
    assert answer is not None
    return answer.ms


def _written_ms(elements: int) -> float:
    """Three quarters of writing so many float32 results at 0.88 of 3,350 GB/s."""
    return 0.75 * elements * 4 / (3350e9 * 0.88) * 1e3


def test_whole_waves_run_at_the_rate_inside_a_tile(mm: Callable[..., Signature]) -> None:
    """[12*128, 11*128] has 132 tiles for 132 processors: one wave of 2*128*128*k operations."""
    wave = 2 * 128 * 128 * 8192 / _PER_PROCESSOR * 1e3
    assert _ms(mm(1536, 1408, 8192, "float32")) == pytest.approx(wave + _written_ms(1536 * 1408))


def test_one_tile_too_many_costs_a_wave(mm: Callable[..., Signature]) -> None:
    """400 tiles need four waves;

    Smaller tiles (800 of half the size, 94 % of the rate) need seven half waves: faster.
    """
    tile = 2 * 128 * 128 * 8192 / _PER_PROCESSOR * 1e3
    assert _ms(mm(5120, 1280, 8192, "float32")) == pytest.approx(
        min(4 * tile, 7 * tile / 2 / 0.94) + _written_ms(5120 * 1280)
    )


def test_processors_of_64_lanes_are_fed(mm: Callable[..., Signature]) -> None:
    """An A100's 108 processors reach 95 % of its peak inside a tile: [12*128, 9*128] is one wave."""
    (answer,) = TiledMatmul(load_hardware("a100-sxm-80gb")).estimate([mm(1536, 1152, 8192, "float32")])
    assert answer is not None
    wave = 2 * 128 * 128 * 8192 / (19.5e12 * 0.95 / 108) * 1e3
    assert answer.ms == pytest.approx(wave + 0.75 * 1536 * 1152 * 4 / (2039e9 * 0.88) * 1e3)


@pytest.mark.parametrize("gpu", ["rtx-3090", "l4", "rtx-5090"])
def test_lanes_that_compute_in_integers_too_reach_less(mm: Callable[..., Signature], gpu: str) -> None:
    """One wave of 128 x 128 tiles, two for each processor: 68 % of the peak, or what the profile says."""
    hardware = load_hardware(gpu)
    (answer,) = TiledMatmul(hardware).estimate([mm(128 * hardware.sm_count, 128, 8192, "float32")])
    assert answer is not None
    rate = dict(hardware.peak_tflops)["float32"] * 1e12 * dict(hardware.efficiency).get("matmul_float32", 0.68)
    wave = 2 * 128 * 128 * 8192 * hardware.sm_count / rate * 1e3
    written = 0.75 * 128 * 128 * hardware.sm_count * 4 / (hardware.mem_bandwidth_gbps * 1e9 * 0.88) * 1e3
    assert answer.ms == pytest.approx(wave + written)


@pytest.mark.parametrize(("gpu", "rate"), [("v100-sxm2-32gb", 0.73), ("t4", 0.56)])
def test_bfloat16_without_units_is_converted_float32(mm: Callable[..., Signature], gpu: str, rate: float) -> None:
    """A product in bfloat16 takes that much longer than in float32; where it has units, it is none of the tiles' business."""
    tiles = TiledMatmul(load_hardware(gpu))
    single, half = tiles.estimate([mm(4096, 4096, 4096, "float32"), mm(4096, 4096, 4096, "bfloat16")])
    assert single is not None and half is not None and half.ms == pytest.approx(single.ms / rate)
    assert TiledMatmul(H100).estimate([mm(4096, 4096, 4096, "bfloat16")]) == [None]


def test_few_tiles_are_split_along_k(mm: Callable[..., Signature]) -> None:
    """One tile with k = 2^20 is far faster on 16 processors than on one."""
    alone = 2 * 128 * 128 * 2**20 / _PER_PROCESSOR * 1e3
    assert _ms(mm(128, 128, 2**20, "float32")) < alone / 10


def test_tensor_cores_are_not_its_business(mm: Callable[..., Signature]) -> None:
    """bf16 is never answered, float32 not with TF32."""
    assert TiledMatmul(H100).estimate([mm(64, 64, 64)]) == [None]
    assert TiledMatmul(H100, tf32=True).estimate([mm(64, 64, 64, "float32")]) == [None]


@settings(deadline=None, max_examples=60)
@given(m=st.integers(1, 10**5), n=st.integers(1, 10**4), k=st.integers(1, 10**4))
def test_never_above_the_peak(mm: Callable[..., Signature], m: int, n: int, k: int) -> None:
    """No product is faster than the peak rate allows."""
    assert _ms(mm(m, n, k, "float32")) >= 2 * m * n * k / 67e12 * 1e3
