"""Which TorchTitan is installed, and how it names a job. Imports nothing heavy.

TorchTitan 0.2 takes a job file (TOML); 0.3 takes a function that returns a configuration, named on its command line as
``--module MODULE --config CONFIG``, here ``MODULE:CONFIG``. This is the only place that asks for the version.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autosac.errors import UsageError
from autosac.titan.registry import check_python_job

IN_CHUNKS_BY_ITSELF = "TorchTitan 0.3 computes losses in chunks itself: choose ChunkedCELoss in the configuration"
_PYTHON_JOB = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<config>[A-Za-z_]\w*)")


def installed_version() -> str:
    """The version of the installed torchtitan. UsageError if there is none."""
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        raise UsageError(
            "torchtitan is not installed: pip install torchtitan==0.2.2 for job files (TOML), ==0.3.0 for MODULE:CONFIG"
        ) from None


def has_python_jobs() -> bool:
    """Whether the installed TorchTitan's jobs are Python configurations (0.3) and not files (0.2)."""
    major, minor = re.findall(r"\d+", installed_version())[:2]
    return (int(major), int(minor)) >= (0, 3)


def split_python_job(job: str) -> tuple[str, str]:
    """MODULE and CONFIG of ``MODULE:CONFIG``. UsageError for anything else."""
    match = _PYTHON_JOB.fullmatch(job)
    if match is None:
        raise UsageError(
            f"torchtitan {installed_version()} takes a job as MODULE:CONFIG (its --module and --config), "
            f"for example llama3:llama3_8b; {job} is not one"
        )
    return match["module"], match["config"]


def job_beside(folder: Path, job: str) -> str:
    """A job as a file in `folder` names it: a job file relative to the folder, or MODULE:CONFIG."""
    return job if _PYTHON_JOB.fullmatch(job) else str(folder / job)


def check_job(job: str) -> None:
    """UsageError if `job` is not named as the installed TorchTitan names one, or is a file that does not exist."""
    if has_python_jobs():
        if job.endswith(".toml") or Path(job).is_file():
            raise UsageError(
                f"job file {job}: torchtitan {installed_version()} is installed, which takes no job files: "
                "pip install torchtitan==0.2.2, or give a configuration as MODULE:CONFIG, such as llama3:llama3_8b"
            )
        check_python_job(*split_python_job(job))
    elif not Path(job).is_file():
        if _PYTHON_JOB.fullmatch(job):
            raise UsageError(
                f"torchtitan {installed_version()} takes job files (TOML): for {job}, pip install torchtitan==0.3.0"
            )
        raise UsageError(f"job file {job}: there is no such file")
