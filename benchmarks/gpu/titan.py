"""Llama through TorchTitan's own trainer on one GPU, each checkpointing policy for real beside its prediction.

    python -m benchmarks.gpu.titan --profile PROFILE.toml --device cuda --out DIR [--minutes 8]

The flavors of `titan_models`, a batch size for the device's memory, under none, full, selective-op and the plans of
``autosac plan`` for three budgets between the predicted peaks of full and none. A run is TorchTitan's launcher, eight steps;
measured are the median step time and the peaks that TorchTitan logs, after its first two steps. Writes ``titan.json``. With
``--device cpu`` nothing is trained (TorchTitan needs a GPU): the debug model is predicted for an H100 and every run is
listed as not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import ROOT, write_result

_FIXED = ("none", "full", "selective-op")
_SHARES = (0.25, 0.5, 0.75)
_STEPS, _WARM_UP, _SEQ_LEN = 8, 2, 4096
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
        for share in _SHARES:
            budget = f"{(peaks['full'] + share * (peaks['none'] - peaks['full'])) / _GIB:.4f}GiB"
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
            return row | {"measured": {"error": "the time was up"}}
        return row | {"measured": self._measure(arguments)}

    def _measure(self, arguments: list[str]) -> dict[str, Any]:
        record = self.folder / "record.jsonl"
        record.unlink(missing_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += ["-m", "torchtitan.train", "--job.config_file", str(self.job), *arguments]
        environment = _environment(AUTOSAC_BENCHMARK_RECORD=str(record))
        try:
            child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)
        except subprocess.TimeoutExpired:
            return {"error": "took longer than 240 s"}
        if child.returncode or not record.exists():
            out_of_memory = "OutOfMemoryError" in child.stderr
            said = [line for line in child.stderr.splitlines() if "Error" in line]
            return {"error": "out of memory" if out_of_memory else said[-1] if said else "the run ended early"}
        return measured_steps([json.loads(line) for line in record.read_text().splitlines()])


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    rows: list[dict[str, Any]] = []
    if arguments.device == "cpu":
        cases = [("debugmodel", 2, 256, "h100-sxm-80gb")]
    else:
        from autosac.estimator import load_hardware

        total_gib = load_hardware(arguments.profile).usable_bytes / _GIB
        cases = [
            (flavor, max(1, int((0.9 * total_gib - states) / sequence)), _SEQ_LEN, arguments.profile)
            for flavor, (sequence, states) in _FLAVORS.items()
            if states < 0.8 * total_gib
        ]
    for flavor, batch, length, profile in cases:
        if time.monotonic() > until:
            rows.append({"model": f"TorchTitan {flavor}", "error": "the time was up"})
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
