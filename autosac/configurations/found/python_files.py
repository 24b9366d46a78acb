"""The best configuration of a TorchTitan 0.3 job, as a Python file with a function that changes the job's own.

    def llama3_8b_autosac():
        config = llama3_8b()
        config.training.local_batch_size = 4
        ...
        return config

TorchTitan takes it as ``--module FILE --config llama3_8b_autosac``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autosac.errors import UsageError
from autosac.titan.python_jobs import PythonJob

_POLICIES = {"full": "FullAC", "selective-op": "SelectiveAC"}


def check_python_file(path: Path) -> None:
    """UsageError if TorchTitan could not import a file of this name."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UsageError(f"-o {path}: TorchTitan 0.3 takes configurations in Python: name the file such as best.py")


def config_name(job: PythonJob) -> str:
    """The name of the function that is written."""
    return f"{job.function}_autosac"


def written_python_job(job: PythonJob, settings: Mapping[str, Any], checkpointing: str, plan_file: str | None) -> str:
    """The text of the file: what the arguments set, the layout's settings, and the way of checkpointing."""
    imports = [f"from {job.module} import {job.function}"]
    common = "".join(f", {name}={value!r}" for name, value in job.checkpointing.items())
    if checkpointing == "none":
        policy = "None"
    elif checkpointing == "autosac":
        assert plan_file is not None
        imports.insert(0, "from autosac.integrations.torchtitan import AutoSAC")
        policy = f"AutoSAC.Config(plan={plan_file!r}{common})"
    else:
        name = _POLICIES[checkpointing]
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {name}")
        policy = f"{name}.Config({common.removeprefix(', ')})"
    lines = [f"    config.{name} = {value!r}" for name, value in {**job.given, **settings}.items()]
    return "\n".join(
        [
            f'"""{job.function} with the fastest settings that autosac search found."""',
            "",
            *imports,
            "",
            "",
            f"def {config_name(job)}():",
            f"    config = {job.function}()",
            *lines,
            f"    config.activation_checkpoint = {policy}",
            "    return config",
            "",
        ]
    )
