"""The settings of a TorchTitan job that decide what is computed: what a plan is made for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autosac.errors import PlanError, UsageError
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_toml, read_bounded
from autosac.target import TargetGPU

# What decides the computation, by section of the job file (None: all of it). Other settings (metrics, learning rate, data
# set, number of steps, ...) may differ between the job that was planned and the one that runs.
_DECISIVE: dict[str, tuple[str, ...] | None] = {
    "model": ("name", "flavor", "converters"),
    "training": (
        "local_batch_size",
        "seq_len",
        "global_batch_size",
        "dtype",
        "mixed_precision_param",
        "mixed_precision_reduce",
        "enable_cpu_offload",
    ),
    "parallelism": None,
    "optimizer": ("name", "implementation", "early_step_in_backward"),
    "compile": None,
}


# The same for the Python configurations of TorchTitan 0.3; the model, its loss and its optimizer are trees of components.
_DECISIVE_IN_PYTHON: dict[str, tuple[str, ...] | None] = {
    "model_spec": ("name", "flavor"),
    "training": (
        "local_batch_size",
        "seq_len",
        "global_batch_size",
        "dtype",
        "mixed_precision_param",
        "mixed_precision_reduce",
        "enable_cpu_offload",
        "disable_cuda_graphs",
    ),
    "parallelism": None,
    "optimizer": ("implementation",),
    "compile": None,
    "override": ("imports",),
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def job_settings(config: Any) -> dict[str, str]:
    """The settings of a TorchTitan 0.2 job that decide what is computed, by their names in the job file."""
    return _settings(config, _DECISIVE)


def python_job_settings(config: Any) -> dict[str, str]:
    """The settings of a TorchTitan 0.3 job that decide what is computed, by their names in its configuration.

    Ask before the Trainer is built: it completes the model's configuration from the others.
    """
    groups = [(group.pattern, group.optimizer_name) for group in config.optimizer.param_groups]
    return {
        **_settings(config, _DECISIVE_IN_PYTHON),
        "optimizer.param_groups": str(groups),
        "loss": _digest(config.loss),
        "model_spec.model": _digest(config.model_spec.model),
    }


def _settings(config: Any, decisive: Mapping[str, tuple[str, ...] | None]) -> dict[str, str]:
    return {
        f"{section}.{name}": str(getattr(getattr(config, section), name))
        for section, names in decisive.items()
        for name in names or [field.name for field in dataclasses.fields(getattr(config, section))]
        if hasattr(getattr(config, section), name)
    }


def _digest(component: Any) -> str:
    """The class of a component's configuration and a hash of all that is in it; the same in every process."""
    content = _ADDRESS.sub("", json.dumps(component.to_dict(), sort_keys=True, default=str))
    return f"{type(component).__qualname__} {hashlib.sha256(content.encode()).hexdigest()[:12]}"


def compiles_model(settings: Mapping[str, str]) -> bool:
    """Whether the job compiles its model, by the settings that decide what it computes."""
    return settings.get("compile.enable") == "True" and "model" in settings.get("compile.components", "model")


def check_compiles(gpu: TargetGPU, settings: Mapping[str, str]) -> None:
    """UsageError if the job compiles its model and PyTorch compiles nothing of that kind on this GPU."""
    if (
        compiles_model(settings)
        and settings.get("training.mixed_precision_param") == "bfloat16"
        and not gpu.has_bfloat16
    ):
        raise UsageError(
            f"{gpu.name} does not compute in bfloat16, and PyTorch compiles nothing in it there: leave compile.enable off,"
            " or set --training.mixed_precision_param float32"
        )


def asks_to_compile(config_file: str | None, overrides: Sequence[str]) -> bool | None:
    """Whether the job's file or arguments ask for a compiled model, as far as their text tells; None if it does not."""
    words = [word.partition("=")[0] for word in overrides if "compile." in word]
    if words:
        return True if all(word.endswith("compile.enable") for word in words) else None
    if config_file is None:
        return False
    if not config_file.endswith(".toml"):
        return None
    try:
        document = parse_toml(read_bounded(config_file, TEXT_BYTES))
    except (OSError, DocumentError):  # whoever reads the job says what is wrong with it
        return None
    section = document.get("compile")
    if not isinstance(section, dict):
        return False
    return bool(section.get("enable")) and "model" in str(section.get("components", "model"))


def check_settings(planned: Mapping[str, str], running: Mapping[str, str]) -> None:
    """PlanError that names the first setting in which the running job differs from the planned one."""
    for name, value in planned.items():
        if running.get(name, value) != value:
            raise PlanError(f"the plan was made for {name} = {value}; this job has {running[name]}")
