"""The order in which layouts are taken."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autosac.configurations.running.order import preferred, put_off
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


@pytest.mark.parametrize(
    "setting", ["compile", "async_tensor", "float8", "cpu_offload", "activation_offload", "chunk_loss"]
)
def test_of_equally_good_layouts_the_plain_one_is_preferred(setting: str) -> None:
    """A setting that changes nothing is not recommended; one degree more costs more than a setting."""
    plain = Layout(gpu="any")
    assert preferred(plain) < preferred(replace(plain, **{setting: True})) < preferred(replace(plain, tensor=2))
    assert preferred(plain) < preferred(replace(plain, optimizer="foreach"))
