"""A plan for Hugging Face's Trainer, as a callback:

    Trainer(..., callbacks=[AutoSAC(plan="plan.json")])     # made by `autosac run --plan 60GiB -o plan.json train.py`
    Trainer(..., callbacks=[AutoSAC(budget="60GiB", length=4096)])

The plan is applied when the Trainer has been made, before it wraps the model in DDP or FSDP or compiles it. With a budget it
is made then, for one GPU: the model's own step, with the Trainer's batch size, precision and optimizer, on token sequences of
`length`. Leave ``gradient_checkpointing`` off: the plan does its work.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

import autosac
from autosac.integrations.planned import PlanOrBudget, autocast
from autosac.plans import Plan


class AutoSAC(TrainerCallback):  # type: ignore[misc] # transformers is not typed for us
    """Applies a plan to the Trainer's model.

    Args:
        plan: the plan, or the path of its file.
        budget: in place of a plan, the memory of the GPU that may be used: "68GiB", "85%".
        length: number of tokens of a sequence (needed with `budget`).
        gpu: the GPU's name (with `budget`).
        options: further arguments of `autosac.plan` (with `budget`).

    UsageError if neither or both are given, or for several GPUs with a budget; PlanError for a plan of another model.
    """

    def __init__(
        self,
        plan: Plan | str | PathLike[str] | None = None,
        *,
        budget: str | None = None,
        length: int | None = None,
        gpu: str = "h100-sxm-80gb",
        **options: Any,
    ) -> None:
        self._planned = PlanOrBudget(plan, budget, length, "the length of the sequences", gpu=gpu, **options)
        self._length = length or 0

    @property
    def plan(self) -> Plan | None:
        """The plan; None before it has been made."""
        return self._planned.plan

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """The Trainer has been made: apply the plan, after making it if there is only a budget."""
        autosac.apply(model, self._planned.plan_for(self.training(model, args), args.world_size))

    def training(self, model: Any, args: Any) -> Any:
        """The Trainer's step as a `make_step`: its model, precision, accumulation and optimizer, on made-up tokens."""
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else ""

        def make_step(device: torch.device) -> Any:
            moved = model.to(device).train()
            optimizer = optimizer_class(moved.parameters(), **settings)
            vocabulary = moved.get_input_embeddings().num_embeddings

            def step() -> None:
                for _ in range(args.gradient_accumulation_steps):
                    shape = (int(args.per_device_train_batch_size), self._length)
                    tokens = torch.randint(0, vocabulary, shape).to(device)
                    with autocast(device, precision):
                        loss = moved(input_ids=tokens, labels=tokens).loss / args.gradient_accumulation_steps
                    loss.backward()
                if args.max_grad_norm:
                    torch.nn.utils.clip_grad_norm_(moved.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()

            return moved, step

        return make_step
