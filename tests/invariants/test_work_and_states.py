"""However a job is divided among ranks, the work of all of them together and their parameters' bytes stay the same.

What is replicated, and hence counted once per replica:

- parameters, gradients and optimizer states of DDP and of HSDP's replicas;
- the norms' weights under tensor parallelism (all other parameters of llama3 are cut);
- nothing of the matrix products and of attention.

All jobs compute in bfloat16 (on one GPU and under DDP by autocast, which TorchTitan does not combine with TP or PP: these
are combined with FSDP here).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from autosac.estimator.work import work_of
from autosac.trace import Label, Phase, Trace

Ranks = Callable[..., list[Trace]]
COUNTED = ("matmul", "batched_matmul", "attention_forward", "attention_backward")
# The same global batch of 8 sequences, on one GPU and divided.
ALONE = (1, {"local_batch_size": 8})
SHARDINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP": (4, {"local_batch_size": 2}),
    "DDP": (4, {"local_batch_size": 2, "data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}),
    "HSDP": (4, {"local_batch_size": 2, "data_parallel_replicate_degree": 2}),
    "TP": (8, {"local_batch_size": 4, "tensor_parallel_degree": 4}),
    "CP, gathered": (4, {"local_batch_size": 8, "context_parallel_degree": 4}),
    "CP, passed on": (
        4,
        {"local_batch_size": 8, "context_parallel_degree": 4, "context_parallel_rotate_method": "alltoall"},
    ),
    "PP": (4, {"local_batch_size": 4, "pipeline_parallel_degree": 2}),
    "PP, two stages a rank": (
        4,
        {"local_batch_size": 4, "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    ),
    "FSDP, TP, PP": (8, {"local_batch_size": 4, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "FSDP, CP, TP": (8, {"local_batch_size": 4, "tensor_parallel_degree": 2, "context_parallel_degree": 2}),
}


def operations(traces: list[Trace], world_size: int) -> dict[tuple[str, Phase], float]:
    """FLOPs of matrix products and of attention by phase, of all ranks (each trace stands for equally many)."""
    total: dict[tuple[str, Phase], float] = {}
    for trace in traces:
        for _, op in trace.operators():
            signature = trace.signatures[op.signature]
            work = work_of(signature)
            if work.family in COUNTED:
                key = (work.family, op.phase)
                total[key] = total.get(key, 0.0) + work.flops * world_size / len(traces)
    return total


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_operations_are_conserved(ranks: Ranks, sharding: str) -> None:
    """Matrix products and attention of all ranks together are those of one GPU, in the forward and in the backward."""
    world_size, options = ALONE
    expected = operations(ranks(world_size, **options), world_size)
    assert {phase for _, phase in expected} == {Phase.FORWARD, Phase.BACKWARD}
    world_size, options = SHARDINGS[sharding]
    assert operations(ranks(world_size, **options), world_size) == expected


def resident_bytes(traces: list[Trace], label: Label, world_size: int) -> int:
    """Bytes of the storages with a label that all ranks hold between two steps."""
    held = (trace.storages[s] for trace in traces for s in trace.residents())
    return sum(storage.nbytes for storage in held if storage.label is label) * world_size // len(traces)


def elements(traces: list[Trace], norms: int) -> int:
    """Elements of all parameters, those of norms counted `norms` times."""
    shapes = {name: shape for trace in traces for name, shape in trace.info.parameter_shapes.items()}
    return sum(prod(shape) * (norms if "norm" in name else 1) for name, shape in shapes.items())


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_states_are_conserved(ranks: Ranks, sharding: str) -> None:
    """In float32, with Adam: 4 bytes of parameter, 4 of gradient and 8 of state for every element of every replica, and
    a step counter of 4 bytes for every parameter on every rank.
    """
    world_size, options = SHARDINGS[sharding]
    traces = ranks(world_size, **options)
    degrees = traces[0].info.parallelism
    whole = 4 * degrees.dp_replicate * elements(traces, norms=degrees.tp)
    counters = 4 * sum(len(trace.info.parameter_shapes) for trace in traces) * world_size // len(traces)
    assert resident_bytes(traces, Label.PARAMETER, world_size) == whole
    assert resident_bytes(traces, Label.GRADIENT, world_size) == whole
    assert resident_bytes(traces, Label.OPTIMIZER_STATE, world_size) == 2 * whole + counters
