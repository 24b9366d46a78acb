"""The order in which layouts are taken."""

from __future__ import annotations

import math

import pytest

from autosac.configurations.running.order import put_off
from autosac.configurations.space.layout import Layout


@pytest.mark.parametrize(("likely", "found"), [(80.0, 100.0), (120.0, 120.0), (200.0, 150.0), (math.inf, 150.0)])
def test_likely_steps_put_off(likely: float, found: float) -> None:
    """By what the step may well be, if that is above the bound, and by a half at the most."""
    assert put_off(Layout(gpu="any"), 100.0, likely) == found


def test_what_takes_long_is_put_off() -> None:
    """2 % for each doubling of what is captured: four stages of eight microbatches each are five of them."""
    pipeline = Layout(gpu="any", pipeline=4, global_batch=8)
    assert put_off(pipeline, 100.0, 100.0) == pytest.approx(110.0)
    assert put_off(Layout(gpu="any", global_batch=8), 100.0, 100.0) == 100.0
