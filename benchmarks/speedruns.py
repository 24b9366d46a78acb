"""Speed runs of GPT-2 beside the times of their steps: ``python -m benchmarks.speedruns --truth DIR``.

DIR is a checkout of github.com/KellerJordan/modded-nanogpt at f411b3d. The log of a record begins with the script that ran,
goes on with its machine (eight H100s of 80 GB, 700 W) and PyTorch, and ends with the mean time of its steps after the tenth.
The scripts run as they are, but for three things: made-up tokens, no validation, and no `nvidia-smi`.

The scripts compile the whole model, under autocast to bfloat16 and DDP, with AdamW and Muon. Nothing was fitted to them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from autosac.errors import UsageError
from benchmarks.ending import exit_code
from benchmarks.nanochat import reported_ms

_RECORDS: Final = "records/track_1_short"
LOGS: Final = {
    "Muon": "2024-10-10_Muon/eb5659d0-fb6a-49e5-a311-f1f89412f726.txt",
    "ModernArch": "2024-10-14_ModernArch/dabaaddd-237c-4ec9-939d-6608a9ed5e27.txt",
    "DistributedMuon": "2024-10-17_DistributedMuon/22d24867-eb5a-4fcc-ae2c-263d0277dfd1.txt",
    "PyTorch25": "2024-10-18_PyTorch25/d4bfb25f-688d-4da5-8743-33926fad4842.txt",
    "ScaleUp1B": "2024-10-20_ScaleUp1B/87bd51fd-6203-4c88-b3aa-8a849a6a83ca.txt",
    "UntieEmbed": "2024-11-03_UntieEmbed/d6b50d71-f419-4d26-bb39-a60d55ae7a04.txt",
    "CastBf16": "2024-11-08_CastBf16/a833bed8-2fa8-4cfe-af05-58c1cc48bc30.txt",
}
"""By the names of the records' folders: a log."""
_BAR: Final = "=" * 100 + "\n"
_TOKENS: Final = 2_200_000
_VOCABULARY: Final = 50_257


class Record(NamedTuple):
    """What a log says: the script, the version of PyTorch, and the mean time of a step in ms."""

    script: str
    torch: str
    step_ms: float


def read_record(log: str) -> Record:
    """UsageError if it has no script, version or time."""
    parts = log.split(_BAR)
    version = re.search(r"^Running pytorch (\S+)", log, re.MULTILINE)
    times = re.findall(r"step_avg:([\d.]+)ms$", log, re.MULTILINE)
    if len(parts) < 3 or version is None or not times:
        raise UsageError(
            "no log of a speed run: it has a script between two bars, a version of PyTorch and times of steps"
        )
    return Record(parts[1], version[1], float(times[-1]))


def make_data(folder: Path) -> None:
    """Two files of random tokens, in the format of llm.c."""
    (folder / "data/fineweb10B").mkdir(parents=True)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20_240_520, 1, _TOKENS
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, _TOKENS, dtype=np.uint16)
    for name in ("fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        (folder / "data/fineweb10B" / name).write_bytes(header.tobytes() + tokens.tobytes())


def simulated_ms(record: Record) -> float:
    """A step of the script. UsageError if it does not run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        script = re.sub(r"val_loss_every : int = \d+", "val_loss_every : int = 0", record.script)
        (folder / "train_gpt2.py").write_text(script, encoding="utf-8")
        (folder / "bin").mkdir()
        tool = folder / "bin" / "nvidia-smi"
        tool.write_text("#!/bin/sh\n", encoding="utf-8")
        tool.chmod(0o755)
        path = os.pathsep.join((str(tool.parent), os.environ.get("PATH", "")))
        command = ["train_gpt2.py", "--gpu", "h100-sxm-80gb", "--nproc", "8", "--rank", "0", "--json"]
        return reported_ms(command, folder, {"PATH": path})


def run(options: argparse.Namespace) -> None:
    """Simulate the runs that were asked for and print them."""
    print(f"{'record':<16} {'PyTorch':<14} {'step (ms)':>10} {'published':>10} {'speed':>7}")
    for name in options.record or LOGS:
        path = options.truth / _RECORDS / LOGS[name]
        if not path.is_file():
            raise UsageError(f"{options.truth} is no checkout of modded-nanogpt: it has no {_RECORDS}/{LOGS[name]}")
        record = read_record(path.read_text(encoding="utf-8", errors="replace"))
        ms = simulated_ms(record)
        error = record.step_ms / ms - 1
        print(f"{name:<16} {record.torch:<14} {ms:10.1f} {record.step_ms:10.1f} {error:+7.1%}", flush=True)


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedruns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--truth", type=Path, required=True, help="checkout of modded-nanogpt at f411b3d")
    parser.add_argument("--record", choices=sorted(LOGS), action="append", help="only this record (may be repeated)")
    return exit_code(lambda: run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
