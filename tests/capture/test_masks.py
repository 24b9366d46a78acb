"""What masks of flexible attention leave to compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autosac.capture.device.masks import share_of

aten = torch.ops.aten
TILES = 16
LENGTH = 128 * TILES
CAUSAL = TILES * (TILES + 1) // 2  # tiles of keys that a causal mask needs


def share(mask: Callable[..., torch.Tensor], *read: torch.Tensor, operator: str = "flex_attention") -> float | None:
    """Of a call with this mask, which reads these tensors, by its graph."""
    numbers = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    graph = make_fx(mask)(*numbers, *read)
    return share_of(operator, (None, (LENGTH, LENGTH, None, graph), 0.125))


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        (lambda b, h, q, k: (q >= k) & (q - k < 128), 2 * TILES - 1),
        (lambda b, h, q, k: (q >= k) & (q - k < 512), 5 * TILES - 10),
        (lambda b, h, q, k: q >= 0, TILES * TILES),
        (lambda b, h, q, k: q // 1024 == k // 1024, TILES * 8),
        (lambda b, h, q, k: (q >= k) & ((q - k < 128) | (k < 4)), 3 * TILES - 3),
    ],
)
def test_tiles_that_a_mask_needs(mask: Callable[..., torch.Tensor], tiles: int) -> None:
    """Windows, no mask at all, blocks, a window with a sink: counted by hand, and a causal mask has exactly a half."""
    assert share(mask) == 0.5 * tiles / CAUSAL


def test_where_a_mask_counts_as_causal() -> None:
    """A causal mask; one whose tensors, zeros here, would leave queries without keys; other operators."""
    assert share(lambda b, h, q, k: q >= k) is None
    assert share(lambda b, h, q, k, lengths: k < aten.index(lengths, [b]), torch.ones(2, dtype=torch.int64)) is None
    assert share(lambda b, h, q, k: q - k < 128, operator="aten.mm.default") is None


def test_documents_are_one() -> None:
    """A window inside of documents: the window counts."""

    def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (q - k < 128) & (aten.index(ids, [b, q]) == aten.index(ids, [b, k]))

    assert share(mask, torch.arange(LENGTH).repeat(2, 1)) == 0.5 * (2 * TILES - 1) / CAUSAL
