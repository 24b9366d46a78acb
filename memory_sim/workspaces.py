"""Device memory that a job occupies without any of its tensors: library workspaces.

Two kinds, and nothing here is fitted:

- **cuBLAS workspaces** stay. PyTorch gives every pair of (cuBLAS handle, stream) a workspace of its own from
  the caching allocator when the pair first multiplies matrices, and keeps it to the end of the process
  (``aten/src/ATen/cuda/CublasHandlePool.cpp``: `getCUDABlasWorkspace`). A handle belongs to a host thread: on
  CUDA the forward runs on the main thread and the backward, recomputation included, on autograd's device
  thread, so one stream has two of them (`on_autograd_thread`). cuBLASLt shares them. So it is in torch 2.7 to
  2.13; later releases allocate for each call.
- **Temporaries inside one operator**, which die with it: `internal_allocations.internal_allocations`.

The figures depend on the GPU and come from its hardware profile; `WorkspaceModel.for_gpu` has PyTorch's
defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autosac.errors import UsageError
from autosac.memory_sim.allocator_config import BLOCK_BYTES
from autosac.memory_sim.internal_allocations import internal_allocations
from autosac.trace import Event, GraphLaunch, Op, Phase, Signature, Trace
from autosac.trace.checks import IMPOSSIBLE_CALL, impossible_call

KIB = 1024
MIB = 1024 * KIB

CUBLAS_OPERATORS = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "_addmm_activation"),
        *("addmm_", "baddbmm_", "addbmm_", "addmv_", "matmul", "linear"),
    )
)
"""Overload packets whose CUDA kernels fetch a cuBLAS handle (``aten/src/ATen/native/cuda/Blas.cpp``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceModel:
    """What one GPU's libraries take.

    `cublas_bytes`: one workspace of a (host thread, stream) pair. `sm_count`, `compute_capability`: what
    kernels look at when they size their temporaries. `operator_temporaries`: count the temporaries inside
    operators.
    """

    cublas_bytes: int
    sm_count: int = 132
    compute_capability: tuple[int, int] = (9, 0)
    operator_temporaries: bool = True

    def __post_init__(self) -> None:
        """UsageError if a figure cannot be."""
        if self.cublas_bytes < 0 or self.sm_count < 1:
            raise UsageError(f"workspace figures must not be negative: {self}")

    @staticmethod
    def for_gpu(compute_capability: tuple[int, int], sm_count: int) -> WorkspaceModel:
        """PyTorch's defaults (``parseChosenWorkspaceSize``): 32 MiB from 9.0 on, else ":4096:2:16:8"."""
        large = 9 <= compute_capability[0] <= 12
        return WorkspaceModel(
            cublas_bytes=8 * 4096 * KIB if large else 2 * 4096 * KIB + 8 * 16 * KIB,
            sm_count=sm_count,
            compute_capability=compute_capability,
        )

    def op_workspace_blocks(self, signature: Signature) -> tuple[int, ...]:
        """Sizes (bytes) of what the operator's CUDA implementation allocates and frees within the call.

        SimulationError if no such operator can be called with such tensors.
        """
        if not self.operator_temporaries or signature.is_view:
            return ()
        try:
            return internal_allocations(signature, self.sm_count, self.compute_capability)
        except IMPOSSIBLE_CALL as e:
            raise impossible_call(signature) from e

    def op_workspace_bytes(self, signature: Signature) -> int:
        """Their sum, each rounded to the caching allocator's 512 bytes."""
        return sum(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES for nbytes in self.op_workspace_blocks(signature))


@functools.cache
def is_nameless(op: Op) -> bool:
    """Whether a trace names none of an operator's tensors: in a CUDA graph, one that was captured and allocates no more."""
    return max(op.inputs + op.outputs, default=-1) < 0


def replayed(events: Sequence[Event]) -> frozenset[int]:
    """The operators that a CUDA graph repeats."""
    found: list[int] = []
    for i, event in enumerate(events):
        if type(event) is GraphLaunch:
            inside = range(i + 1, min(i + 1 + event.events, len(events)))
            found += [j for j in inside if type(op := events[j]) is Op and is_nameless(op)]
    return frozenset(found)


@functools.cache
def is_matmul(op: str) -> bool:
    """Does an operator of this name (``"aten.mm.default"``) fetch a cuBLAS handle?"""
    namespace, _, rest = op.partition(".")
    return namespace == "aten" and rest.partition(".")[0] in CUBLAS_OPERATORS


def on_autograd_thread(phase: Phase) -> bool:
    """Backward and the recomputation in it run on autograd's thread, all else on the main thread."""
    return phase is Phase.BACKWARD or phase is Phase.RECOMPUTE


def matmul_signatures(trace: Trace) -> list[bool]:
    """Per signature of the trace: does it fetch a cuBLAS handle?"""
    return [is_matmul(signature.name) for signature in trace.signatures]
