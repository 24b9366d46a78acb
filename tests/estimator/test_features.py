"""What the learned models see, column by column, from sizes whose shares and waves can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from autosac.estimator.features import (
    Rates,
    attention_baseline_ms,
    attention_features,
    gemm_baseline_ms,
    gemm_features,
)


def test_columns_of_a_product() -> None:
    """[256, 64] x [64, 128] of two-byte elements on four processors: 1 s of arithmetic, 2 s of memory, twice the L2."""
    moved = 2 * (256 * 64 + 64 * 128) + 2 * 256 * 128
    rates = Rates(sm_count=4, flops=2.0 * 256 * 128 * 64, bandwidth=moved / 2, l2_bytes=moved / 2)
    m, n, k = (np.array([float(size)]) for size in (256, 128, 64))
    assert gemm_baseline_ms(m, n, k, 2.0, rates) == pytest.approx([2000.002])
    sizes = np.log((256, 128, 64, 256 * 128, 256 * 64, 128 * 64, 2, 2))
    filled = np.log((1 / 4, 1 / 4, 1 / 2, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 1, 1, 1, 1 / 8))
    waves = (1, 1 / 4, 1 / 2, 1 / 2, 2)
    best = (2, np.log(1 / 2))  # 128 x 128: the most of what is shared out among large tiles
    times = np.log(
        (1 / 2, 1, 2)
    )  # arithmetic in memory times: all of it, of the filled part, the longer one in seconds
    expected = [*sizes, *filled, *waves, *best, *times, np.log(2), 64, 4, 2]
    assert gemm_features(m, n, k, 2.0, rates) == pytest.approx(np.array([expected]))


def test_products_larger_than_measured_have_the_features_of_the_largest() -> None:
    """Beyond 32768 rows and 65536 columns efficiency stays, the baseline grows."""
    rates = Rates(sm_count=132, flops=1e15, bandwidth=3e12, l2_bytes=5e7)
    m, n, k = np.array([32768.0, 65536.0]), np.array([65536.0, 131072.0]), np.array([65536.0, 131072.0])
    largest, larger = gemm_features(m, n, k, 2.0, rates)
    assert larger == pytest.approx(largest)
    baseline = gemm_baseline_ms(m, n, k, 2.0, rates) - 0.002
    assert baseline[1] == pytest.approx(8 * baseline[0])


def test_columns_of_attention() -> None:
    """Two batches of four heads, two of keys, 192 and 256 causal queries of 64 on 32 processors: half a wave of tiles."""
    shape = np.array([[2.0, 4, 2, 192, 512, 64, 1], [2, 4, 2, 256, 512, 64, 0]])
    flops = (4 * 2 * 4 * 192 * 512 * 64 / 2, 4 * 2 * 4 * 256 * 512 * 64)
    moved = (2 * 2 * 64 * (2 * 4 * 192 + 2 * 2 * 512), 2 * 2 * 64 * (2 * 4 * 256 + 2 * 2 * 512))
    rates = Rates(sm_count=32, flops=flops[0] / 2, bandwidth=float(moved[0]), l2_bytes=2 * 2 * 512 * 64 * 4 / 8)
    assert attention_baseline_ms(shape, rates) == pytest.approx([2000.002, 2000 * flops[1] / flops[0] + 0.002])

    def expected(query: int, causal: int, filled: float, flops: float, moved: float) -> list[float]:
        sizes = np.log((2, 4, 2, query, 512, 8, 4))
        waves = (1 / 2, np.log(1 / 2), np.log(1 / 2), np.log(filled), 0)
        times = np.log((flops / rates.flops, moved / rates.bandwidth, flops / moved))
        return [*sizes, 64, causal, *waves, *times, np.log(8), np.log(8 * query)]

    first = expected(192, 1, 0.75, flops[0], moved[0])
    assert first[14:16] == pytest.approx([np.log(2), 0])
    rows = [first, expected(256, 0, 1, flops[1], moved[1])]
    assert attention_features(shape, rates) == pytest.approx(np.array(rows))


@pytest.mark.parametrize(("length", "tiles"), [(1, 1), (128, 1), (129, 2), (256, 2), (257, 3)])
def test_attention_works_in_tiles_of_128(length: int, tiles: int) -> None:
    """Of queries and of keys; a tile that begins counts whole."""
    rates = Rates(sm_count=32, flops=1e15, bandwidth=3e12, l2_bytes=5e7)
    (row,) = attention_features(np.array([[2.0, 4, 2, length, length, 64, 0]]), rates)
    filled = np.log(length / (tiles * 128))
    assert row[9:14] == pytest.approx([8 * tiles / 32, *[np.log(tiles / 4)] * 2, filled, filled])
