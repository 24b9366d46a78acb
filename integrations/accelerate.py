"""A plan for accelerate, as a plugin of an Accelerator:

    accelerator = AutoSAC(plan="plan.json").on(Accelerator(...))    # made by `autosac run --plan 60GiB -o plan.json train.py`
    accelerator = AutoSAC(budget="60GiB", batch=example, loss=lambda model, batch: model(**batch).loss).on(Accelerator(...))

The plan is applied by `accelerator.prepare`, to the model, before accelerate wraps it. With a budget it is made then, for one
GPU: the loss of the batch, with the Accelerator's precision and accumulation and the optimizer that is prepared beside the
model. Leave the activation checkpointing of accelerate's own plugins off: the plan does its work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch

import autosac
from autosac.errors import UsageError
from autosac.integrations.operators.calling import signature_of
from autosac.integrations.planned import PlanOrBudget, autocast, moved
from autosac.plans import Plan


class AutoSAC:
    """Applies a plan to the model that an Accelerator prepares.

    Args:
        plan: the plan, or the path of its file.
        budget: in place of a plan, the memory of the GPU that may be used: "68GiB", "85%".
        batch: a batch (needed with `budget`).
        loss: the loss of a model and a batch (with `budget`).
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
        loss: Callable[[Any, Any], torch.Tensor] = lambda model, batch: model(**batch).loss,
        gpu: str = "h100-sxm-80gb",
        **options: Any,
    ) -> None:
        self._planned = PlanOrBudget(plan, budget, batch, "a batch", gpu=gpu, **options)
        self._batch = batch
        self._loss = loss

    @property
    def plan(self) -> Plan | None:
        """The plan; None before it has been made."""
        return self._planned.plan

    def on(self, accelerator: Any) -> Any:
        """The same Accelerator, whose `prepare` applies the plan to the model that it gets."""
        prepare = accelerator.prepare

        @functools.wraps(prepare)
        def planned(*args: Any, **kwargs: Any) -> Any:
            models = [each for each in args if isinstance(each, torch.nn.Module)]
            optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
            if len(models) > 1:
                raise UsageError("several models are prepared at once: prepare the one with the plan by itself")
            for model in models:
                training = self.training(model, accelerator, optimizers[0] if optimizers else None)
                autosac.apply(model, self._planned.plan_for(training, accelerator.num_processes))
            return prepare(*args, **kwargs)

        accelerator.prepare = planned
        return accelerator

    def training(self, model: Any, accelerator: Any, optimizer: torch.optim.Optimizer | None) -> Any:
        """The loop's step as a `make_step`."""
        precision, accumulation = str(accelerator.mixed_precision), int(accelerator.gradient_accumulation_steps)

        def make_step(device: torch.device) -> Any:
            placed = model.to(device).train()
            stepping = None
            if optimizer is not None:
                made: Any = type(optimizer)
                takes = signature_of(made).parameters  # AdamW's defaults are those of Adam
                settings = {name: value for name, value in optimizer.defaults.items() if name in takes}
                stepping = made(placed.parameters(), **settings)

            def step() -> None:
                for _ in range(accumulation):
                    with autocast(device, precision):
                        loss = self._loss(placed, moved(self._batch, device))
                    (loss / accumulation).backward()
                if stepping is not None:
                    stepping.step()
                placed.zero_grad()

            return placed, step

        return make_step
