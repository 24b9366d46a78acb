"""What differs between versions of TorchTitan, as one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from autosac.capture.request import TitanRequest
from autosac.errors import UsageError

Transform: TypeAlias = Callable[[torch.nn.Module], None]
Attributes: TypeAlias = "dict[str, Any]"
"""What distinguishes a layer from another: path to a hashable value."""


class JobDescription(NamedTuple):
    """What a job's configuration says of its model and checkpointing, for the trace's info. `validates`: its validation is
    left out. `own`: the checkpointing that it asks for by itself, whatever is captured. `notes`: what else the report says.
    """

    model: str
    checkpointing: str
    preserve_rng_state: bool
    early_stop: bool
    loss_chunks: int = 1
    validates: bool = False
    own: str = "none"
    notes: tuple[str, ...] = ()


def planned_by_itself(plan: str) -> UsageError:
    """The error for a request of the step of a job as it is, if the job follows a plan: one in a file, or one of its own."""
    given = f"--plan {plan}" if plan else "--plan with one"
    return UsageError(f"the job is checkpointed by a plan: give {given}, or --ac for another way")


class TitanAdapter(Protocol):
    """What differs between versions of TorchTitan. `Any` is the job's configuration, or its Trainer."""

    def parse(self, request: TitanRequest) -> Any:
        """The job's configuration, with the checkpointing that is asked for. UsageError in one line if it is wrong."""

    def settings(self, config: Any) -> dict[str, str]:
        """The settings that decide what is computed."""

    def build(self, config: Any, transform: Transform | None) -> Any:
        """The Trainer, with synthetic data and `transform` in place of the job's checkpointing (None: as the job says)."""

    def layers(self, config: Any) -> list[Attributes]:
        """What distinguishes each of the model's layers; empty if it has none that can be left out."""

    def classes(self, config: Any) -> set[type]:
        """The classes of the model's modules, as far as they show before it is built."""

    def with_layers(self, config: Any, count: int) -> Any:
        """The configuration with the first `count` layers only. CaptureError if the model has no such layers."""

    def alone(self, config: Any, layers: int, device: torch.device) -> Callable[[], torch.Tensor] | None:
        """The forward of the model's first layers on a batch of the job, without any parallelism, in the types that it has
        under FSDP. None where the adapter cannot build that.
        """

    def describe(self, config: Any) -> JobDescription:
        """What the job's configuration says of its model and checkpointing."""
