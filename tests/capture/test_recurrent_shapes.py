"""What cuDNN's RNNs allocate, beside sizes that real GPUs have told."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autosac.capture.device.recurrent_shapes import MODES, SHAPES, Geometry


def test_reserves_that_are_known() -> None:
    """H100: two layers, 128 steps, batch 64, width 1024, dropout; P100: four layers, width 320, 25,000 rows, no dropout."""
    lstm = Geometry(MODES["lstm"], 1024, 1024, 0, 2, bidirectional=False)
    assert lstm.reserve_bytes(128, 64, 0.2, 4) == 370_147_584
    for mode, expected in (("lstm", 736_000_000), ("gru", 864_000_000)):
        assert Geometry(MODES[mode], 123, 320, 0, 4, bidirectional=False).reserve_bytes(250, 100, 0.0, 4) == expected


def test_the_flat_buffer_has_all_weights_and_room_for_two_biases() -> None:
    """16,793,600 elements on an H100; without biases in the module, cuDNN has room for them all the same."""
    lstm = Geometry(MODES["lstm"], 1024, 1024, 0, 2, bidirectional=False)
    assert lstm.weights == 16_793_600
    places = lstm.places(has_biases=True)
    assert [size for _, size in places] == [4 * 2**20, 4 * 2**20, 4096, 4096] * 2
    assert places[0][0] == 0 and places[4][0] == 8 * 2**20 and places[2][0] == 16 * 2**20
    assert [size for _, size in lstm.places(has_biases=False)] == [4 * 2**20] * 4


def test_projections_and_directions_are_counted() -> None:
    """PyTorch's own module has as many weights: width 32 to 64, projected to 16, two layers, both directions."""
    module = torch.nn.LSTM(32, 64, 2, bidirectional=True, proj_size=16)
    geometry = Geometry(MODES["lstm"], 32, 64, 16, 2, bidirectional=True)
    sizes = [size for _, size in geometry.places(has_biases=True)]
    assert sizes == [weight.numel() for weight in module.parameters()]
    assert geometry.weights == sum(sizes)


def test_the_state_of_dropout() -> None:
    """6,488,064 bytes on an H100; none without dropout."""
    assert SHAPES["_cudnn_init_dropout_state"](0.2, True, 0).numel() == 6_488_064
    assert SHAPES["_cudnn_init_dropout_state"](0.0, True, 0).numel() == 0


@given(
    st.sampled_from(sorted(MODES)),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.booleans(),
)
def test_weights_fill_the_flat_buffer(mode: str, width: int, hidden: int, layers: int, bidirectional: bool) -> None:
    """Each begins where another one ends, all matrices before all biases, each as large as the weight of PyTorch's module."""
    geometry = Geometry(MODES[mode], width, hidden, 0, layers, bidirectional=bidirectional)
    places = geometry.places(has_biases=True)
    ends = [0, *(offset + size for offset, size in sorted(places))]
    assert [offset for offset, _ in sorted(places)] == ends[:-1] and ends[-1] == geometry.weights
    kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    module = kinds.get(mode, torch.nn.RNN)(width, hidden, layers, bidirectional=bidirectional)
    weights = list(module.parameters())
    assert [size for _, size in places] == [weight.numel() for weight in weights]
    matrices = [place for place, weight in zip(places, weights, strict=True) if weight.dim() == 2]
    assert sorted(places)[: len(matrices)] == sorted(matrices)
    assert geometry.places(has_biases=False) == matrices
