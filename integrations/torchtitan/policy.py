"""The plugin for TorchTitan 0.3: an activation-checkpointing policy, chosen in a config function.

    from autosac.integrations.torchtitan import AutoSAC

    def llama3_8b_autosac() -> Trainer.Config:
        config = llama3_8b()
        config.activation_checkpoint = AutoSAC.Config(budget="68GiB")
        return config

TorchTitan's parallelize functions build the policy and apply it to each model part after tensor parallelism, before
compilation and FSDP. A policy does not know the job that it is for; so that a plan can be compared with the job's settings,
the configurations of the Trainers under construction are kept (`_remember_jobs`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC
from torchtitan.trainer import Trainer

from autosac.integrations.torchtitan.planning import RunningJob, plan_of_job
from autosac.integrations.torchtitan.policy_hook import ModelPolicy, reaching_flux
from autosac.titan.settings import python_job_settings


class AutoSAC(ModelPolicy):
    """Selective activation checkpointing by a plan: read from a file, or made before the model is parallelized."""

    follows_plan = True
    _own: FullAC | None = None  # TorchTitan's policy, if that is the plan

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """What is to be planned. `determinism_check` and `debug` do not count."""

        budget: str = ""
        """Memory a GPU may reserve: "68GiB", "70GB", or a share of the GPU such as "85%" (which is the default)."""

        plan: str = ""
        """A plan file, written by `autosac plan`, to apply instead of planning. Not together with budget."""

        solver: str = "pareto"
        """What decides operator by operator: "pareto", "ilp", "greedy" or "knapsack"."""

        curve: str = "staircase"
        """How the MILP models a module's trade-off of time against memory: "staircase" or "pwlf" (an upper bound)."""

        confidence: float = 0.0
        """Probability that the plan fits, such as 0.99; 0: no margin for prediction errors."""

        offload: bool = False
        """Allow offloading activations to host memory where that makes the step shorter."""

        chunk_loss: bool = False
        """Not in TorchTitan 0.3, which has a loss of its own for that: `ChunkedCELoss`."""

        gpu: str = ""
        """The GPU to plan for, as `autosac plan --gpu` takes it. Empty: the one that the job runs on."""

        observe: bool = False
        """Measure the first steps, compare them with the prediction, and write autosac_run.json into the dump folder."""

        observe_steps: int = 3
        """How many steps are measured, after two that are not."""

        replan: bool = False
        """After the measured steps, plan again with what they say; change to the new plan if the budget is missed or the step
        would be shorter by more than 2 %. Implies observe.
        """

    def checkpoint(self, model: nn.Module) -> None:
        """Make the model part obey the plan. Errors as of `planning.plan_of_job` and `eager.apply`."""
        from autosac.integrations.apply import apply, check_model
        from autosac.integrations.optimizer_slices import follow_slices

        job = self._running_job()
        plan = plan_of_job(job)
        if plan.settings.job_checkpointing:
            check_model(model, plan)
            follow_slices(plan)
            self._own = FullAC.Config(
                preserve_rng_state=plan.settings.preserve_rng_state,
                determinism_check=self.config.determinism_check,
                debug=self.config.debug,
            ).build(dump_folder=self.dump_folder)
            self._own.apply(model)
        else:
            apply(model, plan)
        if self.config.observe or self.config.replan:
            from autosac.integrations.torchtitan.observing import observe_part

            observe_part(job, model, plan)

    def checkpoint_inner(self, model: nn.Module) -> None:
        """TorchTitan's own checkpointing, where that is the plan."""
        if self._own is not None:
            self._own.apply(model)

    def _running_job(self) -> RunningJob:
        config, settings = _jobs[-1] if _jobs else (self.config, {})
        name, overrides = named_job(sys.argv[1:])
        return RunningJob(
            identity=config,
            section=self.config,
            name=name,
            overrides=tuple(overrides),
            settings=settings,
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            dump_folder=self.dump_folder,
        )


# (configuration, decisive settings) of each Trainer that is being built, the innermost last.
_jobs: list[tuple[Any, dict[str, str]]] = []


def _remember_jobs() -> None:
    original = Trainer.__init__
    if getattr(original, "_autosac", False):
        return

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        ours = isinstance(config.activation_checkpoint, AutoSAC.Config)
        _jobs.append((config, python_job_settings(config) if ours else {}))
        try:
            with reaching_flux(config):
                original(self, config, *args, **kwargs)
        finally:
            _jobs.pop()

    init._autosac = True  # type: ignore[attr-defined]
    Trainer.__init__ = init


def named_job(argv: Sequence[str]) -> tuple[str, list[str]]:
    """MODULE:CONFIG of TorchTitan's command line, and the rest of it. An empty name if the line has none."""
    chosen = {"--module": "", "--config": ""}
    rest: list[str] = []
    awaited = ""
    for argument in argv:
        option, equals, value = argument.partition("=")
        if awaited:
            chosen[awaited], awaited = argument, ""
        elif option not in chosen:
            rest.append(argument)
        elif equals:
            chosen[option] = value
        else:
            awaited = option
    return ":".join(chosen.values()) if all(chosen.values()) else "", rest


_remember_jobs()
