"""How long blocks and tiles of attention kernels take, for `tiled_attention`.

cuDNN and FlashAttention-2 on Hopper: fitted to PyTorch's own kernels one by one on an H200 (`benchmarks/gpu/products.py`, 18
sizes each way, with and without a causal mask). Such calls are bursts of one kernel. In steps cuDNN's forwards start 4 us
later (the even jobs of an H100's profiled steps), and FlashAttention-2's tiles take 7 % longer: without that, the H100
study's causal steps in 16 bits were 3 % too fast, its others 1.5 %. Held out: the H100's odd jobs and an H200's
(`benchmarks/step_kinds`), NVIDIA's table of an H200, pages about FlashAttention-2 (whose authors' build is 4 % faster), and
TorchTitan's published runs. `benchmarks/hopper_attention.py` prints all but the runs, and fits again. FlashAttention-2 has
these times from 512 keys on; `block_attention` has fewer. Heads of 192 are half way between 128 and 256. Dropout and bias:
from the H100's steps, cuDNN's; FlashAttention-2's dropout is an estimate.

FlashAttention-2 on Blackwell: a B200's processors take as long as Hopper's for backwards and 3 % longer for forwards' tiles
(issue 1589 of Dao-AILab/flash-attention, pull request 171 of tritonbench; `benchmarks/flash_attention.py`).

cuDNN on Blackwell: fitted to NVIDIA's table of a GB200 (Llama 3.1, Kimi K2.6, gpt-oss, Qwen3.5) up to 16,384 positions; held
out: its other models, its longer sequences, and two tables of B200s (`benchmarks/cudnn_attention.py`,
`benchmarks/flash_attention.py`). Blackwell Ultra (compute capability 10.3) has twice the exponentials: its tiles are as much
faster as Llama's and Kimi's are in the same table. Dropout and bias were not measured on Blackwell, nor backwards with heads
of 256: they are as on Hopper.

FlashAttention-3 on Hopper and 4 on Blackwell: as cuDNN's of the paper's time on Hopper and as today's on Blackwell, but for
tiles that their authors' pages show to be others: heads of 256 forward and of 64 backward (paper of FlashAttention-3), heads
of 64 and 128 on a B200 (pull requests 2605 and 2280 of Dao-AILab/flash-attention). Held out: FlashAttention-3 with heads of
128 (paper).

Flexible attention, which is a Triton kernel: fitted to PyTorch's own table of an H100 (pytorch/pytorch, pull request 135505,
the backwards from 1,024 positions on: shorter ones waited for the host); held out: pull request 2443 of pytorch/benchmark
(`benchmarks/flex_attention.py`). Blackwell's tiles: two forwards of pull request 188644. Heads that are no power of two are
padded; those wider than 128 go on as 64 and 128 begin, which was not measured.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from autosac.estimator.hardware import Hardware


class BlockTimes(NamedTuple):
    """Microseconds of one direction on one processor, and the factors of dropout, bias and diagonal tiles.

    `tiles`: of one tile with heads of up to 64, 128, 192 and more. `by_size`: what a block of heads of 128 takes beside
    `block`, which other heads take by their size. `dealt`: a processor that becomes free takes the next block, of each head
    in the order of positions; if not, the work is even. `in_pairs`: without a mask a processor takes two blocks at a time,
    and the last round of them as long as any.
    """

    start: float
    block: float
    tiles: tuple[float, float, float, float]
    dropout: float
    bias: float
    diagonal: float
    in_pairs: bool = False
    dealt: bool = False
    by_size: float = 0.0

    def tile(self, head_size: int) -> float:
        """Microseconds of a tile."""
        return self.tiles[bisect_left(_WIDEST, head_size)]


_WIDEST = (64, 128, 192)


class AttentionKernels(NamedTuple):
    """Attention's kernels on one generation of GPUs: the profile that they were measured on, forward and backward."""

    measured_on: str
    forward: BlockTimes
    backward: BlockTimes


_CUDNN_HOPPER = AttentionKernels(
    "h200-sxm-141gb",
    BlockTimes(7.5, 1.39, (1.08, 1.59, 2.29, 2.99), dropout=2.73, bias=3.15, diagonal=1.16, dealt=True),
    BlockTimes(25.8, 0.0, (2.81, 4.29, 8.22, 12.15), dropout=1.19, bias=3.23, diagonal=1.10, dealt=True, by_size=5.11),
)
_CUDNN_BLACKWELL = AttentionKernels(
    "gb200-186gb",
    BlockTimes(8.5, 2.29, (0.394, 0.668, 0.860, 1.303), dropout=2.73, bias=3.15, diagonal=2.46, in_pairs=True),
    BlockTimes(22.6, 2.93, (1.340, 2.126, 3.241, 5.190), dropout=1.19, bias=3.23, diagonal=0.98),
)
_CUDNN_ULTRA = (0.83, 0.90)  # Blackwell Ultra's tiles, forward and backward, relative to Blackwell's
_NEWER_HOPPER = AttentionKernels(
    "h100-sxm-80gb",
    BlockTimes(6.2, 2.73, (1.084, 1.593, 2.611, 3.731), dropout=2.73, bias=3.15, diagonal=0.92),
    BlockTimes(23.6, 2.90, (2.84, 4.747, 8.045, 11.67), dropout=1.19, bias=3.23, diagonal=1.26),
)
_NEWER_BLACKWELL = AttentionKernels(
    "b200-sxm-180gb",
    _CUDNN_BLACKWELL.forward._replace(tiles=(0.46, 0.685, 0.950, 1.440)),
    _CUDNN_BLACKWELL.backward._replace(tiles=(1.490, 2.210, 3.600, 5.770)),
)
_FLASH_HOPPER = AttentionKernels(
    "h200-sxm-141gb",
    BlockTimes(0.0, 1.94, (1.76, 3.09, 4.68, 6.28), dropout=1.3, bias=1.0, diagonal=1.78, dealt=True),
    BlockTimes(6.4, 5.19, (4.67, 8.60, 14.50, 20.41), dropout=1.2, bias=1.0, diagonal=0.81, dealt=True),
)
_FLASH_BLACKWELL = (1.03, 1.0)  # a processor's tiles relative to Hopper's, forward and backward
IN_STEPS = 1.07  # FlashAttention-2's tiles in training steps, relative to bursts of one kernel
_FLEX_HOPPER = AttentionKernels(
    "h100-sxm-80gb",
    BlockTimes(9.2, 3.66, (1.257, 2.801, 4.345, 5.889), dropout=1.0, bias=1.0, diagonal=2.51),
    BlockTimes(20.0, 18.5, (4.358, 8.419, 12.48, 16.54), dropout=1.0, bias=1.0, diagonal=2.86),
)
_FLEX_BLACKWELL = 0.943  # a processor's tiles relative to Hopper's


def kernels_of(hardware: Hardware, backend: str) -> AttentionKernels | None:
    """What is known of the kernels of "cudnn", "newer" (FlashAttention-3 and 4), "flash" (2) or "flex" on a GPU."""
    generation, revision = hardware.compute_capability
    if hardware.vendor != "NVIDIA" or generation not in (9, 10):
        return None
    hopper, blackwell = _KNOWN[backend]
    if generation == 9:
        return hopper
    return _faster(blackwell, *_CUDNN_ULTRA) if backend == "cudnn" and revision >= 3 else blackwell


def _faster(kernels: AttentionKernels, forward: float, backward: float) -> AttentionKernels:
    """With tiles that take these shares of the time."""

    def scaled(times: BlockTimes, share: float) -> BlockTimes:
        first, second, third, fourth = (share * us for us in times.tiles)
        return times._replace(tiles=(first, second, third, fourth))

    return kernels._replace(forward=scaled(kernels.forward, forward), backward=scaled(kernels.backward, backward))


_B200 = "b200-sxm-180gb"
_KNOWN = {
    "cudnn": (_CUDNN_HOPPER, _CUDNN_BLACKWELL),
    "newer": (_NEWER_HOPPER, _NEWER_BLACKWELL),
    "flash": (
        _faster(_FLASH_HOPPER, IN_STEPS, IN_STEPS),
        _faster(_FLASH_HOPPER, *(IN_STEPS * share for share in _FLASH_BLACKWELL))._replace(measured_on=_B200),
    ),
    "flex": (_FLEX_HOPPER, _faster(_FLEX_HOPPER, _FLEX_BLACKWELL, _FLEX_BLACKWELL)._replace(measured_on=_B200)),
}
BACKENDS = tuple(_KNOWN)
