"""cuDNN's RNNs: products of all steps, and of each step, with measured calls beside them."""

from __future__ import annotations

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.recurrent import Recurrent
from autosac.estimator.tiled import TiledMatmul
from autosac.estimator.work import Matmul
from autosac.trace import Signature, TensorMeta
from benchmarks.step_kinds.evidence import load

H100 = load_hardware("h100-sxm-80gb")


def _ms(signature: Signature) -> float:
    (answer,) = Recurrent(H100).estimate([signature])
    assert answer is not None
    return answer.ms


def _rnn(x: TensorMeta, name: str = "aten._cudnn_rnn.default", **changes: object) -> Signature:
    arguments = {"mode": 1, "hidden_size": 512, "proj_size": 0, "num_layers": 1, "bidirectional": False, **changes}
    return Signature(name, (x,), (), tuple(arguments.items()))  # type: ignore[arg-type]


def test_the_step_that_was_measured() -> None:
    """The LSTM of the measured language model: within 6 % of its forward and of its backward."""
    measured = [kind for kind in load() if "_cudnn_rnn" in kind.signature.name]
    assert len(measured) == 2
    for kind in measured:
        assert _ms(kind.signature) * 1e3 == pytest.approx(kind.us, rel=0.06)


def test_a_plain_rnn_by_hand() -> None:
    """Ten steps of a batch of 16, width 256 to 512: one product of 160 rows, ten of 16 rows with a kernel each."""
    x = TensorMeta((10, 16, 256), (4096, 256, 1), "float32", "device")
    products = TiledMatmul(H100)
    inputs = products.milliseconds(Matmul(1, 160, 512, 256, "float32", False, True), "float32")
    hidden = products.milliseconds(Matmul(1, 16, 512, 512, "float32", False, True), "float32")
    one = inputs + 10 * (hidden + H100.kernel_us * 1e-3)
    assert _ms(_rnn(x)) == pytest.approx(one)
    assert _ms(_rnn(x, bidirectional=True)) == pytest.approx(2 * one)


def test_packed_sequences_have_the_rows_that_there_are() -> None:
    """Steps of 3, 2 and 1 sequences are six rows in three steps of two."""
    packed = TensorMeta((6, 256), (256, 1), "float32", "device")
    padded = TensorMeta((3, 2, 256), (512, 256, 1), "float32", "device")
    assert _ms(_rnn(packed, batch_sizes=(3, 2, 1))) == pytest.approx(_ms(_rnn(padded)))


def test_weights_without_gradients_cost_nothing() -> None:
    """A frozen RNN's backward is that of its input alone."""
    x = TensorMeta((10, 16, 512), (8192, 512, 1), "float32", "device")
    name = "aten._cudnn_rnn_backward.default"
    both = _ms(_rnn(x, name, output_mask=(True, True, False, True)))
    alone = _ms(_rnn(x, name, output_mask=(True, True, False, False)))
    weights = TiledMatmul(H100).milliseconds(Matmul(1, 512, 512, 160, "float32", True, False), "float32")
    assert both - alone == pytest.approx(2 * weights)


def test_others_are_left_alone() -> None:
    """Only cuDNN's two operators."""
    assert Recurrent(H100).estimate([Signature("aten.lstm_cell.default", (), ())]) == [None]
