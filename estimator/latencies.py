"""Operators that wait: for the memory's latency, for one block's turn, or for one thread's sum.

Their kernels do not fill the GPU, so that neither its arithmetic nor its bandwidth decides. Four causes:

sums        a tree over warps, blocks and the grid takes its time whatever the size, longer over the slow dimension, where
            partial results of several blocks meet in memory:
                t = waits + bytes / rate,   waits = 7,500 or 19,700 cycles (fast or slow dimension)
            Over the slow dimension threads hold four elements in flight, 8 bytes in 16 bits, and rate = min(streamed, 2.9
            bytes a cycle and processor * item size). What half of the L2 holds is read twice as fast as DRAM.

batch norm  PyTorch's own kernels for [images, channels, height, width] give each channel to one block of 512 threads, which
            walks its n elements:  t = start + ceil(n / 512) * latency * passes.  They serve bfloat16. The vendor's libraries,
            which take the other types, share a channel among blocks and are bound by bandwidth.

embeddings  the gradient of a table of v rows from n indices: indices are sorted, every ten of one row are summed by
            themselves, and one thread adds up the sums of each row one after the other (EmbeddingBackwardKernel.cu):
                t = fill + 3 * gradient bytes / bandwidth + base + n * share / 10 * 0.12 us
            `share` is that of the row with the most indices. A trace does not hold it: 1 / v is assumed (symbols drawn
            evenly), but 1/2 for tables of up to 64 rows (kinds, buckets), as T5's 32 buckets of distances have.

host        copies have no kernel to start. From and to memory that is not pinned they pass through the driver's staging
            buffers, small ones at once.

Numbers and their sources stand beside the constants; `docs/causes.md` has the errors, fitted and held out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.work import (
    STREAMED,
    argument,
    base_name,
    crosses_to_host,
    family,
    item_bytes,
    kernel_count,
    moved_bytes,
    reduces_outer,
    tensor_bytes,
)
from autosac.trace import Signature

# HolisticTraceAnalysis's trace of a recommender on A100s (f4d0062c), float32: 14 us and 5 us at 1,410 MHz; checked on the sums
# over rows in TraceLens's H100 traces (171dd747).
ROW_SUM_CYCLES, _OUTER_CYCLES = 7_500.0, 19_700.0
_OUTER_BYTES_A_CYCLE = 2.9  # for each byte of an element
_CACHED = 2.0
# TraceLens's trace of a ResNet-18 in bfloat16 on an MI300X: five sizes of channels each way.
_BLOCK = 512
_BATCH_NORM = {"norm": (16.0, 0.58), "norm_backward": (5.5, 1.56)}  # start and microseconds for each 512 elements
_BATCH_NORM_MHZ = 2100.0
_BATCH_NORMS = (
    *("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "batch_norm_backward"),
    "_native_batch_norm_legit_no_training",
    *("cudnn_batch_norm", "cudnn_batch_norm_backward", "miopen_batch_norm", "miopen_batch_norm_backward"),
)
_BATCH_NORM_PASSES = {"norm": 3.0, "norm_backward": 5.0}  # statistics or gradients' sums first, then every element
# NeuSight's tables (H100, A100, V100, L4): 0.10 to 0.15 ms beside the traffic, and at most 0.12 us a partial sum.
_EMBEDDING_BASE_US, _PARTIAL_ROWS, _PARTIAL_US = 60.0, 10, 0.12
_SORTED_INDICES = 3072  # from more indices on they are sorted
_FEW_ROWS, _FEW_SHARE = 64, 0.5
# Of the link: 22 GB/s in the H100 traces (PCIe 5), 8 to 12 in the A100's (PCIe 4). On MI300Xs 15 to 47 GB/s (PCIe 5): five
# copies of OWLv2 and Stable Diffusion in TraceLens's traces. The driver stages 64 KiB at once (CUDA's manual). Starts: 14
# kinds in the H100 traces, and six in the B200's; held out: small ones of the A100's, within 0.5 us.
_PAGEABLE, _STAGED_AT_ONCE = {"NVIDIA": 0.36, "AMD": 0.6}, 65_536
_PAGEABLE_START_US, _PINNED_START_US = 3.4, 2.2
_REL_STD = {"sum": 0.2, "batch_norm": 0.25, "embedding": 0.4, "host": 0.3}


class Latencies:
    """The four causes on one GPU."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`."""
        self._hardware = hardware
        self._bytes_per_us = hardware.mem_bandwidth_gbps * 1e3 * STREAMED

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the sums, batch norms, gradients of embeddings and unpinned copies among them."""
        return [self._estimate(signature) for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        if self._hardware.device == "cpu" or not signature.inputs:
            return None
        if base_name(signature.name) == "_local_scalar_dense":
            return Estimate(_PAGEABLE_START_US * 1e-3, "latency:host", _REL_STD["host"])
        if not signature.outputs:
            return None
        if crosses_to_host(signature):
            return Estimate(self._copy_us(signature) * 1e-3, "latency:host", _REL_STD["host"])
        if any(meta.place != "device" for meta in signature.inputs):
            return None
        base, kind = base_name(signature.name), family(signature.name)
        if kind == "reduction" and math.prod(signature.outputs[0].shape) < math.prod(signature.inputs[0].shape):
            return self._answer("sum", self._sum_us(signature))
        if base in _BATCH_NORMS:
            shortest = self._hardware.kernel_us * kernel_count(signature)
            return self._answer("batch_norm", max(shortest, self._batch_norm_us(signature, kind)))
        if base in ("embedding_dense_backward", "embedding_backward") and len(signature.inputs) > 1:
            return self._answer("embedding", self._embedding_us(signature))
        return None

    def _answer(self, cause: str, us: float) -> Estimate:
        return Estimate(max(us, self._hardware.kernel_us) * 1e-3, f"latency:{cause}", _REL_STD[cause])

    def _copy_us(self, signature: Signature) -> float:
        moved = max(tensor_bytes(signature.inputs), tensor_bytes(signature.outputs))
        pinned = bool(argument(signature, "non_blocking", False))
        direct = moved if pinned else min(moved, _STAGED_AT_ONCE)
        share = dict(self._hardware.efficiency).get("link", 0.8)
        bytes_per_us = self._hardware.pcie_gbps * 1e3
        pageable = _PAGEABLE.get(self._hardware.vendor, _PAGEABLE["NVIDIA"])
        start_us = _PINNED_START_US if pinned else _PAGEABLE_START_US
        return start_us + direct / (bytes_per_us * share) + (moved - direct) / (bytes_per_us * pageable)

    def _sum_us(self, signature: Signature) -> float:
        hardware = self._hardware
        moved = moved_bytes(signature, "reduction")
        rate, cycles = self._bytes_per_us, ROW_SUM_CYCLES
        if reduces_outer(signature):
            item = item_bytes(signature.inputs[0].dtype)
            issued = _OUTER_BYTES_A_CYCLE * item * hardware.sm_count * hardware.boost_mhz
            rate, cycles = min(rate, issued), _OUTER_CYCLES
        if moved < hardware.l2_bytes / 2:
            rate *= _CACHED
        return cycles / hardware.boost_mhz + moved / rate

    def _batch_norm_us(self, signature: Signature, kind: str) -> float:
        data = signature.inputs[0]
        known = argument(signature, "training", True) is False or "no_training" in signature.name
        passes = 2.0 if known and kind == "norm" else _BATCH_NORM_PASSES[kind]
        streamed = self._hardware.kernel_us + passes * tensor_bytes([data]) / self._bytes_per_us
        if known or data.dtype != "bfloat16" or len(data.shape) < 2 or data.stride[1] == 1:
            return streamed
        start, latency = _BATCH_NORM[kind]
        walked = math.ceil(math.prod(data.shape) / data.shape[1] / _BLOCK)
        turns = math.ceil(data.shape[1] / (2 * self._hardware.sm_count))
        return max(streamed, (start + walked * latency * turns) * _BATCH_NORM_MHZ / self._hardware.boost_mhz)

    def _embedding_us(self, signature: Signature) -> float:
        gradient, indices = signature.inputs[:2]
        table = signature.outputs[0]
        written, read = tensor_bytes([table]), tensor_bytes([gradient])
        us = (written + 3 * read) / self._bytes_per_us + self._hardware.kernel_us
        count, rows = math.prod(indices.shape), max(1, table.shape[0])
        if count <= _SORTED_INDICES:
            return us
        share = max(1 / rows, _FEW_SHARE if rows <= _FEW_ROWS else 0.0)
        return us + _EMBEDDING_BASE_US + count * share / _PARTIAL_ROWS * _PARTIAL_US
