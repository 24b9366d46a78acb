"""The staging buffer of a reduction (``aten/src/ATen/native/cuda/Reduce.cuh``: `setReduceConfig`,
`global_memory_size`).

A reduction that has more inputs for each output than a thread block should add up splits them over several
blocks, which leave their partial results in global memory. If it reduces over rows (the fastest dimension is
kept: the gradient of a bias), every thread of a block has a slot of its own, so that summing 16,448 rows of
1,280 columns in half precision stages 132.5 MiB.

The rule reproduces the launch configuration: dimensions sorted and merged as TensorIterator does, the block's
width and height, vectors of four outputs, and the number of blocks for each output, from the GPU's
multiprocessors and their threads.
"""

from __future__ import annotations

from typing import NamedTuple

from autosac.memory_sim.tensor_sizes import elements
from autosac.trace import Signature

REDUCTIONS = frozenset({"sum", "mean", "nansum", "linalg_vector_norm", "norm"})
"""Operators whose accumulator is one number of `ACCUMULATOR_BYTES`."""
ACCUMULATOR_BYTES = {
    "float16": 4,
    "bfloat16": 4,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
}
MAX_THREADS = 512
VECTOR = 4
MIN_VALUES, MAX_VALUES = 16, 256
"""Values for each thread below which a reduction is not split, and from which it is."""
THREADS_PER_SM = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
"""Resident threads of a multiprocessor where they are not 2,048 (CUDA C++ Programming Guide, compute capabilities)."""


class _Dimension(NamedTuple):
    size: int
    stride: int


def reduction_buffers(signature: Signature, sm_count: int, capability: tuple[int, int]) -> tuple[int, ...]:
    """Bytes of the staging buffer and the semaphores of a reduction, () if it needs none."""
    source, result = signature.inputs[0], signature.outputs[0]
    accumulator = ACCUMULATOR_BYTES.get(source.dtype, 0)
    outputs = elements(result)
    if not accumulator or not outputs or not elements(source) or elements(source) >= 1 << 31:
        return ()
    reduced, kept = _dimensions(signature)
    inputs = elements(source) // outputs
    over_fastest = not kept or (bool(reduced) and reduced[0].stride < kept[0].stride)
    width, height, vector = _block(reduced, kept, inputs, outputs, over_fastest)
    step_input, step_output = (width, 1) if over_fastest else (1, width)
    values = -(-inputs // step_input)
    if not (values >= height * MIN_VALUES or values >= MAX_VALUES):
        return ()
    values = -(-inputs // (step_input * height))
    blocks = -(-(outputs // vector) // step_output)
    resident = sm_count * (THREADS_PER_SM.get(capability, 2048) // (width * height))
    if values < MAX_VALUES or blocks > resident:
        return ()
    split = max(min(-(-resident // blocks), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if split <= 1:
        return ()
    slots = outputs * split * (1 if over_fastest else width * vector)
    return slots * accumulator, blocks * 4


def _dimensions(signature: Signature) -> tuple[list[_Dimension], list[_Dimension]]:
    """Reduced and kept dimensions of the input, fastest first, merged where they can be."""
    source, result = signature.inputs[0], signature.outputs[0]
    rank = len(source.shape)
    axes = _axes(signature, rank)
    if len(result.shape) == rank and not axes:
        axes = {d for d in range(rank) if result.shape[d] != source.shape[d]}
    elif not axes:
        axes = set(range(rank))
    groups: tuple[list[_Dimension], list[_Dimension]] = ([], [])
    for is_kept in (False, True):
        found = [
            _Dimension(source.shape[d], source.stride[d])
            for d in range(rank)
            if (d not in axes) is is_kept and source.shape[d] > 1
        ]
        for dimension in sorted(found, key=lambda d: d.stride):
            group = groups[is_kept]
            if group and dimension.stride == group[-1].size * group[-1].stride:
                group[-1] = _Dimension(group[-1].size * dimension.size, group[-1].stride)
            else:
                group.append(dimension)
    return groups


def _axes(signature: Signature, rank: int) -> set[int]:
    """The axes that the call names; none means all."""
    named = dict(signature.arguments).get("dim")
    if isinstance(named, int):
        return {named % rank} if rank else set()
    if isinstance(named, tuple):
        return {axis % rank for axis in named if isinstance(axis, int)} if rank else set()
    return set()


def _block(
    reduced: list[_Dimension], kept: list[_Dimension], inputs: int, outputs: int, over_fastest: bool
) -> tuple[int, int, int]:
    """Width and height of a thread block, and outputs for each thread."""
    across, along = (inputs, outputs) if over_fastest else (outputs, inputs)
    vector = 1
    if over_fastest:
        if len(reduced) == 1 and reduced[0].stride == 1 and across > 128:
            across //= VECTOR
    elif kept[0].stride == 1:
        others = [d.stride for d in (*reduced, *kept[1:])]
        vector = VECTOR
        while kept[0].size % vector or any(stride % vector for stride in others):
            vector //= 2
        across //= vector
    threads = MAX_THREADS // vector
    widest, highest = min(_last_power(across), threads), min(_last_power(along), threads)
    width = min(widest, 32)
    height = min(highest, threads // width)
    return min(widest, threads // height), height, vector


def _last_power(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)
