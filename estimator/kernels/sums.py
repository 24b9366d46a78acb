"""Sums, means and the like over some dimensions: the grid that PyTorch's Reduce.cuh would launch, and what it waits for.

`Grid.of` follows `setReduceConfig`. Where the fastest dimension is reduced, the lanes of a warp share a row, and warps take
rows of their own or share a long one. Otherwise threads hold four neighbouring columns and walk down them. If there are few
outputs, `ctas` blocks share each. They leave partial results in memory, which the last block adds up:

    walk    = max(1, blocks / resident) * (wave + wait * values of a thread / 4)
    sum     = start + (walk^p + (bytes / bandwidth)^p)^(1/p) + (meeting + link * links^0.9, if ctas > 1)

Down columns a block is only 4 rows high, so that one thread adds up a quarter of all partial results one by one. With 128
columns these `links` are 2,112 / 4: they take more time than reading 50 MB. p = 1.6, because reading and waiting overlap
only partly.

Fitted to 125 single calls of `autosac calibrate` and the even steps on an H100, judged on the odd ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autosac.estimator.kernels.streams import Streams
from autosac.estimator.work import argument, item_bytes, tensor_bytes
from autosac.memory_sim.tensor_sizes import elements
from autosac.trace import Signature, TensorMeta

_THREADS, _WARP, _VECTOR, _IN_FLIGHT = 512, 32, 4, 4
_LEAST_VALUES, _MOST_VALUES = 16, 256  # of a thread: PyTorch's own bounds
_START = 0.72  # of the shortest kernel
_WAVE_US, _WAIT_US, _MEETING_US, _LINK_US = 1.6, 0.141, 3.6, 0.47
_BATCHED, _OVERLAP = 0.9, 1.6  # exponents: of the links, some of which are under way together; p
_READ = 0.78  # of the peak bandwidth


class Grid(NamedTuple):
    """A grid: blocks of `threads`, each with `values` to add up, `ctas` of them for one output; `links`: partial results that
    a thread adds up at the end.
    """

    blocks: int
    threads: int
    values: int
    ctas: int
    links: int

    @staticmethod
    def of(data: TensorMeta, reduced: frozenset[int], processors: int) -> Grid:
        """The grid for a reduction over these dimensions."""
        across = _joined(data, [d for d in range(len(data.shape)) if d in reduced])
        kept = _joined(data, [d for d in range(len(data.shape)) if d not in reduced])
        outputs, inputs = math.prod(n for n, _ in kept), math.prod(n for n, _ in across)
        rows = not kept or not across or across[0][1] < kept[0][1]
        vector = 1
        if rows:
            first, second = (across[0][0] if across else 1), outputs
            if not kept and len(across) == 1 and first > 128 and across[0][1] == 1:
                first //= _VECTOR  # one output of contiguous memory: vectors along the input
        else:
            vector = _columns_at_once(kept)
            first, second = kept[0][0] // vector, inputs
        width, height = _block(first, second, _THREADS // vector)
        return _split(rows, width, height, vector, outputs, inputs, processors)


def _split(rows: bool, width: int, height: int, vector: int, outputs: int, inputs: int, processors: int) -> Grid:
    threads = width * height
    values = math.ceil(inputs / width) if rows else inputs
    shared = values >= min(height * _LEAST_VALUES, _MOST_VALUES)
    each = (1 if rows else width * vector) * (1 if shared else height)
    values = math.ceil(values / height) if shared else values
    grid = math.ceil(outputs / each)
    target = processors * (2048 // threads)
    ctas = 1
    if shared and values >= _MOST_VALUES and grid <= target:
        least = math.ceil(values / _MOST_VALUES)
        ctas = max(min(math.ceil(target / grid), math.ceil(values / _LEAST_VALUES)), least)
    links = math.ceil(ctas / (threads if rows else height)) if ctas > 1 else 0
    return Grid(grid * ctas, threads, math.ceil(values / ctas), ctas, links)


def _block(first: int, second: int, most: int) -> tuple[int, int]:
    """Width and height of a block."""
    x, y = (min(most, 1 << max(0, n.bit_length() - 1)) for n in (first, second))
    height = min(y, most // min(x, _WARP))
    return min(x, most // height), height


def _joined(data: TensorMeta, dims: list[int]) -> list[tuple[int, int]]:
    """Sizes and strides, fastest first, joined where one dimension continues another."""
    ordered = sorted(((data.shape[d], data.stride[d]) for d in dims if data.shape[d] > 1), key=lambda pair: pair[1])
    joined: list[tuple[int, int]] = []
    for size, stride in ordered:
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        else:
            joined.append((size, stride))
    return joined


def _columns_at_once(kept: list[tuple[int, int]]) -> int:
    """Neighbouring outputs of one thread: four, if all rows begin at such multiples."""
    if kept[0][1] != 1:
        return 1
    vector = _VECTOR
    while any(n % vector for n, _ in kept[:1]) or any(stride % vector for _, stride in kept[1:]):
        vector //= 2
    return max(1, vector)


def reduced_dims(signature: Signature) -> frozenset[int] | None:
    """The dimensions that a reduction is over; None if its arguments do not say."""
    dims, count = argument(signature, "dim"), len(signature.inputs[0].shape)
    if dims is None or dims == ():
        return frozenset(range(count)) if elements(signature.outputs[0]) == 1 else None
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple):
        return None
    return frozenset(d % count for d in dims if isinstance(d, int)) if count else None


def sum_us(streams: Streams, signature: Signature) -> float | None:
    """`sum`, `mean`, `amax` and others that read each element once."""
    data = signature.inputs[0]
    reduced = reduced_dims(signature)
    if reduced is None or elements(data) <= elements(signature.outputs[0]) or item_bytes(data.dtype) > 4:
        return None
    grid = Grid.of(data, reduced, streams.hardware.sm_count)
    return grid_us(streams, grid, tensor_bytes([data, signature.outputs[0]]))


def grid_us(streams: Streams, grid: Grid, nbytes: float) -> float:
    """The formula of the module's docstring."""
    waves = max(1.0, grid.blocks / streams.resident(grid.threads))
    walk = streams.slower * waves * (_WAVE_US + _WAIT_US * math.ceil(grid.values / _IN_FLIGHT))
    read = nbytes / (streams.peak_bytes_per_us * _READ)
    met = _MEETING_US + _LINK_US * grid.links**_BATCHED if grid.ctas > 1 else 0.0
    both = float((walk**_OVERLAP + read**_OVERLAP) ** (1 / _OVERLAP))
    return _START * streams.kernel_us + both + float(streams.slower * met)
