"""What cuDNN's RNNs allocate: results, the flat buffers of weights and their gradients, the reserve and dropout's state.

A layer's weights, biases and projections are counted by `Geometry`; cuDNN always has room for two biases
(`CUDNN_RNN_DOUBLE_BIAS`).

The reserve is what a training forward keeps for its backward. cuDNN's documentation says only that it depends on the longest
sequence and the batch. In units of steps x batch x width elements it is, for L layers,

    LSTM (5 L + L - 1)    GRU (6 L + L - 1)    tanh, ReLU (L + L - 1)

that is, for a layer the gates and the cell (LSTM), the three gates twice (GRU) or the state, and what goes from layer to
layer; with dropout a bit for each element between layers, and 256 bytes. Known: 370,147,584 bytes for an LSTM of two layers
with dropout, 128 steps, batch 64, width 1024 on an H100 (11 units); 736,000,000 and 864,000,000 bytes for an LSTM and a GRU
of four layers without dropout, width 320, on a P100 (github.com/pytorch/pytorch/issues/2895: 23 and 27 units of 32,000,000
bytes, if it ran 25,000 steps of sequences, which fits both; the batch is not given). Estimated: the plain RNN (that issue's
readings of a whole GPU agree with 7 units for four layers), two directions, projections (the state before its projection is
one more unit), 16 bits (all units in 16 bits), and cuDNN's other algorithms for small widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from autosac.capture.device import device as simulated

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_LSTM, _GRU = MODES["lstm"], MODES["gru"]
_GATES = {_LSTM: 4, _GRU: 3}
_KEPT = {_LSTM: 5, _GRU: 6}  # units that a layer keeps for its backward; 1 for the other two
_DROPOUT_BYTES = 256
# cuRAND's XORWOW generators: 6,488,064 bytes on an H100, which has 132 SMs.
_GENERATORS_OF_SM, _GENERATOR_BYTES = 1024, 48


def per_layer(has_biases: bool, projection: int) -> int:
    """Tensors of weights in a layer (`weight_stride0`)."""
    return (4 if has_biases else 2) + (projection != 0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """An RNN. `projection` 0: none."""

    mode: int
    input_size: int
    hidden_size: int
    projection: int
    num_layers: int
    bidirectional: bool

    @property
    def directions(self) -> int:
        """One or two."""
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """Of one direction."""
        return self.projection or self.hidden_size

    def _layers(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Elements of the matrices of input, hidden state and projection (0: none) of a layer, and of a bias."""
        gates = _GATES.get(self.mode, 1) * self.hidden_size
        for layer in range(self.num_layers):
            width = self.input_size if not layer else self.output_size * self.directions
            for _ in range(self.directions):
                yield (gates * width, gates * self.output_size, self.projection * self.hidden_size), gates

    @property
    def weights(self) -> int:
        """Elements of the flat buffer (`cudnnGetRNNWeightSpaceSize`)."""
        return sum(sum(matrices) + 2 * bias for matrices, bias in self._layers())

    def places(self, has_biases: bool) -> list[tuple[int, int]]:
        """Offset and number of elements of each weight, in the module's order: all matrices come before all biases."""
        layers = list(self._layers())
        matrices = [size for sizes, _ in layers for size in sizes]
        starts = [0, *accumulate(matrices)]
        bias_start = starts[len(matrices)]
        found = []
        for number, (sizes, bias) in enumerate(layers):
            offsets = starts[3 * number : 3 * number + 3]
            found += list(zip(offsets[:2], sizes[:2], strict=True))
            if has_biases:
                found += [(bias_start, bias), (bias_start + bias, bias)]
            bias_start += 2 * bias
            if self.projection:
                found.append((offsets[2], sizes[2]))
        return found

    def reserve_bytes(self, steps: int, batch: int, dropout: float, item_bytes: int) -> int:
        """See the module's docstring."""
        layers, rows = self.num_layers, steps * batch * self.directions
        kept = layers * (_KEPT.get(self.mode, 1) + (self.projection != 0)) * self.hidden_size
        between = rows * (layers - 1) * self.output_size
        masks = -(-between // 8) + _DROPOUT_BYTES if dropout and layers > 1 else 0
        return (rows * kept + between) * item_bytes + masks


def _rnn(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    stride: int,
    buffer: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    geometry = Geometry(mode, input.shape[-1], hidden_size, proj_size, num_layers, bidirectional)
    width = geometry.output_size * geometry.directions
    if batch_sizes:
        steps, batch = len(batch_sizes), batch_sizes[0]
        output = input.new_empty(input.shape[0], width)
    else:
        steps, batch = (input.shape[1], input.shape[0]) if batch_first else (input.shape[0], input.shape[1])
        output = input.new_empty(steps, batch, width)
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    cy = hx.new_empty(0) if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
    nbytes = geometry.reserve_bytes(steps, batch, dropout, input.dtype.itemsize) if train else 0
    reserve = input.new_empty(nbytes, dtype=torch.uint8)
    if buffer is None:
        buffer = input.new_empty(geometry.weights)
    if batch_first and not batch_sizes:
        output = output.transpose(0, 1)
    return output, hy, cy, reserve, buffer


def _rnn_backward(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    stride: int,
    buffer: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Gradients of the input, the first hidden and cell states, and the weights.

    All are computed, but for those of the weights. These are parts of one buffer, unless cuDNN has biases
    that the module lacks.
    """
    mode, hidden_size, proj_size, num_layers, batch_first, _, _, bidirectional, batch_sizes = rest[4:13]
    gradient = torch.empty_like(input, memory_format=torch.contiguous_format)
    if batch_first and not batch_sizes:
        gradient = input.new_empty(input.shape[1], input.shape[0], input.shape[2]).transpose(0, 1)
    weights: list[torch.Tensor] = []
    if rest[-1][3]:
        geometry = Geometry(mode, input.shape[-1], hidden_size, proj_size, num_layers, bidirectional)
        if stride == per_layer(True, proj_size):
            flat = torch.empty_like(buffer)
            places = geometry.places(has_biases=True)
            weights = [
                flat.as_strided(w.shape, w.stride(), offset) for w, (offset, _) in zip(weight, places, strict=True)
            ]
        else:
            weights = [w.new_empty(w.shape) for w in weight]
    return gradient, torch.empty_like(hx), None if cx is None else torch.empty_like(cx), weights


def _dropout_state(dropout: float, train: bool, seed: int, **options: Any) -> torch.Tensor:
    nbytes = simulated.stood_for.sm_count * _GENERATORS_OF_SM * _GENERATOR_BYTES if train and dropout else 0
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


SHAPES = {
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn_backward,
    "_cudnn_init_dropout_state": _dropout_state,
}
