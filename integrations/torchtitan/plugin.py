"""The plugin for TorchTitan 0.2: a job's ``[autosac]`` section decides what is done where TorchTitan checkpoints (`hook`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from autosac.integrations.torchtitan import hook
from autosac.plans import Plan
from autosac.titan.settings import job_settings

if TYPE_CHECKING:
    from autosac.integrations.torchtitan.planning import RunningJob

_CONFIG_FILE = ("--job.config_file", "--job.config-file")


def install() -> None:
    """From now on jobs obey their section."""
    hook.install(_job_transform, _loss_chunks, _built)


def _running(job_config: Any, parallel_dims: Any) -> RunningJob:
    from autosac.integrations.torchtitan.planning import RunningJob

    return RunningJob(
        identity=job_config,
        section=job_config.autosac,
        name=job_config.job.config_file or "",
        overrides=tuple(job_arguments(sys.argv[1:])),
        settings=job_settings(job_config),
        world_size=parallel_dims.world_size,
        dump_folder=job_config.job.dump_folder,
    )


def _plan(job_config: Any, parallel_dims: Any) -> Plan | None:
    """The plan that the job's section asks for; None if it asks for none."""
    section = getattr(job_config, "autosac", None)
    if section is None or not section.enable:
        return None
    from autosac.integrations.torchtitan.planning import plan_of_job

    return plan_of_job(_running(job_config, parallel_dims))


def _built(job_config: Any, parallel_dims: Any, model: nn.Module) -> None:
    section = getattr(job_config, "autosac", None)
    if section is not None and (section.observe or section.replan):
        from autosac.integrations.torchtitan.observing import observe_part

        observe_part(_running(job_config, parallel_dims), model, _plan(job_config, parallel_dims))


def _loss_chunks(job_config: Any, parallel_dims: Any) -> int:
    plan = _plan(job_config, parallel_dims)
    return 1 if plan is None else plan.settings.loss_chunks


def _job_transform(job_config: Any, parallel_dims: Any) -> hook.Transform | hook.OwnCheckpointing | None:
    plan = _plan(job_config, parallel_dims)
    if plan is None:
        return None
    from torchtitan.tools.logging import logger

    from autosac.integrations.apply import apply, check_model
    from autosac.integrations.optimizer_slices import follow_slices

    own = plan.settings
    if own.job_checkpointing:

        def check(model: nn.Module) -> None:
            check_model(model, plan)
            follow_slices(plan)

        rng, early = own.preserve_rng_state, own.early_stop
        values = {"mode": own.job_checkpointing, "preserve_rng_state": rng, "early_stop": early}
        return hook.OwnCheckpointing(check=check, values=values)
    if job_config.activation_checkpoint.mode != "none":
        logger.info(f"AutoSAC replaces activation_checkpoint.mode = {job_config.activation_checkpoint.mode}")

    def follow(model: nn.Module) -> None:
        apply(model, plan)

    return follow


def job_arguments(argv: Sequence[str]) -> list[str]:
    """The command line without the job file: TorchTitan's overrides."""
    rest: list[str] = []
    skip = False
    for argument in argv:
        if skip:
            skip = False
        elif argument in _CONFIG_FILE:
            skip = True
        elif not argument.startswith(tuple(f"{name}=" for name in _CONFIG_FILE)):
            rest.append(argument)
    return rest
