"""Attention's times on Hopper beside what they were fitted to."""

from __future__ import annotations

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.attention_times import IN_STEPS, kernels_of
from benchmarks.hopper_attention import fit, prices_us, rows

KERNELS = ("cudnn forward", "cudnn backward", "flash forward", "flash backward")


@pytest.mark.parametrize("kernel", KERNELS)
def test_eighteen_sizes_of_each_kernel_are_priced_as_they_were_measured(kernel: str) -> None:
    """Within 7 % in the mean, in bursts; a causal mask with four heads of 8,192 positions takes more than half of the time."""
    fitted = [row for row in rows() if row.kernel == kernel and row.fitted]
    later = IN_STEPS if kernel.startswith("flash") else 1.0
    prices = prices_us(fitted)
    errors = [abs(us / later / row.measured_us - 1) for row, us in zip(fitted, prices, strict=True)]
    assert len(errors) == 18 and sum(errors) / 18 < 0.07
    whole, masked = (prices[[r.name for r in fitted].index(f"1 x 4 x 1 x 8192 x 128{end}")] for end in ("", ", causal"))
    assert masked > 0.7 * whole


def test_the_fit_gives_the_shipped_times() -> None:
    """Of cuDNN's forward, but for its start, which is that of steps; its block trades against the start."""
    kernels = kernels_of(load_hardware("h200-sxm-141gb"), "cudnn")
    assert kernels is not None
    found = fit(list(rows()), "cudnn forward")
    assert found.tiles == pytest.approx(kernels.forward.tiles, rel=0.02)
    assert found.block == pytest.approx(kernels.forward.block, abs=0.3)
