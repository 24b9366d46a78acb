"""What the programs of this folder share: their command line, result files with date, device and versions."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from autosac.files.writing import write_text_atomically

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("autosac", "torchtitan", "triton", "numpy")
_CUDA = (
    "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({'name': p.name, "
    "'total_bytes': p.total_memory, 'capability': [p.major, p.minor], 'sm_count': p.multi_processor_count, "
    "'cuda': torch.version.cuda, 'cudnn': torch.backends.cudnn.version()}))"
)


def parse_arguments(about: str) -> argparse.Namespace:
    """The command line of a program that trains real steps; `about` is its docstring."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--profile", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--phase", choices=("both", "predict", "measure"), default="both")
    return parser.parse_args()


def measure_or_predict(
    about: str, measure: Callable[[Path], None], predict: Callable[[Path, str], None], gpu: str = "h200-sxm-141gb"
) -> None:
    """The command line of a program with these two parts: ``measure --out DIR`` and ``predict --out DIR [--gpu PROFILE]``."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("command", choices=("measure", "predict"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default=gpu)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.out)
    else:
        predict(options.out, options.gpu)


@cache
def environment(device: str) -> dict[str, Any]:
    """Date, device, driver, versions, as this process found them first. No CUDA context is made in it."""
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device}
    about["python"], about["system"] = platform.python_version(), platform.platform()
    about["versions"] = _versions()
    about["commit"] = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if device == "cuda":
        about["gpu"] = json.loads(_output([sys.executable, "-c", _CUDA]) or "{}")
        about["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"])
    return about


def write_result(path: Path, device: str, rows: list[dict[str, Any]]) -> None:
    """A result file: where it comes from, and its rows."""
    document = {"about": environment(device), "rows": rows}
    write_text_atomically(path, json.dumps(document, indent=1) + "\n")


def _versions() -> dict[str, str]:
    found = {str(d.metadata["Name"]).lower(): d.version for d in distributions() if d.metadata["Name"]}
    named = {name: v for name, v in sorted(found.items()) if name in _PACKAGES or name.startswith("nvidia-")}
    return {"torch": _output([sys.executable, "-c", "import torch; print(torch.__version__)"])} | named


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
