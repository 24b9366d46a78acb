"""How long blocks and tiles of attention kernels take, for `tiled_attention`.

cuDNN on Hopper: fitted to the even steps on an H100 (`benchmarks/step_kinds`, 10 kinds each way, heads of 256 among them)
and to NVIDIA's table of an H200 up to 8,192 keys; held out: the odd steps and the longer half of the table. The paper of
FlashAttention-3 has older kernels of cuDNN's, which took 1.4 times as long with heads of 256.

cuDNN on Blackwell: fitted to NVIDIA's table of a GB200 (Llama 3.1, Kimi K2.6, gpt-oss, Qwen3.5) up to 16,384 positions; held
out: its other models, its longer sequences, and two tables of B200s (`benchmarks/cudnn_attention.py`,
`benchmarks/flash_attention.py`). Blackwell Ultra (compute capability 10.3) has twice the exponentials: its tiles are as much
faster as Llama's and Kimi's are in the same table. Dropout and bias were not measured on Blackwell, nor backwards with heads
of 256: they are as on Hopper.

FlashAttention-3 on Hopper and 4 on Blackwell: as cuDNN's, but for tiles that their authors' pages show to be others: heads
of 256 forward and of 64 backward (paper of FlashAttention-3), heads of 64 and 128 on a B200 (pull requests 2605 and 2280 of
Dao-AILab/flash-attention). Held out: FlashAttention-3 with heads of 128 (paper).

FlashAttention-2 from 512 keys on (`block_attention` has fewer): fitted to what the paper of FlashAttention-3 says of it on
an H100 (no mask), to a page of FlashAttention's (pull request 2688: forwards, heads of 64) and, for the diagonal, to two
causal forwards (pull request 2443 of pytorch/benchmark); held out: the other forwards of that, the page's backwards, and
backwards on a B200, whose processors take as long as Hopper's; its forwards take a little longer (both
`benchmarks/flash_attention.py`). Heads of 192 and backwards with heads above 128 go on as the narrower ones begin; the
diagonal of backwards is as cuDNN's. All these are bursts of one kernel. In steps its tiles take 7 % longer: without that,
the H100 study's causal steps in 16 bits were 3.0 % too fast, its others 1.5 %, and TorchTitan's published ones, which were
held out, 3 to 7 %.

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

    `tiles`: of one tile with heads of up to 64, 128, 192 and more. `in_pairs`: without a mask a processor takes two blocks at
    a time, and the last round of them as long as any.
    """

    start: float
    block: float
    tiles: tuple[float, float, float, float]
    dropout: float
    bias: float
    diagonal: float
    in_pairs: bool = False

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
    "h100-sxm-80gb",
    BlockTimes(6.2, 2.73, (1.084, 1.593, 2.611, 2.611), dropout=2.73, bias=3.15, diagonal=0.92),
    BlockTimes(23.6, 2.90, (3.098, 4.747, 8.045, 8.045), dropout=1.19, bias=3.23, diagonal=1.26),
)
_CUDNN_BLACKWELL = AttentionKernels(
    "gb200-186gb",
    BlockTimes(8.5, 2.29, (0.394, 0.668, 0.860, 1.303), dropout=2.73, bias=3.15, diagonal=2.46, in_pairs=True),
    BlockTimes(22.6, 2.93, (1.340, 2.126, 3.241, 5.190), dropout=1.19, bias=3.23, diagonal=0.98),
)
_CUDNN_ULTRA = (0.83, 0.90)  # Blackwell Ultra's tiles, forward and backward, relative to Blackwell's
_NEWER_HOPPER = _CUDNN_HOPPER._replace(
    forward=_CUDNN_HOPPER.forward._replace(tiles=(1.084, 1.593, 2.611, 3.731)),
    backward=_CUDNN_HOPPER.backward._replace(tiles=(2.84, 4.747, 8.045, 11.67)),
)
_NEWER_BLACKWELL = AttentionKernels(
    "b200-sxm-180gb",
    _CUDNN_BLACKWELL.forward._replace(tiles=(0.46, 0.685, 0.950, 1.440)),
    _CUDNN_BLACKWELL.backward._replace(tiles=(1.490, 2.210, 3.600, 5.770)),
)
_FLASH_HOPPER = AttentionKernels(
    "h100-sxm-80gb",
    BlockTimes(7.0, 2.11, (1.667, 2.925, 5.3, 7.6), dropout=1.3, bias=1.0, diagonal=1.75),
    BlockTimes(20.0, 4.14, (4.632, 8.556, 12.5, 16.4), dropout=1.2, bias=1.0, diagonal=1.26),
)
_FLASH_BLACKWELL = (1.09, 1.0)  # a processor's tiles relative to Hopper's, forward and backward
_IN_STEPS = 1.07  # tiles of FlashAttention-2 in training steps, relative to bursts of it
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
        _faster(_FLASH_HOPPER, _IN_STEPS, _IN_STEPS),
        _faster(_FLASH_HOPPER, *(_IN_STEPS * share for share in _FLASH_BLACKWELL))._replace(measured_on=_B200),
    ),
    "flex": (_FLEX_HOPPER, _faster(_FLEX_HOPPER, _FLEX_BLACKWELL, _FLEX_BLACKWELL)._replace(measured_on=_B200)),
}
BACKENDS = tuple(_KNOWN)
