"""Whether a module is called to be trained: what is called while modules are made is no step."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization


def trains(module: nn.Module) -> bool:
    """Whether a module that is called now is called to be trained."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()) and not _in_construction()


def _in_construction() -> bool:
    """Whether a module is being made or parametrized: parametrizations are tried then, sizes are found with an example."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_made = frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module)
        if is_made or frame.f_code is register_parametrization.__code__:
            return True
        frame = frame.f_back
    return False
