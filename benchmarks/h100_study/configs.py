"""The study's configurations and the figures that were measured for some of them.

``h100_single_gpu_configs.csv`` lists all configurations, ``h100_single_gpu.csv`` the measured ones: step time and the
peaks of ``active_bytes.all`` and ``reserved_bytes.all`` over five steps on one H100 with 80 GB.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from autosac.errors import UsageError

Precision = Literal["FP", "HP", "MP"]

CONFIGS_FILE = "h100_single_gpu_configs.csv"
MEASURED_FILE = "h100_single_gpu.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """One training configuration.

    `seq_len` is in tokens and `image_size` in pixels (-1 where there is none). `precision`: FP is float32 throughout, HP
    float16 throughout, MP float32 parameters under float16 autocast.
    """

    model: str
    batch_size: int
    seq_len: int
    image_size: int
    precision: Precision
    activation_checkpointing: bool

    def __post_init__(self) -> None:
        """Check the values. UsageError if one makes no sense."""
        if self.batch_size < 1:
            raise UsageError(f"batch_size must be positive, not {self.batch_size}")
        if self.precision not in get_args(Precision):
            raise UsageError(f"precision must be one of {', '.join(get_args(Precision))}, not {self.precision!r}")
        if self.seq_len < 1 and self.image_size < 1:
            raise UsageError("a configuration needs a seq_len, an image_size or both")

    def describe(self) -> str:
        """A short label, such as ``llama_v3_1b 4x2048 HP AC``."""
        sizes = [f"{self.seq_len}" if self.seq_len > 0 else "", f"{self.image_size}px" if self.image_size > 0 else ""]
        shape = "x".join([str(self.batch_size), *filter(None, sizes)])
        return f"{self.model} {shape} {self.precision}{' AC' if self.activation_checkpointing else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a real H100 did: step time and both memory peaks; `row` is the file's row as it stands."""

    step_ms: float
    active_bytes: int
    reserved_bytes: int
    row: dict[str, str]


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e


def _config(row: dict[str, str], path: Path) -> StudyConfig:
    try:
        return StudyConfig(
            model=row["model"],
            batch_size=int(row["batch_size"]),
            seq_len=int(row["seq_len"]),
            image_size=int(row["image_size"]),
            precision=cast(Precision, row["precision"]),
            activation_checkpointing={"True": True, "False": False}[row["activation_checkpointing"]],
        )
    except (KeyError, ValueError) as e:
        raise UsageError(f"{path}: cannot read the configuration {row}: {e}") from e


def read_configs(folder: Path) -> tuple[StudyConfig, ...]:
    """All configurations of the study, in the file's order. UsageError if the file is missing or damaged."""
    path = folder / CONFIGS_FILE
    return tuple(_config(row, path) for row in _rows(path))


def read_measured(folder: Path) -> dict[StudyConfig, Measured]:
    """The measured figures by configuration; empty if the folder has none. UsageError if the file is damaged."""
    path = folder / MEASURED_FILE
    if not path.exists():
        return {}
    measured = {}
    for row in _rows(path):
        try:
            measured[_config(row, path)] = Measured(
                step_ms=float(row["step_ms_measured"]),
                active_bytes=int(row["active_bytes_peak_measured"]),
                reserved_bytes=int(row["reserved_bytes_peak_measured"]),
                row=row,
            )
        except (KeyError, ValueError) as e:
            raise UsageError(f"{path}: cannot read the figures of {row}: {e}") from e
    return measured
