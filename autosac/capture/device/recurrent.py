"""RNNs as PyTorch runs them on an NVIDIA GPU: `nn.LSTM`, `nn.GRU` and `nn.RNN` are one call of cuDNN each.

What is decided here is decided in ATen/native/RNN.cpp (`use_cudnn`), ATen/native/cudnn/RNN.cpp (the flat buffer of all
weights, the state of dropout) and ATen/cudnn/AutocastRNN.cpp (float16 under autocast, whatever type autocast has). The shapes
of the operators are in `recurrent_shapes`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.rnn import RNNBase

from autosac.capture.device import device as simulated
from autosac.capture.device.recurrent_shapes import MODES, Geometry, per_layer

aten = torch.ops.aten
_FLATTENED = (torch.float16, torch.float32, torch.float64)  # torch.backends.cudnn.CUDNN_TENSOR_DTYPES
_NOT_COMPACT = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted at every "
    "call, possibly greatly increasing memory usage. To compact weights again call flatten_parameters()."
)


def install(library: torch.library.Library, key: str) -> None:
    """Register what CUDA would call, for the simulated device's dispatch key."""
    recurrent = RecurrentKernels()
    for name in MODES:
        for overload, function in (("input", recurrent.padded), ("data", recurrent.packed)):
            for target in (f"Autograd{key}", key):
                library.impl(f"{name}.{overload}", function(name), target)
    library.impl("_cudnn_rnn", _cast_to_half(key), f"Autocast{key}")
    RNNBase.flatten_parameters = _flatten_parameters  # type: ignore[method-assign]


def is_acceptable(x: torch.Tensor) -> bool:
    """Whether cuDNN's RNNs take this input (`use_cudnn`, with cuDNN 9.13 or newer)."""
    if not torch.backends.cudnn.enabled or not x.numel():
        return False
    ampere = simulated.stood_for.compute_capability >= (8, 0)
    return x.dtype in _FLATTENED or (x.dtype == torch.bfloat16 and ampere)


class RecurrentKernels:
    """The four kinds of RNNs. Dropout has one state for the whole process, made when it is first needed."""

    def __init__(self) -> None:
        self._dropout_state: torch.Tensor | None = None

    def padded(self, name: str) -> Callable[..., Any]:
        """``aten::lstm.input`` and its like: sequences of one length."""
        composite = getattr(aten, name).input

        def kernel(input: torch.Tensor, hx: Any, params: Any, *options: Any) -> Any:
            if not is_acceptable(input):
                return composite.decompose(input, hx, params, *options)
            return self._run(name, input, hx, params, options, ())

        return kernel

    def packed(self, name: str) -> Callable[..., Any]:
        """``aten::lstm.data`` and its like: packed sequences, with the number of those that go on at each step."""
        composite = getattr(aten, name).data

        def kernel(data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: Any, *options: Any) -> Any:
            if not is_acceptable(data):
                return composite.decompose(data, batch_sizes, hx, params, *options)
            return self._run(name, data, hx, params, (*options, False), batch_sizes.tolist())

        return kernel

    def _run(
        self,
        name: str,
        input: torch.Tensor,
        hidden: Any,
        params: Sequence[torch.Tensor],
        options: tuple[Any, ...],
        batch_sizes: Sequence[int],
    ) -> tuple[torch.Tensor, ...]:
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        hx, cx = hidden if name == "lstm" else (hidden, None)
        size, projection = hx.shape[2], 0
        if cx is not None and cx.shape[2] != hx.shape[2]:
            size, projection = cx.shape[2], hx.shape[2]
        geometry = Geometry(MODES[name], input.shape[-1], size, projection, num_layers, bidirectional)
        flat = _flat_buffer(params, geometry, has_biases)
        if flat is None:
            warnings.warn(_NOT_COMPACT, stacklevel=3)
        state = self._state(dropout, input.device) if train and dropout > 0 else None
        output, hy, cy, *_ = aten._cudnn_rnn(
            input,
            params,
            per_layer(has_biases, projection),
            flat,
            hx,
            cx,
            *(geometry.mode, size, projection, num_layers, batch_first, dropout, train, bidirectional),
            batch_sizes,
            state,
        )
        return (output, hy) if cx is None else (output, hy, cy)

    def _state(self, dropout: float, device: torch.device) -> torch.Tensor:
        if self._dropout_state is None:
            self._dropout_state = aten._cudnn_init_dropout_state(dropout, True, 0, dtype=torch.uint8, device=device)
        return self._dropout_state


def _flat_buffer(params: Sequence[torch.Tensor], geometry: Geometry, has_biases: bool) -> torch.Tensor | None:
    """The buffer of all weights, if they lie in one as cuDNN wants them (`try_get_weight_buf`)."""
    first = params[0]
    storage = first.untyped_storage()
    size = geometry.weights
    if storage.nbytes() < size * first.dtype.itemsize or not params[-1].is_contiguous():
        return None
    places = geometry.places(has_biases)
    for param, (offset, _) in zip(params, places, strict=True):
        if param.untyped_storage()._cdata != storage._cdata or param.storage_offset() != offset:
            return None
    with torch.no_grad():
        return first.data.as_strided((size,), (1,), 0)


def _flattened(
    weights: Sequence[torch.Tensor], geometry: Geometry, has_biases: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A flat buffer with copies of the weights, and its parts (`copy_weights_to_flat_buf_views`)."""
    buffer = torch.zeros(geometry.weights, dtype=dtype, device=weights[0].device)
    parts = []
    for weight, (offset, size) in zip(weights, geometry.places(has_biases), strict=True):
        part = buffer.data.as_strided((size, 1), (1, 1), offset).data  # no view, as autograd sees it
        parts.append(part.copy_(weight.view_as(part)))
    return buffer, parts


def _flatten_parameters(self: RNNBase) -> None:
    """`RNNBase.flatten_parameters`, with the conditions that it has for CUDA, for weights on the simulated device."""
    weights: list[Any] = list(self._flat_weights)
    if len(weights) != len(self._flat_weights_names) or not all(isinstance(w, FakeTensor) for w in weights):
        return
    first = weights[0]
    if first.device.type != simulated.device_type() or not torch.backends.cudnn.enabled:
        return
    if first.dtype not in _FLATTENED or any(w.dtype != first.dtype or not w.numel() for w in weights):
        return
    if len({(w.untyped_storage()._cdata, w.storage_offset()) for w in weights}) != len(weights):
        return
    geometry = Geometry(
        MODES[self.mode.lower()], self.input_size, self.hidden_size, self.proj_size, self.num_layers, self.bidirectional
    )
    with torch.no_grad():
        _, parts = _flattened(weights, geometry, self.bias, first.dtype)
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part.view_as(weight)


def _cast_to_half(key: str) -> Callable[..., Any]:
    """Autocast's rule: float16 copies of the weights in a flat buffer of their own, at every call."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{key}"))

    def half(x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None or not x.is_floating_point() or x.dtype == torch.float64 else x.half()

    def kernel(
        input: torch.Tensor,
        weight: Sequence[torch.Tensor],
        stride: int,
        buffer: torch.Tensor | None,
        hx: torch.Tensor,
        cx: torch.Tensor | None,
        *options: Any,
    ) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if weight[0].dtype not in (torch.float16, torch.float64):
                mode, hidden_size, proj_size, num_layers, _, _, _, bidirectional = options[:8]
                geometry = Geometry(mode, input.shape[-1], hidden_size, proj_size, num_layers, bidirectional)
                buffer, weight = _flattened(weight, geometry, stride >= per_layer(True, 0), torch.float16)
            cast_cx, cast_hx, cast_input = half(cx), half(hx), half(input)  # the last argument first, as gcc does
            return aten._cudnn_rnn(cast_input, weight, stride, buffer, cast_hx, cast_cx, *options)

    return kernel
