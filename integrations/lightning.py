"""A plan for Lightning's Trainer, as a callback:

    Trainer(..., callbacks=[AutoSAC(plan="plan.json")])     # made by `autosac run --plan 60GiB -o plan.json train.py`
    Trainer(..., callbacks=[AutoSAC(budget="60GiB", batch=example)])

The plan is applied when `fit` begins, before the strategy wraps the LightningModule. With a budget it is made then, for one
GPU: the module's own `training_step` on the batch, with the Trainer's precision, accumulation and clipping and the module's
first optimizer.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from lightning.pytorch import Callback

import autosac
from autosac.integrations.planned import PlanOrBudget, autocast, moved
from autosac.plans import Plan


class AutoSAC(Callback):  # type: ignore[misc] # Lightning is not typed for us
    """Applies a plan to the LightningModule.

    Args:
        plan: the plan, or the path of its file.
        budget: in place of a plan, the memory of the GPU that may be used: "68GiB", "85%".
        batch: a batch as `training_step` gets it (needed with `budget`).
        gpu: the GPU's name (with `budget`).
        options: further arguments of `autosac.plan` (with `budget`).

    UsageError if neither or both are given, or for several GPUs with a budget; PlanError for a plan of another model.
    """

    def __init__(
        self,
        plan: Plan | str | PathLike[str] | None = None,
        *,
        budget: str | None = None,
        batch: Any = None,
        gpu: str = "h100-sxm-80gb",
        **options: Any,
    ) -> None:
        self._planned = PlanOrBudget(plan, budget, batch, "a batch", gpu=gpu, **options)
        self._batch = batch

    @property
    def plan(self) -> Plan | None:
        """The plan; None before it has been made."""
        return self._planned.plan

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """`fit` begins: apply the plan, after making it if there is only a budget."""
        if stage == "fit":
            autosac.apply(pl_module, self._planned.plan_for(self.training(pl_module, trainer), trainer.world_size))

    def training(self, module: Any, trainer: Any) -> Any:
        """The Trainer's step as a `make_step`."""
        precision, accumulation = str(trainer.precision), trainer.accumulate_grad_batches
        clipping = trainer.gradient_clip_val

        def make_step(device: torch.device) -> Any:
            moved_module = module.to(device).train()
            moved_module.log = moved_module.log_dict = lambda *_, **__: None  # there is no loop to log to
            optimizer = _first(moved_module.configure_optimizers())

            def step() -> None:
                for _ in range(accumulation):
                    with autocast(device, precision):
                        out = moved_module.training_step(moved(self._batch, device), 0)
                        loss = out["loss"] if isinstance(out, dict) else out
                    (loss / accumulation).backward()
                if clipping:
                    torch.nn.utils.clip_grad_norm_(moved_module.parameters(), clipping)
                optimizer.step()
                optimizer.zero_grad()

            return moved_module, step

        return make_step


def _first(configured: Any) -> Any:
    """The first optimizer of what `configure_optimizers` returns."""
    if isinstance(configured, dict):
        return _first(configured["optimizer"])
    if isinstance(configured, (list, tuple)):
        return _first(configured[0])
    return configured
