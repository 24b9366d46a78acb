"""What an operator has to do: floating-point operations and bytes moved, derived from its signature alone.

Everything that a cost model may ask about an operator's shape is worked out here, once:

    family        which counting rule applies, by base name (`data/operators.toml`)
    matmul        `matmul_shape`: batch, m, n, k, and which operands are stored transposed
    attention     `attention_shape`: batch, heads, lengths, head sizes, causal share
    convolution   `convolution_flops`
    bytes         `moved_bytes`: reads + writes. Dimensions of stride 0 (broadcast) are read once; operators that gather read
                  what they output; operators that fill read nothing; in-place outputs are written, and read unless the
                  operator overwrites them

A multiplication with addition counts as two operations. A causal mask halves attention; a window leaves out more (`_share`).
Attention's backward needs 2.5 times the operations of its forward (five matrix products instead of two).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from autosac.memory_sim.tensor_sizes import fastest_first
from autosac.trace import Scalar, Signature, TensorMeta

_ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
    "complex128": 16,
    "complex32": 4,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
}
_BACKWARD_FLOPS = 2.5
# Operators whose tensors are [batch, length, heads, size]; all others have heads before length.
_LENGTH_FIRST = ("flash_attention_", "efficient_attention_", "cudnn_attention_", "varlen_attn")


class Work(NamedTuple):
    """`flops` of `arithmetic` and `bytes` of device memory; `family` "" if the operator is unknown."""

    family: str
    flops: float
    nbytes: float
    arithmetic: str


class Matmul(NamedTuple):
    """`batch` products of [m, k] and [k, n].

    `a_transposed`: the left operand's rows are its fast dimension.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    a_transposed: bool
    b_transposed: bool


class AttentionShape(NamedTuple):
    """`share`: that of the query-key pairs which is computed, beside what `causal` says (1: that much)."""

    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_size: int
    value_size: int
    causal: bool
    backward: bool
    backend: str
    dtype: str
    dropout: float
    share: float = 1.0

    @property
    def flops(self) -> float:
        """Operations of the forward, or of the backward."""
        share = self.share * (0.5 if self.causal else 1.0)
        pairs = self.batch * self.heads * self.query_length * self.key_length * share
        return 2.0 * pairs * (self.head_size + self.value_size) * (_BACKWARD_FLOPS if self.backward else 1.0)


def item_bytes(dtype: str) -> int:
    """Bytes of one element; types that are not listed (bool, 8-bit integers and floats) take one."""
    return _ITEM_BYTES.get(dtype, 1)


def base_name(name: str) -> str:
    """``"aten._foreach_add_.List"`` -> ``"add"``:

    no namespace, overload, "_foreach_" or in-place underscore.
    """
    parts = name.split(".")
    base = parts[1] if len(parts) > 1 else parts[0]
    base = base.removeprefix("_foreach_")
    return base[:-1] if base.endswith("_") and not base.endswith("__") else base


@cache
def _families() -> Mapping[str, str]:
    table = tomllib.loads((Path(__file__).parent / "data" / "operators.toml").read_text(encoding="utf-8"))
    return {name: family for family, names in table.items() for name in names.split()}


@lru_cache(maxsize=4096)
def family(name: str) -> str:
    """The family of an operator by its full name; "" if unknown.

    Inductor's own fused kernels are elementwise.
    """
    if name.startswith("triton."):
        return (
            "elementwise"
            if name.startswith(("triton.triton_poi", "triton.triton_for", "triton.triton_red", "triton.triton_per"))
            else ""
        )
    base = base_name(name)
    if base == "all_gather_copy_in":
        return "elementwise"
    return _families().get(base, "")


# Kernels of operators that launch several, and how many more with weights: PyTorch's sources, and the traces that
# `benchmarks/traces` reads.
_KERNELS = {
    "mse_loss": (2, 0),
    "mse_loss_backward": (2, 0),
    "binary_cross_entropy_with_logits": (10, 0),
    "constant_pad_nd": (2, 0),
    "max_pool2d_with_indices_backward": (2, 0),
    "native_batch_norm": (3, 0),
    "native_group_norm": (2, 1),
    "native_group_norm_backward": (3, 2),
    "native_layer_norm_backward": (1, 1),
    "_fused_rms_norm_backward": (1, 2),
}


def kernel_count(signature: Signature) -> int:
    """How many kernels an operator launches at least, each of which takes the shortest time that one can take."""
    alone, more = _KERNELS.get(base_name(signature.name), (1, 0))
    weights = len(signature.outputs) > 1 if "backward" in signature.name else len(signature.inputs) > 1
    return alone + more * weights


_GENERATED = {
    "triton_poi": "pointwise",
    "triton_for": "pointwise",  # over lists of tensors, as of a compiled optimizer
    "triton_per": "persistent",
    "triton_red": "looped",
}


@lru_cache(maxsize=4096)
def generated_kind(name: str) -> str:
    """What a kernel of Inductor's is: "pointwise", "persistent" or "looped"; "" for any other operator."""
    return _GENERATED.get(name.removeprefix("triton.")[:10], "") if name.startswith("triton.") else ""


def arithmetic(dtype: str, *, tf32: bool = False) -> str:
    """The unit that multiplies this type, as a profile's `peak_tflops` calls it."""
    if dtype.startswith("float8"):
        return "float8"
    if dtype.startswith("float4"):
        return "float4"
    if dtype in ("int8", "uint8"):
        return "int8"
    if dtype in ("float64", "complex128"):
        return "float64"
    if dtype in ("float16", "bfloat16"):
        return dtype
    return "tf32" if tf32 else "float32"


def _elements(meta: TensorMeta) -> int:
    """Distinct elements: dimensions of stride 0 repeat the same memory."""
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        if stride or not size:
            count *= size
    return count


def tensor_bytes(metas: Iterable[TensorMeta]) -> int:
    """Bytes of device memory behind these tensors; those on the host take none."""
    return sum(_elements(m) * item_bytes(m.dtype) for m in metas if m.place == "device")


def argument(signature: Signature, name: str, default: Scalar = None) -> Scalar:
    """A non-tensor argument by its schema name."""
    for key, value in signature.arguments:
        if key == name:
            return value
    return default


# ---- matrix products ---------------------------------------------------------------------------------------

_LEFT = {"addmm": 1, "baddbmm": 1, "addbmm": 1, "_addmm_activation": 1}


def matmul_shape(signature: Signature) -> Matmul | None:
    """The product that a matmul-family operator computes; None if its tensors do not look like one."""
    base = base_name(signature.name)
    left = _LEFT.get(base, 0)
    if len(signature.inputs) < left + 2 or not signature.outputs:
        return None
    a, b = signature.inputs[left], signature.inputs[left + 1]
    if not a.shape or not b.shape:
        return None
    if base == "linear":
        b = b._replace(shape=b.shape[::-1], stride=b.stride[::-1])
    if "grouped_mm" in base:
        return _grouped(a, b, signature.outputs[0])
    if len(a.shape) < 2 or len(b.shape) < 2:
        return None
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = math.prod(a.shape[:-2])
    if len(b.shape) == 2:
        m, batch = m * batch, 1
    else:
        batch = max(batch, math.prod(b.shape[:-2]))
    return Matmul(batch, m, n, k, a.dtype, _transposed(a), _transposed(b))


def _transposed(meta: TensorMeta) -> bool:
    return meta.stride[-2] < meta.stride[-1]


def _grouped(a: TensorMeta, b: TensorMeta, out: TensorMeta) -> Matmul:
    """Groups of rows (2D x 3D), of columns (3D x 2D), or of the contracted dimension (2D x 2D), of equal mean
    size.
    """
    groups = max(1, *(meta.shape[0] for meta in (a, b, out) if len(meta.shape) == 3))
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if len(a.shape) == 2 and len(b.shape) == 3:
        m = -(-m // groups)
    elif len(a.shape) == 3 and len(b.shape) == 2:
        n = -(-n // groups)
    elif len(a.shape) == 2:
        k = -(-k // groups)
    return Matmul(groups, m, n, k, a.dtype, _transposed(a), _transposed(b))


# ---- attention ---------------------------------------------------------------------------------------------


def attention_shape(signature: Signature) -> AttentionShape | None:
    """The attention that an operator of that family computes; None if its tensors do not look like one."""
    base = base_name(signature.name)
    backward = "backward" in base
    first = 1 if backward and not base.startswith("flex") else 0
    metas = signature.inputs[first : first + 3]
    if len(metas) < 3 or any(len(m.shape) not in (3, 4) for m in metas):
        return None
    query, key, value = metas
    ragged = len(query.shape) == 3
    second = base.lstrip("_").startswith(_LENGTH_FIRST)
    if ragged:
        batch, (q_len, heads, size), (k_len, kv_heads, _) = 1, query.shape, key.shape
        documents = _documents(signature)
        batch, q_len, k_len = documents, -(-q_len // documents), -(-k_len // documents)
    elif second:
        batch, q_len, heads, size = query.shape
        k_len, kv_heads = key.shape[1:3]
    else:
        batch, heads, q_len, size = query.shape
        kv_heads, k_len = key.shape[1:3]
    causal = bool(argument(signature, "is_causal", False)) or argument(signature, "custom_mask_type", 0) in (
        1,
        2,
    )
    causal = causal or base.startswith("flex")
    dropout = argument(signature, "dropout_p", 0.0)
    return AttentionShape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        query_length=q_len,
        key_length=k_len,
        head_size=size,
        value_size=value.shape[-1],
        causal=causal,
        backward=backward,
        backend=_backend(signature),
        dtype=query.dtype,
        dropout=float(dropout) if isinstance(dropout, int | float) else 0.0,
        share=_share(signature, q_len, k_len, causal),
    )


def _share(signature: Signature, queries: int, keys: int, causal: bool) -> float:
    """What a mask of flexible attention, or a window of so many keys to the left and to the right of a query (-1: all), leaves
    of the pairs that are computed without.
    """
    plain = 0.5 if causal else 1.0
    computed = argument(signature, "computed")
    if isinstance(computed, float):
        return computed / plain
    window = argument(signature, "window_size")
    sides = window if isinstance(window, tuple) and len(window) == 2 else (None, None)
    sides = (argument(signature, "window_size_left", sides[0]), argument(signature, "window_size_right", sides[1]))
    left, right = (side if isinstance(side, int) else -1 for side in sides)
    longest = max(queries, keys) - 1
    if not (0 <= left < longest or (not causal and 0 <= right < longest)):
        return 1.0
    return _pairs(queries, keys, left, 0 if causal else right) / (queries * keys * plain)


@lru_cache(maxsize=256)
def _pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs within a window; the last query is beside the last key."""
    total = 0
    for at in range(keys - queries, keys):
        begin = 0 if left < 0 else max(0, at - left)
        end = keys - 1 if right < 0 else min(keys - 1, at + right)
        total += max(0, end - begin + 1)
    return total


def _documents(signature: Signature) -> int:
    """Sequences packed into a ragged batch: the cumulative lengths have one more entry."""
    lengths = [m.shape[0] for m in signature.inputs if len(m.shape) == 1 and m.dtype in ("int32", "int64")]
    return max(1, lengths[0] - 1) if lengths else 1


def _backend(signature: Signature) -> str:
    """Whose kernel it is. FlashAttention-3 and 4 count as cuDNN's; `tiled_attention` knows the tiles that are others."""
    if argument(signature, "implementation") is not None:
        return "cudnn"
    base = base_name(signature.name)
    for name in ("cudnn", "efficient", "math", "overrideable", "flex"):
        if name in base:
            return "math" if name == "overrideable" else name
    return "flash"


# ---- convolution -------------------------------------------------------------------------------------------


def convolution_flops(signature: Signature) -> tuple[float, bool]:
    """Operations of a convolution or of the parts of its backward that are asked for, and whether it is
    depthwise.
    """
    backward = "backward" in signature.name
    inputs = signature.inputs
    if len(inputs) < (3 if backward else 2) or not signature.outputs:
        return 0.0, False
    grad_or_out = inputs[0] if backward else signature.outputs[0]
    data, weight = (inputs[1], inputs[2]) if backward else (inputs[0], inputs[1])
    if len(weight.shape) < 3:
        return 0.0, False
    transposed = bool(argument(signature, "transposed", False)) or "transpose" in signature.name
    positions = data if transposed else grad_or_out
    flops = 2.0 * math.prod(positions.shape) * math.prod(weight.shape[1:])
    mask = argument(signature, "output_mask")
    parts = 1
    if backward:
        wanted = mask[:2] if isinstance(mask, tuple) else (True,) * min(2, len(signature.outputs))
        parts = sum(map(bool, wanted))
    return flops * parts, weight.shape[1] == 1 and data.shape[1] > 1


# ---- bytes -------------------------------------------------------------------------------------------------

STREAMED = 0.88  # share of the memory bandwidth that kernels reach which do nothing but read and write
_OVERWRITES = ("copy", "split_with_sizes_copy", "chunk_cat", "_chunk_cat")


def moved_bytes(signature: Signature, kind: str) -> float:
    """Bytes read and written, by the rule of the operator's family."""
    base = base_name(signature.name)
    inputs, outputs = signature.inputs, signature.outputs
    mutated = [inputs[i] for i in signature.mutates]
    fresh = signature.name.endswith("out") or base in _OVERWRITES
    read = tensor_bytes(m for i, m in enumerate(inputs) if not (fresh and i in signature.mutates))
    written = max(tensor_bytes(outputs), tensor_bytes(mutated))
    if base == "all_gather_copy_in" and outputs:
        return 2.0 * tensor_bytes(outputs[:1])
    if kind == "fill":
        return float(written)
    if kind == "gather":
        index = tensor_bytes(m for m in inputs if m.dtype in ("int64", "int32", "bool"))
        return float(2 * written + index)
    if kind == "scatter":
        return _scatter_bytes(signature, base, written)
    if kind == "optimizer":
        return float(read + written - (_gradient_bytes(signature) if argument(signature, "grad_scale") is None else 0))
    passes = {"norm_backward": 1.5, "sort": 4.0}.get(kind, 1.0)
    if base == "_softmax_backward_data":
        passes = 2.0  # a product of gradient and result goes before (SoftMax.cu)
    return passes * (read + written)


def reduces_outer(signature: Signature) -> bool:
    """Whether a reduction runs over dimensions of which none is the fastest in memory, as a bias's gradient does."""
    dims = argument(signature, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple) or not dims or not signature.inputs:
        return False
    data = signature.inputs[0]
    if math.prod(data.shape) <= 1:
        return False
    return fastest_first(data)[0] not in {dim % len(data.shape) for dim in dims if isinstance(dim, int)}


def crosses_to_host(signature: Signature) -> bool:
    """Whether this is a copy from the host to the device or back."""
    if base_name(signature.name) not in ("copy", "_to_copy", "_copy_from", "_copy_from_and_resize", "to"):
        return False
    return len({meta.place for meta in (*signature.inputs, *signature.outputs)}) > 1


def _gradient_bytes(signature: Signature) -> int:
    """Fused optimizers declare gradients as mutated but write them only when they unscale them:

    a list in four.
    """
    lists = 2 if "sgd" in signature.name else 4
    mutated = tensor_bytes(signature.inputs[i] for i in signature.mutates)
    return mutated // lists


def _scatter_bytes(signature: Signature, base: str, written: int) -> float:
    """The source is read, its places are read and written; a functional form also copies or clears the
    destination.
    """
    if base.endswith("_backward"):
        source = tensor_bytes(signature.inputs[:1])
        return float(written + 3 * source)
    source = tensor_bytes(signature.inputs[1:])
    copied = 0 if signature.mutates else 2 * written
    return float(3 * source + copied)


def work_of(signature: Signature, *, tf32: bool = False) -> Work:
    """Operations and bytes of one operator. `tf32`: float32 matrix products run on tensor cores."""
    kind = family(signature.name)
    nbytes = moved_bytes(signature, kind)
    dtype = signature.inputs[0].dtype if signature.inputs else "float32"
    unit = arithmetic(dtype, tf32=tf32)
    if kind in ("matmul", "batched_matmul"):
        product = matmul_shape(signature)
        if product is None:
            return Work("reduction", 0.0, nbytes, unit)
        real = 4.0 if product.dtype.startswith("complex") else 1.0
        flops = real * 2.0 * product.batch * product.m * product.n * product.k
        return Work(kind, flops, nbytes, arithmetic(product.dtype, tf32=tf32))
    if kind in ("convolution", "convolution_backward"):
        flops, depthwise = convolution_flops(signature)
        return Work("depthwise" if depthwise else "convolution", flops, nbytes, "float32" if depthwise else unit)
    if kind in ("attention_forward", "attention_backward"):
        shape = attention_shape(signature)
        if shape is None:
            return Work("", 0.0, nbytes, unit)
        return Work(
            "attention_math" if shape.backend == "math" else kind,
            shape.flops,
            nbytes,
            arithmetic(shape.dtype),
        )
    return Work(kind, 0.0, nbytes, unit)
