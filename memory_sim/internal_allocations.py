"""Temporaries that CUDA implementations of operators allocate and free within the call, invisible to a
dispatcher.

One rule for each physical cause, with the PyTorch source (below ``aten/src/ATen/native``) that allocates; an
operator without a rule has none that is known. Attention: `autosac.memory_sim.attention_allocations`.

- **Embedding backward** (``cuda/Embedding.cu``, ``cuda/EmbeddingBackwardKernel.cu``): above 3072 indices,
  sorted copies of the indices and one fp32 row for each tenth index and each distinct one (at most n/10 +
  min(n, rows) rows).
- **Accumulating index_put** (``cuda/Indexing.cu``, `index_put_with_sort_kernel`): linear, sorted and original
  indices, 8 bytes each.
- **LayerNorm and RMSNorm backward** (``cuda/layer_norm_kernel.cu``): above 65,536 rows and below 16 * SMs
  columns, partial sums for dgamma and dbeta of up to 32,768 / ceil(N / 32) blocks.
- **Copies**: kernels that take contiguous inputs only copy others first (`CONTIGUOUS_INPUTS`).

- **Reductions**: `autosac.memory_sim.reduction_allocations`. **RNNs**: `autosac.memory_sim.rnn_allocations`.

Not modelled, because no source says how much: cuDNN's convolution and engine workspaces, and cub's scratch
space (at most a few bytes for each element sorted).
"""

from __future__ import annotations

from math import prod

from autosac.memory_sim.attention_allocations import (
    cudnn_backward,
    efficient_backward,
    efficient_forward,
    flash_backward,
    newer_flash_backward,
)
from autosac.memory_sim.reduction_allocations import REDUCTIONS, reduction_buffers
from autosac.memory_sim.rnn_allocations import rnn_backward, rnn_forward
from autosac.memory_sim.tensor_sizes import ITEM_BYTES, dense_bytes, elements, is_contiguous
from autosac.trace import Signature

CONTIGUOUS_INPUTS: dict[str, tuple[int, ...]] = {
    "_log_softmax": (0,),
    "_log_softmax_backward_data": (0, 1),
    "_softmax": (0,),
    "_softmax_backward_data": (0, 1),
    "embedding_dense_backward": (0, 1),
    "native_layer_norm": (0, 1, 2),
    "native_layer_norm_backward": (0, 1),
}
"""Operator -> positions of inputs that it makes contiguous (``cuda/SoftMax.cu`` and the files above)."""


def internal_allocations(signature: Signature, sm_count: int, capability: tuple[int, int]) -> tuple[int, ...]:
    """Sizes in bytes of the blocks that are alive together inside the operator; () if it allocates none."""
    namespace, _, rest = signature.name.partition(".")
    if namespace not in ("aten", "torch_attn"):
        return ()
    operator = rest.partition(".")[0]
    blocks = _own_blocks(operator, signature, sm_count, capability)
    for position in CONTIGUOUS_INPUTS.get(operator, ()):
        if position < len(signature.inputs) and not is_contiguous(signature.inputs[position]):
            blocks += (dense_bytes(signature.inputs[position]),)
    return blocks


def _own_blocks(operator: str, signature: Signature, sm_count: int, capability: tuple[int, int]) -> tuple[int, ...]:
    if operator in REDUCTIONS:
        return reduction_buffers(signature, sm_count, capability)
    heads_first = operator.startswith("_scaled_dot_product")
    match operator:
        case "_cudnn_rnn":
            return rnn_forward(signature)
        case "_cudnn_rnn_backward":
            return rnn_backward(signature)
        case "_scaled_dot_product_flash_attention_backward" | "_flash_attention_backward" | "_varlen_attn_backward":
            implementation = dict(signature.arguments).get("implementation")
            if implementation is None:
                return flash_backward(signature, heads_first)
            return newer_flash_backward(signature, heads_first, str(implementation))
        case "_scaled_dot_product_efficient_attention_backward" | "_efficient_attention_backward":
            return efficient_backward(signature, heads_first, capability)
        case "_scaled_dot_product_efficient_attention" | "_efficient_attention_forward":
            return efficient_forward(signature)
        case "_scaled_dot_product_cudnn_attention_backward":
            return cudnn_backward(signature)
        case "embedding_dense_backward":
            return _embedding_backward(signature)
        case "index_put" | "index_put_" | "_index_put_impl_" | "_unsafe_index_put":
            return _index_put(signature)
        case "native_layer_norm_backward" | "_fused_rms_norm_backward":
            return _norm_backward(signature, sm_count, gradients=1 + (operator == "native_layer_norm_backward"))
    return ()


def _embedding_backward(signature: Signature) -> tuple[int, ...]:
    """Inputs (dY, indices); output (rows, columns)."""
    indices, weight = signature.inputs[1], signature.outputs[0]
    count, (rows, columns) = elements(indices), weight.shape
    item = ITEM_BYTES[indices.dtype]
    by_frequency = dict(signature.arguments).get("scale_grad_by_freq") is True
    if count <= 3072 and not by_frequency:
        return ()
    segments = min(count, rows)
    partial = count // 10 + segments
    accumulator = 8 if weight.dtype == "float64" else 4
    indices_of = [count] * (4 if by_frequency else 3) + [segments] * 2 + [partial]
    return (*(n * item for n in indices_of), partial * columns * accumulator)


def _index_put(signature: Signature) -> tuple[int, ...]:
    """Inputs (self, indices..., values); indices of booleans have been turned into numbers before."""
    if dict(signature.arguments).get("accumulate") is not True:
        return ()
    indices = [meta.shape for meta in signature.inputs[1:-1]]
    rank = max((len(shape) for shape in indices), default=0)
    aligned = [(1,) * (rank - len(shape)) + shape for shape in indices]
    count = prod(max(sizes) for sizes in zip(*aligned, strict=True)) if aligned else 0
    return (count * 8,) * 3 if count else ()


def _norm_backward(signature: Signature, sm_count: int, gradients: int) -> tuple[int, ...]:
    """Partial sums over rows; inputs (dY, X, ...); outputs (dX, dgamma, dbeta), those that are asked for."""
    weights = [meta for meta in signature.outputs[1 : 1 + gradients] if elements(meta)]
    if not weights:
        return ()
    columns = elements(weights[0])
    rows = elements(signature.inputs[1]) // columns
    if rows <= 64 * 1024 or columns // 32 >= sm_count // 2:
        return ()
    blocks = min(32768 // -(-columns // 32), -(-rows // 32))
    return tuple(blocks * dense_bytes(meta) for meta in weights)
