"""Shapes that PyTorch has not, against what the operators really return on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosac.capture.device import shapes

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)


def _random(*sizes: int) -> torch.Tensor:
    return torch.rand(*sizes, generator=GENERATOR) + 0.5


ONE, ZERO = torch.tensor([0.5]), torch.tensor([0.0])
MASK = torch.tensor([[True, False, False, True]] * 3)
CASES: dict[str, tuple[Any, ...]] = {
    "_logcumsumexp": (_random(3, 4), 1),
    "multi_margin_loss_backward": (_random(1)[0], _random(3, 4), torch.tensor([0, 1, 2]), 1, 1.0),
    "multilabel_margin_loss_backward": (
        _random(1)[0],
        _random(3, 4),
        torch.tensor([[0, 1, -1, -1]] * 3),
        1,
        torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 3),
    ),
    "fractional_max_pool3d_backward": (
        _random(2, 3, 2, 2, 2),
        _random(2, 3, 5, 6, 7),
        [2, 2, 2],
        [2, 2, 2],
        torch.zeros(2, 3, 2, 2, 2, dtype=torch.int64),
    ),
    "batch_norm_update_stats": (_random(3, 4), _random(4), _random(4), 0.1),
    "_standard_gamma_grad": (_random(3, 4), _random(3, 4)),
    "_dirichlet_grad": (_random(3, 4), _random(3, 4), _random(3, 4)),
    "_sample_dirichlet": (_random(3, 4),),
    "binomial": (torch.full((3, 4), 5.0), _random(3, 4) / 2),
    "_aminmax": (_random(3, 4),),
    "_masked_softmax": (_random(3, 4), MASK, 1, 2),
    "_masked_softmax_backward": (_random(3, 4), _random(3, 4), MASK, 1),
    "fake_quantize_per_tensor_affine_cachemask": (_random(3, 4), 0.1, 0, -128, 127),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": (
        _random(3, 4),
        ONE,
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([1]),
        -128,
        127,
    ),
    "fake_quantize_per_channel_affine_cachemask": (
        _random(3, 4),
        _random(4),
        torch.zeros(4, dtype=torch.int32),
        1,
        -128,
        127,
    ),
    "_fake_quantize_learnable_per_tensor_affine": (_random(3, 4), ONE, ZERO, -128, 127),
    "_fake_quantize_learnable_per_tensor_affine_backward": (_random(3, 4), _random(3, 4), ONE, ZERO, -128, 127),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Any:
    """The shapes, known to this process."""
    library = torch.library.Library("aten", "IMPL")
    shapes.install(library)
    return library


def _metadata(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    found = result if isinstance(result, (tuple, list)) else [result]
    return [(tensor.shape, tensor.dtype) for tensor in found]


@pytest.mark.parametrize("name", CASES)
def test_a_shape_is_that_of_the_real_result(name: str) -> None:
    """Sizes and types on the meta device are those of the operator on the CPU."""
    if not hasattr(aten, name):
        pytest.skip("this PyTorch has no such operator")
    operator, arguments = getattr(aten, name), CASES[name]
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    found = operator(*on_meta)
    assert all(x.is_meta for x in (found if isinstance(found, (tuple, list)) else [found]))
    assert _metadata(found) == _metadata(operator(*arguments))


def test_the_gradient_of_ctc() -> None:
    """That of the log probabilities, with their sizes."""
    probabilities, targets = _random(6, 2, 5).log_softmax(-1), torch.tensor([[1, 2, 3], [2, 3, 4]])
    lengths = [6, 6], [3, 3]
    loss, alpha = aten._ctc_loss(probabilities, targets, *lengths)
    arguments = [torch.ones(2), probabilities, targets, *lengths, loss, alpha, 0]
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    assert _metadata(aten._ctc_loss_backward(*on_meta)) == _metadata(aten._ctc_loss_backward(*arguments))


@pytest.mark.parametrize(("dtype", "sums"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_statistics_of_synchronised_batch_norm(dtype: torch.dtype, sums: torch.dtype) -> None:
    """CUDA alone has these operators: statistics in the type of the sums, one for each channel; results like their input."""
    data = torch.empty(2, 3, 4, 4, dtype=dtype, device="meta")
    statistics = torch.empty(3, dtype=sums, device="meta")
    channels = [(torch.Size([3]), sums)] * 2
    assert _metadata(aten.batch_norm_stats(data, 1e-5)) == channels
    gathered = aten.batch_norm_gather_stats(data, statistics, statistics, None, None, 0.1, 1e-5, 8)
    assert _metadata(gathered) == channels
    assert _metadata(aten.batch_norm_elemt(data, None, None, statistics, statistics, 1e-5)) == [(data.shape, dtype)]
    reduced = aten.batch_norm_backward_reduce(data, data, statistics, statistics, None, True, True, False)
    assert _metadata(reduced[:3]) == [*channels, (torch.Size([3]), dtype)] and reduced[3] is None
    weight = torch.empty(3, dtype=torch.float32, device="meta")
    reduced = aten.batch_norm_backward_reduce(data, data, statistics, statistics, weight, False, False, True)
    assert reduced[:3] == (None, None, None) and _metadata(reduced[3:]) == [(torch.Size([3]), torch.float32)]


def test_fused_cells_keep_what_their_backward_reads() -> None:
    """A GRU keeps five values for each hidden one; its gates' gradients are three, and so are its biases'."""
    gates, hidden = torch.empty(2, 12, device="meta"), torch.empty(2, 4, device="meta")
    result, workspace = aten._thnn_fused_gru_cell(gates, gates, hidden)
    assert (result.shape, workspace.shape) == ((2, 4), (2, 20))
    found = aten._thnn_fused_gru_cell_backward(hidden, workspace, True)
    assert [tuple(x.shape) for x in found] == [(2, 12), (2, 12), (2, 4), (12,), (12,)]
    assert aten._thnn_fused_gru_cell_backward(hidden, workspace, False)[3:] == (None, None)


def test_statistics_of_several_ranks() -> None:
    """Mean and inverse deviation of every channel, in float32 also of 16 bits."""
    x, found = torch.empty(3, 4, 5, device="meta", dtype=torch.bfloat16), torch.empty(2, 4, device="meta")
    one = aten.batch_norm_gather_stats(x, found, found, None, None, 0.1, 1e-5, 15)
    many = aten.batch_norm_gather_stats_with_counts(
        x, found, found, None, None, 0.1, 1e-5, torch.empty(2, device="meta")
    )
    assert [(tuple(t.shape), t.dtype) for t in (*one, *many)] == [((4,), torch.float32)] * 4
