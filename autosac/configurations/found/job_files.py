"""The job file of a configuration: the user's own, with its settings changed and nothing else.

`written_job` keeps comments and order (tomlkit); TorchTitan takes the file as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from autosac.configurations.evaluating.study import JOBS
from autosac.errors import UsageError
from autosac.files.documents import TEXT_BYTES, parse_toml, read_bounded
from autosac.files.writing import write_text_atomically
from autosac.jobs.checks import given_settings
from autosac.titan import source as titan_source

# How a job divides its layers over a number of stages, or orders them: the search does so for each of its pipelines.
OWN_SPLITS = (
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.module_fqns_per_model_part",
)
_PLUGIN = {
    "job.custom_config_module": "autosac.integrations.torchtitan.job_config",
    "experimental.custom_import": "autosac.integrations.torchtitan",
}


def checkpointing_settings(name: str, plan_file: str | None) -> dict[str, Any]:
    """The settings of a way of checkpointing: none, full, selective-op, or AutoSAC's plan in a file."""
    if name == "autosac":
        assert plan_file is not None
        own = {"autosac.enable": True, "autosac.plan": plan_file}
        return {**_PLUGIN, **own, "activation_checkpoint.mode": "none"}
    kind, _, option = name.partition("-")
    settings: dict[str, Any] = {"activation_checkpoint.mode": kind}
    return settings | ({"activation_checkpoint.selective_ac_option": option} if option else {})


def written_job(job_file: str, overrides: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The text of the job file with the arguments and the settings in it, and without the job's own pipeline stages.
    UsageError for what a file cannot hold.
    """
    document = tomlkit.parse(read_bounded(job_file, TEXT_BYTES).decode())
    for name in OWN_SPLITS:
        section, _, key = name.partition(".")
        document.get(section, {}).pop(key, None)
    for name, text in given_settings(overrides).items():
        _set(document, name, _typed(name, text))
    for name, value in settings.items():
        _set(document, name, value)
    if "activation_checkpoint.mode" in settings:
        _decide_plan(document, with_plan="autosac.plan" in settings)
    return tomlkit.dumps(document)


def _decide_plan(document: tomlkit.TOMLDocument, *, with_plan: bool) -> None:
    """Take out of the job's own ``[autosac]`` section what contradicts the decision: a budget beside a plan, or any plan."""
    section: Any = document.get("autosac", {})
    section.pop("budget", None) if with_plan else section.pop("plan", None)
    if not with_plan and "enable" in section:
        section["enable"] = False


def _set(document: tomlkit.TOMLDocument, name: str, value: Any) -> None:
    section, _, key = name.rpartition(".")
    table: Any = document
    for part in section.split("."):
        if part not in table:
            table[part] = tomlkit.table()
        table = table[part]
        if not isinstance(table, Table):
            raise UsageError(f"the job file has no section [{section}] that {key} could be written to")
    if isinstance(value, str) and name == "model.converters":
        value = value.split(",")
    table[key] = value


def _typed(name: str, text: str) -> Any:
    """An argument's text as the setting's type."""
    section, _, key = name.partition(".")
    field = titan_source.sections().get(section, {}).get(key)
    kinds = field.type if field is not None else "str"
    for kind, convert in (("int", int), ("float", float)):
        if kind in kinds:
            try:
                return convert(text)
            except ValueError:
                continue
    if "bool" in kinds:
        return text.lower() == "true"
    return text.split(",") if kinds.startswith("list") else text


def without_splits(job_file: str, folder: Path) -> str:
    """The job file, or one like it in the study's folder that leaves pipeline stages to the search."""
    document = parse_toml(read_bounded(job_file, TEXT_BYTES))
    sections = {name: document.get(name.partition(".")[0]) for name in OWN_SPLITS}
    if any(isinstance(own, dict) and name.partition(".")[2] in own for name, own in sections.items()):
        return str(job_path(folder, "own", written_job(job_file, (), {})))
    return job_file


def job_path(folder: Path, name: str, text: str) -> Path:
    """A job file in the study's folder."""
    path = folder / JOBS / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        write_text_atomically(path, text)
    return path
