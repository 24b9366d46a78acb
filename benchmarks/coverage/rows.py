"""The rows of the table: one job each, from rows.toml."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS_FILE = Path(__file__).with_name("rows.toml")
SIZES = ("small", "real")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job: TorchTitan's arguments, the number of GPUs and their kind.

    `needs`: Python packages that the job imports. `expect`: words of the error that the job has to end with ("": none).
    `note` is shown beside its name.
    """

    group: str
    name: str
    size: str
    model: str
    gpus: int
    gpu: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    expect: str = ""
    note: str = ""

    @property
    def key(self) -> str:
        """Unique among all rows."""
        return f"{self.size}: {self.group}: {self.name}"

    def missing(self) -> tuple[str, ...]:
        """The packages that the job needs and that are not installed."""
        return tuple(package for package in self.needs if importlib.util.find_spec(package) is None)


def load_rows(path: Path = ROWS_FILE) -> tuple[Row, ...]:
    """All rows of all sizes. KeyError, TypeError or ValueError if the file is wrong."""
    document = tomllib.loads(path.read_text())
    rows = [row for entry in document["row"] for row in _sizes(entry, document["defaults"])]
    if len({row.key for row in rows}) < len(rows):
        raise ValueError(f"{path}: two rows have the same name")
    return tuple(rows)


def _expanded(words: Iterable[str]) -> list[str]:
    return [word.replace("{here}", str(ROWS_FILE.parent)) for word in " ".join(words).split()]


def _sizes(entry: dict[str, Any], defaults: dict[str, str]) -> Iterator[Row]:
    """Of arguments that are given twice TorchTitan takes the last."""
    for size in SIZES:
        if size not in entry:
            continue
        job = entry[size]
        model, flavor = job["model"].split()
        words = (defaults["arguments"], defaults[size], entry.get("arguments", ""), job.get("arguments", ""))
        yield Row(
            group=entry["group"],
            name=entry["name"],
            size=size,
            model=job["model"],
            gpus=job["gpus"],
            gpu=job.get("gpu", defaults["gpu"]),
            arguments=("--model.name", model, "--model.flavor", flavor, *_expanded(words)),
            needs=tuple(entry.get("needs", ())),
            expect=job.get("expect", entry.get("expect", "")),
            note=entry.get("note", ""),
        )
