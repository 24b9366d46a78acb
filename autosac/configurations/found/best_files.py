"""The files of a search's best configuration: a job that TorchTitan takes as it is, and AutoSAC's plan beside it."""

from __future__ import annotations

from pathlib import Path

from autosac.configurations.found.job_files import checkpointing_settings, written_job
from autosac.configurations.found.python_files import written_python_job
from autosac.configurations.found.results import SearchResult
from autosac.configurations.space.request import SearchRequest
from autosac.files.writing import write_bytes_atomically, write_text_atomically


def plan_beside(output: Path) -> Path:
    """Where the plan of a best configuration goes."""
    return output.with_name(f"{output.stem}.plan.json")


def write_best(output: Path, request: SearchRequest, result: SearchResult) -> list[Path]:
    """Write the best configuration's job file, and its plan, if it has one, as ``OUTPUT.plan.json``; none if nothing fits."""
    best = result.best
    if best is None:
        return []
    written = [output]
    plan_file = plan_beside(output)
    if best.plan_key:
        write_bytes_atomically(plan_file, result.plans[best.plan_key].encode())
        written.append(plan_file)
    settings, name = result.settings[best.layout], best.measured.checkpointing
    if result.python is not None:
        plan = str(plan_file.absolute()) if best.plan_key else None
        text = written_python_job(result.python, settings, name, plan)
    else:  # which looks for it beside itself
        settings = {**settings, **checkpointing_settings(name, plan_file.name if best.plan_key else None)}
        text = written_job(request.job, request.overrides, settings)
    write_text_atomically(output, text)
    return written
