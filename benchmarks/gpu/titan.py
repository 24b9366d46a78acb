"""Llama through TorchTitan's own trainer on one GPU, each checkpointing policy for real beside its prediction.

    python -m benchmarks.gpu.titan --profile PROFILE.toml --device cuda --out DIR [--minutes 8] [--phase predict|measure]

The flavors of `titan_models`, a batch size for the device's memory, under none, full, selective-op and the plans of
``autosac plan`` for budgets between the predicted peaks of full and none (or the device's memory, where none does not fit);
eager, compiled, and compiled with float8 where torchao is installed. A run is TorchTitan's trainer for eight steps, as the
only rank, in a process of its own: torchrun would start it in another session, where it outlives what ends this
program and keeps the GPU. Measured are the median step time and the peaks that TorchTitan logs, after its first two steps.
``titan-cases.json`` holds the predictions and what to run: `--phase predict` writes it on any machine, `--phase measure` runs
it on one with a GPU. Writes ``titan.json``. With ``--device cpu`` nothing is trained (TorchTitan needs a GPU): the debug
model is predicted for an H100 and every run is listed as not measured.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autosac.estimator import load_hardware
from autosac.files.writing import write_text_atomically
from benchmarks.gpu import alone
from benchmarks.gpu.children import before, one_by_one, told
from benchmarks.gpu.common import ROOT, environment, parse_arguments, write_result

_FIXED = ("none", "full", "selective-op")
_SHARES = (0.3, 0.7)
_COMPILED, _FLOAT8 = ["--compile.enable"], ["--compile.enable", "--model.converters", "quantize.linear.float8"]
# Variant: TorchTitan's arguments, the policies, and the budgets of plans between full and none.
_VARIANTS: dict[str, tuple[list[str], tuple[str, ...], tuple[float, ...]]] = {
    "": ([], _FIXED, _SHARES),
    "compiled, ": (_COMPILED, _FIXED, (0.5,)),
    "compiled float8, ": (_FLOAT8, ("selective-op",), ()),
}
_STEPS, _WARM_UP, _SEQ_LEN = 8, 2, 4096
_FILLED = 0.95  # of the device's memory may be planned for
_LONGEST_RUN_S = 120
_GIB = 2**30
CASES = "titan-cases.json"  # what to run, with predictions
RECORD = "AUTOSAC_BENCHMARK_RECORD"  # `titan_models` writes there what TorchTitan logs
# Flavor: GiB of a sequence's activations without checkpointing, and of parameters, gradients and states in float32.
_FLAVORS = {"1B": (11.0, 24.0), "3B": (26.0, 57.0), "8B-cut": (20.0, 42.0)}
JOB = """[job]
custom_config_module = "benchmarks.gpu.titan_models"
[experimental]
custom_import = "autosac.integrations.torchtitan"
[model]
name = "{model}"
flavor = "{flavor}"
[training]
local_batch_size = {batch}
seq_len = {length}
steps = {steps}
dtype = "{dtype}"
[metrics]
log_freq = 1
[checkpoint]
enable = false
"""


def autosac_json(arguments: list[str], more: Sequence[str] = ()) -> dict[str, Any]:
    """A command of AutoSAC's with --json, and `more` arguments of the job's. RuntimeError with its message if it fails."""
    command = [sys.executable, "-m", "autosac", *arguments, "--json", "--quiet", *(["--", *more] if more else [])]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment())
    if child.returncode:
        raise RuntimeError(child.stderr.strip() or f"autosac ended with {child.returncode}")
    document: dict[str, Any] = json.loads(child.stdout)
    return document


def simulated(job: Path, machine: Sequence[str], mode: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """What is predicted of a job under a way of checkpointing, or (``""``) under its own and that of `more`."""
    way = ["--ac", mode] if mode else []
    return predicted_by(autosac_json(["simulate", str(job), *machine, *way], more))


def planned(job: Path, machine: Sequence[str], budget: str, plan: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """What is predicted of a job under a plan, which is written."""
    document = autosac_json(["plan", str(job), *machine, "--budget", budget, "-o", str(plan)], more)
    predicted: dict[str, Any] = document["predictions"]["autosac"]
    return predicted


def profiled(steps: int) -> list[str]:
    """TorchTitan's arguments that record the last of so many steps."""
    return f"--profiling.enable_profiling --profiling.profile_freq {steps} --profiling.profiler_warmup 1".split()


def cases_parser(about: str, gpu: str) -> argparse.ArgumentParser:
    """The command line of a program that predicts cases for ``--phase measure``."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default=gpu)
    return parser


def write_cases(folder: Path, cases: Iterable[dict[str, Any]]) -> None:
    """Print the cases as they are predicted; those that are known are written after each."""
    found = []
    for case in cases:
        found.append(case)
        print(case["model"], case["policy"], case["predicted"], flush=True)
        write_text_atomically(folder / CASES, json.dumps(found, indent=1) + "\n")


def predicted_by(document: dict[str, Any]) -> dict[str, Any]:
    """What is compared with a measurement, of what `autosac simulate --json` printed."""
    return {
        "step_ms": document["step"]["step_ms"],
        "peak_active_bytes": document["peak_active_bytes"],
        "peak_reserved_bytes": document["peak_reserved_bytes"],
    }


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **more}


class Runs:
    """The runs of one flavor: what is predicted, and how to run it."""

    def __init__(self, flavor: str, batch: int, length: int, profile: str, folder: Path) -> None:
        self.name = f"TorchTitan {flavor}, batch {batch} x {length}"
        self.profile, self.folder = profile, folder
        self.job = folder / f"titan-{flavor}.toml"
        sizes = {"batch": batch, "length": length, "steps": _STEPS}
        self.job.write_text(JOB.format(model="llama3", flavor=flavor, dtype="float32", **sizes))

    def cases(self) -> Iterator[dict[str, Any]]:
        """For every variant the fixed policies, then the plans."""
        for variant, (arguments, policies, shares) in _VARIANTS.items():
            if arguments is _FLOAT8 and importlib.util.find_spec("torchao") is None:
                continue
            yield from self._variant(variant, arguments, policies, shares)

    def _variant(
        self, variant: str, arguments: list[str], policies: Sequence[str], shares: Sequence[float]
    ) -> Iterator[dict[str, Any]]:
        machine = ["--gpu", self.profile, "--world-size", "1"]
        peaks: dict[str, int] = {}
        for mode in policies:
            try:
                predicted = simulated(self.job, machine, mode, arguments)
            except RuntimeError as e:
                yield {"model": self.name, "policy": variant + mode, "error": str(e)}
                continue
            peaks[mode] = predicted["peak_reserved_bytes"]
            yield self._case(variant + mode, predicted, [*arguments_of(mode), *arguments])
        if not {"none", "full"} <= peaks.keys():
            return
        low, high = peaks["full"], min(peaks["none"], int(_FILLED * load_hardware(self.profile).usable_bytes))
        for share in shares if low < high else ():
            budget = f"{(low + share * (high - low)) / _GIB:.4f}GiB"
            plan = self.folder / f"{self.job.stem}-{'compiled-' if arguments else ''}{share}.json"
            try:
                predicted = planned(self.job, machine, budget, plan, arguments)
            except RuntimeError as e:
                yield {"model": self.name, "policy": f"{variant}plan for {budget}", "error": str(e)}
                continue
            applied = ["--autosac.enable", "--autosac.plan", plan.name, *arguments]
            yield self._case(f"{variant}plan for {budget}", predicted, applied)

    def _case(self, policy: str, predicted: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
        print(f"{self.name}: {policy}: {predicted['step_ms']:.1f} ms", flush=True)
        job = self.job.name
        return {"model": self.name, "policy": policy, "predicted": predicted, "job": job, "arguments": arguments}


def _commands(cases: Sequence[dict[str, Any]], folder: Path) -> Iterator[list[str]]:
    for case in cases:
        yield ["benchmarks.gpu.titan", "child", json.dumps([str(folder), case])]


def child(folder: Path, case: dict[str, Any], result: Path) -> None:
    """One case: TorchTitan's trainer as the only rank, or as the first of the case's `ranks`, and what it logged.

    The case's `trace` names the profiler's record of it.
    """
    job, traced, arguments = case["job"], case.get("trace", ""), case["arguments"]
    record, dump = result.with_name("record.jsonl"), result.with_name("torchtitan")
    sys.argv = ["train.py", "--job.config_file", str(folder / job), "--job.dump_folder", str(dump)]
    sys.argv += [str(folder / argument) if argument.endswith(".json") else argument for argument in arguments]
    import torch
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    told()
    os.environ.update(_only_rank(), **{RECORD: str(record)})
    if case.get("ranks", 1) > 1:
        torch.cuda.set_device(0)
        alone.initialise(case["ranks"])
    try:
        train(Trainer)
    except torch.OutOfMemoryError:
        result.write_text(json.dumps({"error": "out of memory"}))
        return
    _keep(dump, folder, traced)
    result.write_text(json.dumps(measured_steps([json.loads(line) for line in record.read_text().splitlines()])))


def _keep(dump: Path, folder: Path, traced: str) -> None:
    """What the run has left in TorchTitan's folder: the profiler's record, and what `[autosac] observe` has measured."""
    for trace in dump.glob("profile_traces/*/rank0_trace.json") if traced else ():
        (folder / "traces").mkdir(exist_ok=True)
        (folder / "traces" / traced).write_bytes(gzip.compress(trace.read_bytes(), 6))
    for observed in dump.glob("autosac_run*.json"):
        shutil.copy(observed, folder / f"{traced.split('.')[0]}-{observed.name}")


def _only_rank() -> dict[str, str]:
    """What torchrun would tell the only rank of a job."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    return ranks | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def arguments_of(mode: str) -> list[str]:
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


def predict(profile: str, device: str, folder: Path) -> list[dict[str, Any]]:
    """The cases of all flavors, with predictions; written after each."""
    if device == "cpu":
        sizes = [("debugmodel", 2, 256, "h100-sxm-80gb")]
    else:
        total_gib = load_hardware(profile).usable_bytes / _GIB
        sizes = [
            (flavor, max(1, int((0.9 * total_gib - states) / sequence)), _SEQ_LEN, profile)
            for flavor, (sequence, states) in _FLAVORS.items()
            if states < 0.8 * total_gib
        ]
    cases: list[dict[str, Any]] = []
    for flavor, batch, length, gpu in sizes:
        for case in Runs(flavor, batch, length, gpu, folder).cases():
            cases.append(case)
            write_text_atomically(folder / CASES, json.dumps(cases, indent=1) + "\n")
    return cases


def measure(cases: Sequence[dict[str, Any]], device: str, folder: Path, until: float) -> None:
    """Run the cases, write after each."""
    rows = [case for case in cases if "error" in case]
    possible = [case for case in cases if "error" not in case]
    if device == "cpu":
        rows += [case | {"measured": {"error": "TorchTitan trains on a GPU only"}} for case in possible]
        write_result(folder / "titan.json", device, rows)
        return
    environment(device)
    runs = one_by_one(_commands(possible, folder), _environment())
    for case, run in zip(possible, runs, strict=True):
        measured = before(until, run, _LONGEST_RUN_S)
        rows.append(case | {"measured": measured})
        print(f"{case['model']}: {case['policy']}: {measured}", flush=True)
        write_result(folder / "titan.json", device, rows)


def main() -> None:
    """Predict, then run."""
    if sys.argv[1:2] == ["child"]:
        folder_of_job, case = json.loads(sys.argv[2])
        child(Path(folder_of_job), case, Path(sys.argv[3]))
        return
    arguments = parse_arguments(__doc__ or "")
    until = time.monotonic() + 60 * arguments.minutes
    folder, device = arguments.out.resolve(), arguments.device
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.phase == "measure":
        cases = json.loads((folder / CASES).read_text())
    else:
        cases = predict(arguments.profile, device, folder)
    if arguments.phase != "predict":
        measure(cases, device, folder, until)


if __name__ == "__main__":
    main()
