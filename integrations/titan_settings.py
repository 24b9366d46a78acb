"""The settings of a TorchTitan job that decide what is computed: what a plan is made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autosac.errors import PlanError

# What decides the computation, by section of the job file (None: all of it). Other settings (metrics, learning rate, data
# set, number of steps, ...) may differ between the job that was planned and the one that runs.
_DECISIVE: dict[str, tuple[str, ...] | None] = {
    "model": ("name", "flavor", "converters"),
    "training": (
        "local_batch_size", "seq_len", "global_batch_size", "dtype", "mixed_precision_param", "mixed_precision_reduce",
        "enable_cpu_offload",
    ),
    "parallelism": None,
    "optimizer": ("name", "implementation", "early_step_in_backward"),
    "compile": None,
}  # fmt: skip


def job_settings(config: Any) -> dict[str, str]:
    """The job's settings that decide what is computed, by their names in the job file."""
    return {
        f"{section}.{name}": str(getattr(getattr(config, section), name))
        for section, names in _DECISIVE.items()
        for name in names or [field.name for field in dataclasses.fields(getattr(config, section))]
        if hasattr(getattr(config, section), name)
    }


def check_settings(planned: Mapping[str, str], running: Mapping[str, str]) -> None:
    """PlanError that names the first setting in which the running job differs from the planned one."""
    for name, value in planned.items():
        if running.get(name, value) != value:
            raise PlanError(f"the plan was made for {name} = {value}; this job has {running[name]}")
