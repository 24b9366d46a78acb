"""The recomputation of a unit computes float32 as its forward did, and leaves PyTorch's settings as it found them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from autosac.integrations.recompute import flags

Setting = tuple[str, str]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    for setting in (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
        torch._C._set_fp32_precision_setter(*setting, "none")


def _new() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _old() -> None:
    torch.set_float32_matmul_precision("high")


def _everywhere() -> None:
    torch.backends.fp32_precision = "tf32"


@pytest.mark.parametrize("change", [_new, _old, _everywhere])
def test_float32_is_computed_as_in_the_forward(change: Callable[[], None]) -> None:
    """Set by the older or the newer interface before the backward: the recomputation does not see it, what follows does."""
    before = flags.present()
    change()
    after = flags.present()
    with flags.restored(before):
        assert torch.backends.cuda.matmul.fp32_precision in ("none", "ieee"), "which are the same"
    assert flags.present() == after != before


def test_what_is_taken_over_is_taken_over_again() -> None:
    """After a recomputation a setting for everything reaches matrix products, as it would without a plan."""
    before = flags.present()
    _everywhere()
    with flags.restored(before):
        pass
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
