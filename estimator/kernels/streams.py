"""How fast one GPU fills, copies and waits for memory: what the rules of this package have in common."""

from __future__ import annotations

import numpy as np

from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.memory_bound import LearnedMemory
from autosac.estimator.streamed import Streamed
from autosac.estimator.work import STREAMED, moved_bytes
from autosac.trace import Signature, TensorMeta

# Of the peak bandwidth where memory is only written: nine gradients of a negative likelihood and 121 MB of zeros on an H100.
_FILLED = 0.974
# Of the shortest kernel in a step: zeros in `autosac calibrate`, one call after the other.
_START = 0.77
_FITTED = "h100-sxm-80gb"  # what single calls were measured on
_FITTED_MHZ = 1830.0  # its clock
_THREADS, _BLOCKS = 2048, 32  # that a processor holds at once


class Streams:
    """The memory of one GPU, as kernels see it. Times are in microseconds."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`."""
        self.hardware = hardware
        self.kernel_us = hardware.kernel_us
        self.peak_bytes_per_us = hardware.mem_bandwidth_gbps * 1e3
        self.bytes_per_us = self.peak_bytes_per_us * STREAMED
        self.elements_per_us = hardware.sm_count * hardware.boost_mhz
        """One element a cycle and processor."""
        self.slower = _FITTED_MHZ / hardware.boost_mhz
        """What a wait takes relative to an H100: latencies are cycles."""
        self.memory = LearnedMemory(hardware)
        """The model of memory-bound operators."""

    def cached_gain(self, nbytes: float) -> float:
        """What reading takes of a working set of so many bytes, relative to what rules say that were fitted on an H100 and
        know of no L2: less where the L2 is further ahead of the memory than there. At most 1.
        """
        own, fitted = (Streamed(hardware=gpu) for gpu in (self.hardware, load_hardware(_FITTED)))
        share = float(own.cached(np.array([nbytes]))[0])
        return min(1.0, own.relative(share) / fitted.relative(share))

    def plain_us(self, nbytes: float) -> float:
        """A contiguous elementwise kernel that moves this many bytes."""
        return max(self.kernel_us, float(self.memory.elementwise_ms(np.array([nbytes]))[0]) * 1e3)

    def fill_us(self, nbytes: float) -> float:
        """A kernel that writes this many bytes and reads none."""
        return max(self.kernel_us, _START * self.kernel_us + nbytes / (self.peak_bytes_per_us * _FILLED))

    def copy_us(self, source: TensorMeta, target: TensorMeta) -> float:
        """A copy into memory that is there, whatever the layouts."""
        return self.walked_us(Signature("aten.copy_.default", (target, source), (target,), mutates=(0,)))

    def walked_us(self, signature: Signature) -> float:
        """An elementwise kernel, however it walks its memory; on another vendor's GPU as if it were contiguous."""
        (answer,) = self.memory.estimate([signature])
        return answer.ms * 1e3 if answer is not None else self.plain_us(moved_bytes(signature, "elementwise"))

    def resident(self, threads: int) -> int:
        """Blocks of this many threads that run at once."""
        return self.hardware.sm_count * max(1, min(_BLOCKS, _THREADS // threads))

    def waves(self, blocks: int, threads: int) -> float:
        """How often a block's time passes until all are through: a grid of many blocks has no whole waves."""
        resident = self.resident(threads)
        return 1.0 if blocks <= resident else blocks / resident

    def missed(self, nbytes: float, cached: float) -> float:
        """The share of accesses that leave the L2 for memory: none below `cached` of its size, all beyond twice that."""
        return min(1.0, max(0.0, nbytes / (self.hardware.l2_bytes * cached) - 1.0))


def strip(meta: TensorMeta, dim: int) -> TensorMeta:
    """What `select` leaves of a tensor."""
    dim %= len(meta.shape)
    return meta._replace(
        shape=meta.shape[:dim] + meta.shape[dim + 1 :], stride=meta.stride[:dim] + meta.stride[dim + 1 :]
    )
