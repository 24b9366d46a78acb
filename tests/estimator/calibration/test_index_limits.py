"""Indices in calls that are made from signatures: all that the operator allows, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosac.estimator.calibration.calls import build_call

MANY = 4000


@pytest.mark.parametrize(
    ("name", "shapes", "position", "limit", "arguments"),
    [
        ("embedding.default", [(5, 2), MANY], 1, 5, {}),
        (
            "embedding_dense_backward.default",
            [(MANY, 2), MANY],
            1,
            7,
            {"num_weights": 7, "padding_idx": -1, "scale_grad_by_freq": False},
        ),
        ("nll_loss_forward.default", [(MANY, 6), MANY], 1, 6, {"reduction": 1, "ignore_index": -100}),
        ("gather.default", [(3, MANY), (2, MANY)], 1, 3, {"dim": 0}),
        ("gather.default", [(2, 9), (2, MANY)], 1, 9, {"dim": 1}),
        ("index_select.default", [(4, 8), MANY], 1, 8, {"dim": 1}),
        ("index_add.default", [(6, 2), MANY, (MANY, 2)], 1, 6, {"dim": 0}),
        ("index.Tensor", [(9, 4), MANY], 1, 4, {}),
        ("eq.Scalar", [MANY], 0, 1, {"other": 1}),
    ],
)
def test_all_indices_that_an_operator_allows(
    op: Callable[..., Any],
    meta: Callable[..., Any],
    name: str,
    shapes: list[Any],
    position: int,
    limit: int,
    arguments: dict[str, Any],
) -> None:
    """As many as there are rows, classes or places along the dimension; of an index of any dimension those of the shortest; 0
    where nothing is indexed.
    """
    inputs = [
        meta((shape,) if isinstance(shape, int) else shape, "int64" if i == position else "float32")
        for i, shape in enumerate(shapes)
    ]
    call = build_call(op(name, inputs, [inputs[0]], **arguments), torch.device("cpu"))
    found = [t for t in _tensors((call.args, call.kwargs)) if t.dtype == torch.int64]
    assert len(found) == 1 and found[0].unique().tolist() == list(range(limit))


def _tensors(value: Any) -> list[torch.Tensor]:
    """In arguments, and in lists of them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []
