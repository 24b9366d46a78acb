"""cuDNN's RNNs: the products of all steps at once where they can be, and those of the hidden state step by step.

    forward    for each layer and direction:  [rows, width] x [width, G h]  +  steps * ([batch, h] x [h, G h]  +  kernel)
    backward   for each layer and direction:  [rows, G h] x [G h, width]    +  steps * ([batch, G h] x [G h, h]  +  kernel)
               + [G h, rows] x [rows, width]  +  [G h, rows] x [rows, h]                 where weights want gradients

    rows = steps * batch (packed: what there is), G gates of width h, `kernel` the gates' elementwise kernel of one step. A
    projection is one more product of each step. The products are priced as those of other operators are.

Products in float32 use no tensor cores here, whatever the job allows: the LSTM of `benchmarks/step_kinds` (job 4: two
layers, width 1024, 128 steps, batch 64, float32, H100) takes 6.64 ms forward and 12.68 ms backward. Plain float32 gives 6.82
and 12.06; with TF32 a step of the backward would have to take 45 us beside 24 of the forward, for the same product. This
choice is all that was fitted, and that case is the only one there is: 16 bits, GRUs, plain RNNs and two directions (one
after the other) are held to be alike. Widths up to 192 run in another kernel, which keeps the weights in registers; it may
be several times faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autosac.estimator.hardware import Hardware
from autosac.estimator.learned import LearnedMatmul
from autosac.estimator.models import Estimate, OperatorModel, first_estimates
from autosac.estimator.roofline import Roofline
from autosac.estimator.tiled import TiledMatmul
from autosac.estimator.work import argument
from autosac.trace import Signature, TensorMeta

FORWARD, BACKWARD = "aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"
_GATES = {2: 4, 3: 3}  # of an LSTM and a GRU; one of the other modes
_REL_STD = 0.3


class _Call(NamedTuple):
    """A call: `rows` steps of sequences, `batch` of them in a step. `width` of the input; `size`, `projection` (0: none)."""

    rows: int
    steps: int
    batch: int
    width: int
    size: int
    projection: int
    gates: int
    layers: int
    directions: int
    dtype: str
    backward: bool
    of_weights: bool


class _Product(NamedTuple):
    times: int
    m: int
    k: int
    n: int
    left_transposed: bool = False
    right_transposed: bool = False


class Recurrent:
    """The model of one GPU."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`."""
        self._hardware = hardware
        self._products: tuple[OperatorModel, ...] = (
            LearnedMatmul(hardware),
            TiledMatmul(hardware),
            Roofline(hardware),
        )

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """The formula of the module's docstring; None for all other operators."""
        return [self._estimate(s) if s.name in (FORWARD, BACKWARD) else None for s in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        call = _call(signature)
        if call is None:
            return None
        products = list(_products(call))
        answers = first_estimates(self._products, [_signature(product, call.dtype) for product in products])
        kernels = call.steps * call.layers * call.directions * (2 if call.projection else 1)
        ms = kernels * self._hardware.kernel_us * 1e-3
        ms += sum(product.times * answer.ms for product, answer in zip(products, answers, strict=True))
        return Estimate(ms, "recurrent", _REL_STD)


def _call(signature: Signature) -> _Call | None:
    numbers = {name: argument(signature, name, 0) for name in ("mode", "hidden_size", "proj_size", "num_layers")}
    data = signature.inputs[0] if signature.inputs else None
    if data is None or data.place != "device" or not all(isinstance(n, int) for n in numbers.values()):
        return None
    mode, size, projection, layers = (int(n) for n in numbers.values())  # type: ignore[arg-type]
    packed = argument(signature, "batch_sizes")
    first = bool(argument(signature, "batch_first", False))
    if len(data.shape) == 2:
        steps = len(packed) if isinstance(packed, tuple) and packed else 1
        rows = data.shape[0]
    else:
        steps = data.shape[1 if first else 0]
        rows = data.shape[0] * data.shape[1]
    mask = argument(signature, "output_mask")
    return _Call(
        rows=rows,
        steps=steps,
        batch=max(1, round(rows / max(1, steps))),
        width=data.shape[-1],
        size=size,
        projection=projection,
        gates=_GATES.get(mode, 1) * size,
        layers=layers,
        directions=2 if argument(signature, "bidirectional", False) else 1,
        dtype=data.dtype,
        backward=signature.name == BACKWARD,
        of_weights=bool(mask[3]) if isinstance(mask, tuple) and len(mask) == 4 else True,
    )


def _products(c: _Call) -> Iterator[_Product]:
    """Of all layers and directions."""
    out = c.projection or c.size
    for layer in range(c.layers):
        width = c.width if not layer else out * c.directions
        if not c.backward:
            yield _Product(c.directions, c.rows, width, c.gates, right_transposed=True)
            yield _Product(c.directions * c.steps, c.batch, out, c.gates, right_transposed=True)
            if c.projection:
                yield _Product(c.directions * c.steps, c.batch, c.size, out, right_transposed=True)
            continue
        yield _Product(c.directions, c.rows, c.gates, width)
        yield _Product(c.directions * c.steps, c.batch, c.gates, out)
        if c.projection:
            yield _Product(c.directions * c.steps, c.batch, out, c.size)
        if c.of_weights:
            yield _Product(c.directions, c.gates, c.rows, width, left_transposed=True)
            yield _Product(c.directions, c.gates, c.rows, out, left_transposed=True)
            if c.projection:
                yield _Product(c.directions, out, c.rows, c.size, left_transposed=True)


def _signature(p: _Product, dtype: str) -> Signature:
    """The product as an operator."""

    def matrix(rows: int, columns: int, *, transposed: bool = False) -> TensorMeta:
        stride = (1, rows) if transposed else (columns, 1)
        return TensorMeta((rows, columns), stride, dtype, "device")

    operands = matrix(p.m, p.k, transposed=p.left_transposed), matrix(p.k, p.n, transposed=p.right_transposed)
    return Signature("aten.mm.default", operands, (matrix(p.m, p.n),))
