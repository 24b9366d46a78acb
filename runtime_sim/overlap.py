"""Interference between computation and communication that share a GPU.

A collective's kernel holds streaming multiprocessors and memory bandwidth; a computation kernel beside it
runs slower, and the reverse. An `OverlapModel` says by which factor a kernel's duration stretches for as long
as a kernel of the other class runs on the same GPU (Moye section 6); the engine integrates the changing rates
over the kernel's life.

Leaves: `NoInterference`, and `ConstantOverlap`, one factor per pair of classes. A model that is learned from
signatures (Moye's features) is another subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import final

from autosac.errors import SimulationError
from autosac.trace import Signature


class OverlapModel(ABC):
    """Factors >= 1 by which durations stretch while computation and communication overlap on a GPU."""

    @abstractmethod
    def compute_slowdown(self, signature: Signature, inter_node: bool) -> float:
        """Of this operator, while a transfer inside the node (or between nodes) is under way."""

    @abstractmethod
    def communication_slowdown(self, kind: str, inter_node: bool) -> float:
        """Of a transfer of this kind (``"all_gather"``), while the GPU computes."""


@final
class NoInterference(OverlapModel):
    """Kernels of different classes do not disturb each other."""

    def compute_slowdown(self, signature: Signature, inter_node: bool) -> float:
        """Always 1."""
        return 1.0

    def communication_slowdown(self, kind: str, inter_node: bool) -> float:
        """Always 1."""
        return 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantOverlap(OverlapModel):
    """The same factors for every operator.

    `compute_intra` is the average slowdown of computation that was measured beside NVLink collectives on
    A100, H100 and MI200 training GPT and Llama models (18.9 %, 40 % at worst: "Characterizing
    Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning", arXiv 2507.03114). Between
    nodes NCCL needs fewer multiprocessors (8 to 16 of an H100's 132 for 400 Gbit/s a GPU): `compute_inter` is
    the share that is left to computation. Transfers inside the node lose to the memory traffic of
    computation, those between nodes are bound by the network card; these last two factors are assumptions.
    """

    compute_intra: float = 1.19
    compute_inter: float = 1.10
    communication_intra: float = 1.05
    communication_inter: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 1 <= value < float("inf"):
                raise SimulationError(f"overlap model: {field.name} is {value}; a slowdown is at least 1 and finite")

    def compute_slowdown(self, signature: Signature, inter_node: bool) -> float:
        """`compute_inter` or `compute_intra`."""
        return self.compute_inter if inter_node else self.compute_intra

    def communication_slowdown(self, kind: str, inter_node: bool) -> float:
        """`communication_inter` or `communication_intra`."""
        return self.communication_inter if inter_node else self.communication_intra
