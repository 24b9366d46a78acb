"""Parameters that FSDP has let go of: a unit that contains FSDP modules gathers theirs again before it recomputes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from autosac.integrations.recompute.entries import Observer


class Gathering:
    """Gathers the parameters of the FSDP modules inside a unit, one module after the other, as they are asked for.

    They stay gathered: the backward of these modules comes next, and FSDP lets go of them after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def gather(self, tensor: torch.Tensor, observer: Observer) -> bool:
        """Fill the memory of a parameter that has none at present; False if no FSDP module owns it."""
        distributed: Any = sys.modules.get("torch.distributed.fsdp")
        if distributed is None:
            return False
        for inner in self._module.modules():
            if isinstance(inner, distributed.FSDPModule):
                observer.gather(inner)
                inner.unshard()
                observer.gathered()
                if not is_empty(tensor):
                    return True
        return False


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory has been let go although it has elements."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
