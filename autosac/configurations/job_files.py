"""The job file of a configuration: the user's own, with its settings changed and nothing else.

`written_job` keeps comments and order (tomlkit); TorchTitan takes the file as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from autosac.errors import UsageError
from autosac.files.documents import TEXT_BYTES, read_bounded
from autosac.files.writing import write_text_atomically
from autosac.jobs.checks import given_settings
from autosac.titan import source as titan_source

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
    """The text of the job file with the arguments and the settings in it. UsageError for what a file cannot hold."""
    document = tomlkit.parse(read_bounded(job_file, TEXT_BYTES).decode())
    for name, text in given_settings(overrides).items():
        _set(document, name, _typed(name, text))
    for name, value in settings.items():
        _set(document, name, value)
    return tomlkit.dumps(document)


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


def job_path(folder: Path, name: str, text: str) -> Path:
    """A job file in the study's folder."""
    path = folder / "jobs" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        write_text_atomically(path, text)
    return path
