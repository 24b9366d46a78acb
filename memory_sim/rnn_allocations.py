"""What PyTorch allocates within a call of cuDNN's RNNs (``cudnn/RNN.cpp``).

Inputs that do not lie with steps first are copied, and so is the gradient of the output. The backward makes zeros for the
gradients of the last states where nobody has used these.

cuDNN's workspace is not modelled, because no source says how much a current cuDNN asks for. (On a P100 of 2017 it was
17,730,560 bytes for an LSTM of four layers, width 320: github.com/pytorch/pytorch/issues/2895, a third more than its
weights.)
"""

from __future__ import annotations

from autosac.memory_sim.tensor_sizes import dense_bytes, is_contiguous, transposed
from autosac.trace import Signature, TensorMeta

_LSTM = 2


def rnn_forward(signature: Signature) -> tuple[int, ...]:
    """Inputs (input, ...)."""
    return _copied(signature, signature.inputs[0])


def rnn_backward(signature: Signature) -> tuple[int, ...]:
    """Inputs (input, weights, buffer, hx, cx or none, output, those gradients that there are, dropout's state, reserve)."""
    arguments = dict(signature.arguments)
    layers = int(arguments["num_layers"]) * (2 if arguments.get("bidirectional") else 1)  # type: ignore[arg-type]
    position = 2 + int(arguments["weight_stride0"]) * layers  # type: ignore[arg-type]
    count = 2 if arguments["mode"] == _LSTM else 1
    states = signature.inputs[position : position + count]
    output, *rest = signature.inputs[position + count :]
    given = [meta for meta in rest if meta.dtype != "uint8"]
    of_output = given[0] if given and given[0].shape == output.shape else None
    missing = states[len(given) - (of_output is not None) :]
    copies = _copied(signature, signature.inputs[0])
    copies += (dense_bytes(output),) if of_output is None else _copied(signature, of_output)
    return (*map(dense_bytes, missing), *copies)


def _copied(signature: Signature, meta: TensorMeta) -> tuple[int, ...]:
    """The copy of a tensor that does not lie as cuDNN takes it."""
    if dict(signature.arguments).get("batch_first") and len(meta.shape) == 3:
        meta = transposed(meta, 0, 1)
    return () if is_contiguous(meta) else (dense_bytes(meta),)
