"""What attention kernels allocate beside their outputs, from the sources that allocate it.

B, S, H, D: batch, sequence, heads, head size; q queries, k keys. The operators ``_scaled_dot_product_*`` have (B, H, S, D)
tensors and transpose them; ``_flash_attention_*`` and ``_efficient_attention_*`` have (B, S, H, D), or (tokens, H, D) with
sequences of different lengths.

- **Flash backward** (``transformers/cuda/flash_attn/flash_api.cpp``, `mha_bwd`, `mha_varlen_bwd`): dq in fp32 for atomic adds,
  ``[B, round_up(Sq, 128), H, round_up(D, 32)]`` (64 above 128), and the row sums of dO * O in fp32,
  ``[B, H, round_up(Sq, 128)]``. With fewer key heads than query heads, dk and dv for all query heads. dO and O are made
  contiguous first (``attention_backward.cu``).
- **Backward of FlashAttention-3 and 4** (Dao-AILab/flash-attention, ``hopper/flash_api.cpp``, `mha_bwd`;
  ``flash_attn/cute/interface.py``, `_flash_attn_bwd`): dq in fp32 and two rows of sums, all in whole tiles of queries. With
  fewer key heads than query heads, dk and dv in fp32 in whole tiles of keys. Nothing is made contiguous.
- **Memory-efficient backward** (``attention_backward.cu``, ``mem_eff_attention/kernel_backward.h``): tiles of I queries and J
  keys, chosen by the head size (``kernels/cutlassB.h``). `workspace_size`: for each (batch, head) the dq tiles with their
  locks, ``ceil(Sq/I) ceil(D/J) (I J + 4)`` floats, and, in half precision if D > I, dk and dv of the splits of the keys. In
  fp32 the row sums come from a product of the size of dO.
- **Memory-efficient forward** (``attention.cu``): an fp32 output in half precision if D > 128.
- **cuDNN backward** (``cudnn/MHA.cpp``; cudnn-frontend, ``scaled_dot_product_flash_attention.h``,
  `get_fe_workspace_size_node`): dq and row sums in fp32. What cuDNN's own engines take on top is not published and not
  counted.
"""

from __future__ import annotations

from autosac.memory_sim.tensor_sizes import dense_bytes, elements, is_contiguous, round_up, transposed
from autosac.trace import Signature, TensorMeta

FLOAT_BYTES = 4
UNLIMITED = 1 << 16
# FlashAttention-3's queries and keys in a tile, by the head size that theirs is rounded up to. Where not all queries attend to
# all keys, 64 queries for heads of 128.
_HOPPER_TILES = {64: (128, 128), 96: (64, 128), 128: (80, 128), 192: (64, 96), 256: (64, 80)}


def flash_backward(signature: Signature, heads_first: bool) -> tuple[int, ...]:
    """Blocks of the flash attention backward; inputs are (dO, q, k, v, O, ...)."""
    grad_out, query, key, value, out = (_sequence_first(m, heads_first) for m in signature.inputs[:5])
    blocks = [dense_bytes(meta) for meta in (grad_out, out) if not is_contiguous(meta)]
    heads, head_size = query.shape[-2:]
    columns = round_up(head_size, 32 if head_size <= 128 else 64)
    if len(query.shape) == 3:
        rows = query.shape[0] + 128 * _sequences(signature)
    else:
        rows = query.shape[0] * round_up(query.shape[1], 128)
    blocks += [heads * rows * FLOAT_BYTES, heads * rows * columns * FLOAT_BYTES]
    if key.shape[-2] != heads:
        groups = heads // key.shape[-2]
        blocks += [dense_bytes(key) * groups, dense_bytes(value) * groups]
    return tuple(blocks)


def newer_flash_backward(signature: Signature, heads_first: bool, implementation: str) -> tuple[int, ...]:
    """Blocks of the backward of FlashAttention-3 ("FA3") or 4 ("FA4"); inputs are (dO, q, k, v, O, ...)."""
    _, query, key, value = (_sequence_first(m, heads_first) for m in signature.inputs[:4])
    head_size = max(query.shape[-1], value.shape[-1])
    columns = next(width for width in _HOPPER_TILES if head_size <= width)
    query_tile, key_tile = _HOPPER_TILES[columns]
    if implementation == "FA4":
        query_tile, key_tile, columns = 128, 128, round_up(head_size, 32)
    elif columns == 128 and not _reaches_all(signature):
        query_tile = 64
    rows, key_rows = (_rows(signature, meta, tile) for meta, tile in ((query, query_tile), (key, key_tile)))
    heads, key_heads = query.shape[-2], key.shape[-2]
    sums = heads * rows * FLOAT_BYTES
    blocks = [sums, sums, sums * columns]
    if key_heads != heads:
        blocks += [key_heads * key_rows * columns * FLOAT_BYTES] * 2
    return tuple(blocks)


def _rows(signature: Signature, meta: TensorMeta, tile: int) -> int:
    """Of all sequences, each in whole tiles; those of different lengths have one tile more."""
    if len(meta.shape) == 4:
        return meta.shape[0] * round_up(meta.shape[1], tile)
    return round_up(meta.shape[0] + tile * _sequences(signature), tile)


def _sequences(signature: Signature) -> int:
    return next(m.shape[0] for m in signature.inputs[5:] if m.dtype == "int32" and len(m.shape) == 1) - 1


def _reaches_all(signature: Signature) -> bool:
    """Whether each query attends to each key."""
    arguments = dict(signature.arguments)
    windows = (arguments.get(f"window_size_{side}") for side in ("left", "right"))
    return not arguments.get("is_causal") and all(window in (None, -1) for window in windows)


def efficient_backward(signature: Signature, heads_first: bool, capability: tuple[int, int]) -> tuple[int, ...]:
    """Blocks of the memory-efficient attention backward; inputs are (dO, q, k, v, ...)."""
    grad_out, query, key, value = (_sequence_first(m, heads_first) for m in signature.inputs[:4])
    batch, queries, heads, head_size = query.shape
    keys, value_size = key.shape[1], value.shape[3]
    half = query.dtype != "float32"
    tile_i, tile_j = _backward_tile(max(head_size, value_size), half, capability)
    floats = -(-queries // tile_i) * -(-head_size // tile_j) * (tile_i * tile_j + 4)
    if half and max(head_size, value_size) > tile_i:
        splits = -(-keys // tile_j)
        if batch * heads >= 256 and keys <= 2 * tile_j:
            splits = 1
        splits = max(min(splits, 200 // (batch * heads)), 1)
        floats += splits * tile_j * (round_up(head_size, tile_i) + round_up(value_size, tile_i))
    workspace = batch * heads * round_up(floats, 4) * FLOAT_BYTES
    row_sums = batch * heads * queries * FLOAT_BYTES
    copy = () if is_contiguous(grad_out) else (dense_bytes(grad_out),)
    stages = [(*copy, row_sums, workspace)]
    if not half:
        stages.append((*copy, elements(grad_out) * FLOAT_BYTES, row_sums))
    return max(stages, key=sum)


def efficient_forward(signature: Signature) -> tuple[int, ...]:
    """The fp32 output of the memory-efficient forward where it needs one; inputs are (q, k, v, ...)."""
    query, value = signature.inputs[0], signature.inputs[2]
    if query.dtype == "float32" or value.shape[-1] <= 128:
        return ()
    return (elements(query) // query.shape[-1] * value.shape[-1] * FLOAT_BYTES,)


def cudnn_backward(signature: Signature) -> tuple[int, ...]:
    """The workspace that cudnn-frontend asks for; inputs are (dO, q, k, v, ...)."""
    query = signature.inputs[1]
    rows = elements(query) // query.shape[-1]
    return ((elements(query) + rows) * FLOAT_BYTES,)


def _sequence_first(meta: TensorMeta, heads_first: bool) -> TensorMeta:
    return transposed(meta, 1, 2) if heads_first else meta


def _backward_tile(head_size: int, half: bool, capability: tuple[int, int]) -> tuple[int, int]:
    """(I, J) of the first kernel for compute capability 8.0 and later that takes this head size."""
    kernels = [(64, 64, 32), (64, 64, 64), (128, 128 if half else 64, 128), (128, 64, UNLIMITED)]
    if half and capability in ((8, 6), (8, 9)):
        kernels.insert(2, (128, 64, 96))
    return next((i, j) for i, j, largest in kernels if head_size <= largest)
