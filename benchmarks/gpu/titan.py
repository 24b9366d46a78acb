"""Llama through TorchTitan's own trainer on one GPU, each checkpointing policy for real beside its prediction.

    python -m benchmarks.gpu.titan --profile PROFILE.toml --device cuda --out DIR [--minutes 8]

The flavors of `titan_models`, a batch size for the device's memory, under none, full, selective-op and the plans of
``autosac plan`` for three budgets between the predicted peaks of full and none (or the device's memory, where none does not
fit). A run is TorchTitan's trainer for eight steps, as the only rank, in a process of its own: torchrun would start it in
another session, where it outlives what ends this program and keeps the GPU. Measured are the median step time and the peaks
that TorchTitan logs, after its first two steps. Writes ``titan.json``. With ``--device cpu`` nothing is trained (TorchTitan
needs a GPU): the debug model is predicted for an H100 and every run is listed as not measured.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autosac.estimator import load_hardware
from benchmarks.gpu.common import ROOT, parse_arguments, write_result

_FIXED = ("none", "full", "selective-op")
_SHARES = (0.25, 0.5, 0.75)
_STEPS, _WARM_UP, _SEQ_LEN = 8, 2, 4096
_FILLED = 0.95  # of the device's memory may be planned for
_LONGEST_RUN_S = 180
_GIB = 2**30
# Flavor: GiB of a sequence's activations without checkpointing, and of parameters, gradients and states in float32.
_FLAVORS = {"1B": (11.0, 24.0), "3B": (26.0, 57.0), "8B-cut": (20.0, 42.0)}
_JOB = """[job]
custom_config_module = "benchmarks.gpu.titan_models"
dump_folder = "{folder}"
[experimental]
custom_import = "autosac.integrations.torchtitan"
[model]
name = "llama3"
flavor = "{flavor}"
[training]
local_batch_size = {batch}
seq_len = {length}
steps = {steps}
[metrics]
log_freq = 1
[checkpoint]
enable = false
"""


def _autosac(arguments: list[str]) -> dict[str, Any]:
    """A command of AutoSAC's with --json. RuntimeError with its message if it fails."""
    command = [sys.executable, "-m", "autosac", *arguments, "--json", "--quiet"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment())
    if child.returncode:
        raise RuntimeError(child.stderr.strip() or f"autosac ended with {child.returncode}")
    document: dict[str, Any] = json.loads(child.stdout)
    return document


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **more}


class Runs:
    """The runs of one flavor."""

    def __init__(self, flavor: str, batch: int, length: int, profile: str, device: str, folder: Path) -> None:
        self.name = f"TorchTitan {flavor}, batch {batch} x {length}"
        self.profile, self.device, self.folder = profile, device, folder
        self.job = folder / f"titan-{flavor}.toml"
        dump = (folder / "torchtitan").as_posix()
        self.job.write_text(_JOB.format(flavor=flavor, batch=batch, length=length, steps=_STEPS, folder=dump))

    def rows(self, until: float) -> Iterator[dict[str, Any]]:
        """The fixed policies, then the plans."""
        machine = ["--gpu", self.profile, "--world-size", "1"]
        peaks: dict[str, int] = {}
        for mode in _FIXED:
            document = _autosac(["simulate", str(self.job), *machine, "--ac", mode])
            peaks[mode] = document["peak_reserved_bytes"]
            predicted = {
                "step_ms": document["step"]["step_ms"],
                "peak_active_bytes": document["peak_active_bytes"],
                "peak_reserved_bytes": document["peak_reserved_bytes"],
            }
            yield self._row(mode, predicted, _arguments(mode), until)
        low, high = peaks["full"], min(peaks["none"], int(_FILLED * load_hardware(self.profile).usable_bytes))
        for share in _SHARES if low < high else ():
            if time.monotonic() > until:
                yield {"model": self.name, "policy": "plan", "error": "the time ran out"}
                return
            budget = f"{(low + share * (high - low)) / _GIB:.4f}GiB"
            plan = self.folder / f"{self.job.stem}-{share}.json"
            try:
                document = _autosac(["plan", str(self.job), *machine, "--budget", budget, "-o", str(plan)])
            except RuntimeError as e:
                yield {"model": self.name, "policy": f"plan for {budget}", "error": str(e)}
                continue
            arguments = ["--autosac.enable", "--autosac.plan", str(plan)]
            yield self._row(f"plan for {budget}", document["predictions"]["autosac"], arguments, until)

    def _row(self, policy: str, predicted: dict[str, Any], arguments: list[str], until: float) -> dict[str, Any]:
        print(f"{self.name}: {policy}", flush=True)
        row = {"model": self.name, "policy": policy, "predicted": predicted}
        if self.device == "cpu":
            return row | {"measured": {"error": "TorchTitan trains on a GPU only"}}
        if time.monotonic() > until:
            return row | {"measured": {"error": "the time ran out"}}
        return row | {"measured": self._measure(arguments)}

    def _measure(self, arguments: list[str]) -> dict[str, Any]:
        record = self.folder / "record.jsonl"
        record.unlink(missing_ok=True)
        command = [sys.executable, "-m", "torchtitan.train", "--job.config_file", str(self.job), *arguments]
        environment = _environment(AUTOSAC_BENCHMARK_RECORD=str(record), **_only_rank())
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=_LONGEST_RUN_S
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {_LONGEST_RUN_S} s"}
        if child.returncode or not record.exists():
            return {"error": why_it_ended(child.stderr, child.returncode)}
        return measured_steps([json.loads(line) for line in record.read_text().splitlines()])


def _only_rank() -> dict[str, str]:
    """What torchrun would tell the only rank of a job."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    return ranks | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def why_it_ended(stderr: str, code: int) -> str:
    """Why a run failed, in one line, from what it wrote to standard error."""
    if "OutOfMemoryError" in stderr:
        return "out of memory"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line] or lines
    return said[-1][:300] if said else f"the run ended early with exit code {code}"


def _arguments(mode: str) -> list[str]:
    if mode == "selective-op":
        return ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
    return ["--activation_checkpoint.mode", mode]


def measured_steps(lines: list[dict[str, float]]) -> dict[str, Any]:
    """Median step and highest peaks after the warm-up, from what TorchTitan logged."""
    counted = [line for line in lines if line["step"] > _WARM_UP]
    if not counted:
        return {"error": "the run ended before its first measured step"}
    return {
        "step_ms": statistics.median(line["time_metrics/end_to_end(s)"] for line in counted) * 1e3,
        "peak_active_bytes": round(max(line["memory/max_active(GiB)"] for line in counted) * _GIB),
        "peak_reserved_bytes": round(max(line["memory/max_reserved(GiB)"] for line in counted) * _GIB),
        "tokens_per_second": statistics.median(line["throughput(tps)"] for line in counted),
    }


def main() -> None:
    """Run all flavors, write after each."""
    arguments = parse_arguments(__doc__ or "")
    until = time.monotonic() + 60 * arguments.minutes
    rows: list[dict[str, Any]] = []
    if arguments.device == "cpu":
        cases = [("debugmodel", 2, 256, "h100-sxm-80gb")]
    else:
        total_gib = load_hardware(arguments.profile).usable_bytes / _GIB
        cases = [
            (flavor, max(1, int((0.9 * total_gib - states) / sequence)), _SEQ_LEN, arguments.profile)
            for flavor, (sequence, states) in _FLAVORS.items()
            if states < 0.8 * total_gib
        ]
    for flavor, batch, length, profile in cases:
        if time.monotonic() > until:
            rows.append({"model": f"TorchTitan {flavor}", "error": "the time ran out"})
        else:
            try:
                for row in Runs(flavor, batch, length, profile, arguments.device, arguments.out.resolve()).rows(until):
                    rows.append(row)
                    write_result(arguments.out / "titan.json", arguments.device, rows)
            except RuntimeError as e:
                rows.append({"model": f"TorchTitan {flavor}", "error": str(e)})
        write_result(arguments.out / "titan.json", arguments.device, rows)


if __name__ == "__main__":
    main()
