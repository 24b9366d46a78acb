"""What cuDNN's RNNs allocate, beside sizes that real GPUs have told."""

from __future__ import annotations

import torch

from autosac.capture.device.recurrent_shapes import MODES, SHAPES, Geometry
from autosac.capture.jobs.eager import EagerRequest, capture_eager


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


def test_the_step_of_a_job_has_one_call_of_cudnn() -> None:
    """An LSTM without batch first, 5 x 3 x 8 to width 16: output, states and reserve forward, one flat gradient backward."""

    def make_step(device: torch.device) -> object:
        model = torch.nn.LSTM(8, 16, device=device)
        x = torch.randn(5, 3, 8, device=device)

        def step() -> None:
            model(x)[0].sum().backward()

        return model, step

    trace = capture_eager(make_step, EagerRequest())
    names = [signature.name for signature in trace.signatures]
    assert not [name for name in names if "thnn" in name or name == "aten.mm.default"]
    signature = trace.signatures[names.index("aten._cudnn_rnn.default")]
    assert [meta.shape for meta in signature.outputs] == [(5, 3, 16), (1, 3, 16), (1, 3, 16), (4800,), (1664,)]
    gradients = [storage for storage in trace.storages if storage.op == "aten._cudnn_rnn_backward.default"]
    assert {storage.nbytes for storage in gradients} == {5 * 3 * 8 * 4, 3 * 16 * 4, 1664 * 4}
