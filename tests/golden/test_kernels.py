"""Counts of kernels, sectors and staging buffers of reductions over grids of sizes, pinned.

See `test_stored_step` for how to write the expectations anew.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from pinned import check

from autosac.estimator.sectors import overfetched_bytes
from autosac.estimator.work import kernel_count
from autosac.memory_sim.reduction_allocations import reduction_buffers
from autosac.trace import Signature, TensorMeta

FOLDER = Path(__file__).parent
SEVERAL = (
    "mse_loss",
    "mse_loss_backward",
    "binary_cross_entropy_with_logits",
    "constant_pad_nd",
    "max_pool2d_with_indices_backward",
    "native_batch_norm",
    "native_group_norm",
    "native_group_norm_backward",
    "native_layer_norm_backward",
    "_fused_rms_norm_backward",
    "relu",
)


def meta(shape: tuple[int, ...], stride: tuple[int, ...] | None = None, dtype: str = "bfloat16") -> TensorMeta:
    """A tensor, contiguous if no stride is given."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorMeta(shape, stride or tuple(reversed(strides)), dtype)


def test_kernels_of_operators() -> None:
    """Of each that launches several, without weights and with them."""
    x = meta((8, 8))
    lines = []
    for name in SEVERAL:
        counts = [kernel_count(Signature(f"aten.{name}.default", (x,) * n, (x,) * n)) for n in (1, 2, 3)]
        lines.append(f"{name} {counts}")
    check(FOLDER / "kernels.txt", "\n".join(lines))


def test_buffers_of_reductions() -> None:
    """Over rows, columns, all, and the middle of three dimensions; of small and large sizes, two types and three GPUs."""
    lines = []
    sizes = (1, 3, 64, 1000, 4096, 65_536)
    gpus = ((132, (9, 0)), (40, (7, 5)), (142, (8, 9)))
    for rows, columns in itertools.product(sizes, sizes):
        for dim, dtype, transposed in itertools.product(
            ((0,), (1,), (0, 1), (-1,)), ("bfloat16", "float64"), (False, True)
        ):
            source = meta((rows, columns), (1, rows) if transposed else None, dtype)
            kept = tuple(n for d, n in enumerate((rows, columns)) if d not in {axis % 2 for axis in dim})
            name = "aten.sum.dim_IntList"
            signature = Signature(name, (source,), (meta(kept, dtype=dtype),), (("dim", dim),))
            found = [reduction_buffers(signature, *gpu) for gpu in gpus]
            if any(found):
                lines.append(f"{rows} x {columns} {dtype} over {dim}{' transposed' if transposed else ''}: {found}")
    for shape in ((16, 512, 64), (64, 3, 4096), (1024, 1024, 8)):
        middle = Signature("aten.mean.dim", (meta(shape),), (meta((shape[0], 1, shape[2])),), (("dim", (1,)),))
        keeping = Signature("aten.mean.default", (meta(shape),), (meta((1, 1, shape[2])),))
        lines.append(f"{shape}: {[reduction_buffers(s, *gpus[0]) for s in (middle, keeping)]}")
    check(FOLDER / "reductions.txt", "\n".join(lines))


@pytest.mark.parametrize(
    ("l2_bytes", "extra"), [(2 * 64 * 1024 - 1, 31.0), (2 * 64 * 1024, 0.0), (2 * 64 * 1024 + 1, 0.0)]
)
def test_sectors_stay_in_half_of_the_cache(l2_bytes: float, extra: float) -> None:
    """1,024 neighbours a sector apart touch 64 KiB: what exceeds half of the L2 is fetched again, 64 bytes for each 2."""
    rows, columns = 4096, 1024
    out, source = meta((rows, columns)), meta((rows, columns), (1, rows))
    signature = Signature("aten.add.Tensor", (source, out), (out,))
    assert overfetched_bytes(signature, l2_bytes) == extra * rows * columns * 2


def test_what_is_laid_out_alike_is_fetched_once() -> None:
    """Also what is expanded, small, or on the host; without a result nothing is known."""
    out = meta((64, 64))
    alike = (out, meta((64, 64), (0, 1)), meta((64,)), TensorMeta((64, 64), (1, 64), "bfloat16", "cpu"))
    assert overfetched_bytes(Signature("aten.add.Tensor", alike, (out,)), 1.0) == 0.0
    assert overfetched_bytes(Signature("aten.add.Tensor", alike, ()), 1.0) == 0.0
