"""A plan that is given, or that is made for a budget: what the callbacks and plugins for frameworks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch

import autosac
from autosac.errors import UsageError
from autosac.plans import Plan

MIXED = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "fp16": torch.float16, "16-mixed": torch.float16}
"""What frameworks call autocast's types."""


class PlanOrBudget:
    """`plan` is a plan, the path of its file, or None until it is made for the `budget`.

    UsageError if neither or both are given, or not what a budget `needs` besides.
    """

    def __init__(
        self,
        plan: Plan | str | PathLike[str] | None,
        budget: str | None,
        needed: object,
        needs: str,
        **options: Any,
    ) -> None:
        if (plan is None) == (budget is None):
            raise UsageError("give either a plan or a budget")
        if budget is not None and needed is None:
            raise UsageError(f"a plan for a budget needs {needs}")
        self.plan = plan if plan is None or isinstance(plan, Plan) else Plan.load(str(plan))
        self._options = {"budget": budget, **options}

    def plan_for(self, make_step: Callable[[torch.device], Any], world_size: int) -> Plan:
        """The plan; with a budget the one for this step. UsageError with a budget for several GPUs."""
        if self.plan is None:
            if world_size > 1:
                raise UsageError("several GPUs: make the plan with autosac run --plan, and give its file")
            self.plan = autosac.plan(make_step, **self._options)
        return self.plan


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast on this device, if a framework means that by this name."""
    dtype = MIXED.get(precision)
    return torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()


def moved(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch on a device."""
    return torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)
