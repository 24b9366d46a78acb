"""How to get at the model in a TorchTitan 0.3 job: by a checkpointing policy that decides for the whole model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing


class ModelPolicy(ActivationCheckpointing):
    """A policy that decides for a whole model part, and not block by block."""

    follows_plan = False
    _whole: nn.Module | None = None

    def apply(self, model: nn.Module) -> None:
        """Checkpoint `model`; an encoder inside it, which TorchTitan passes after the model itself, is no model of its own."""
        if self._whole is not None and any(model is inner for inner in self._whole.modules()):
            self.checkpoint_inner(model)
            return
        self._whole = model
        # As TorchTitan's policies do: forward and recomputation must find the same compiled variant.
        activation_checkpoint._disable_dynamo_lru_cache()
        self.checkpoint(model)

    def checkpoint_inner(self, model: nn.Module) -> None:
        """What the policy does to an encoder inside the model besides: nothing."""

    def checkpoint(self, model: nn.Module) -> None:
        """What the policy does to a model part."""
        raise NotImplementedError


@contextlib.contextmanager
def reaching_flux(config: Any) -> Iterator[None]:
    """The Trainer that is built inside obeys the policy of its configuration, if that is a `ModelPolicy`.

    TorchTitan's Flux asks whether there is a policy, and then checkpoints all its blocks itself.
    """
    flux = sys.modules.get("torchtitan.models.flux.parallelize")
    owner = getattr(config.activation_checkpoint, "_owner", None)
    if flux is None or not (isinstance(owner, type) and issubclass(owner, ModelPolicy)):
        yield
        return
    policy = config.activation_checkpoint.build(dump_folder=config.dump_folder)
    with mock.patch.object(flux, "apply_ac", policy.apply):
        yield
