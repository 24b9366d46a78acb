"""Whether a real TorchTitan job changes its plan after its first steps, and trains as if it had never had one.

    python -m benchmarks.replan [--ranks 1,2]

TorchTitan's debug model trains on the CPU, with gloo, under a plan that recomputes much: it was made for less memory than
there is. With `replan` the job measures its first steps, corrects the profile's times, plans again within the real budget, and
changes. Printed are, for each number of ranks, how many modules each step checkpoints, and whether losses, gradients and
parameters are those of training without AutoSAC, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import TitanJob, plan_job, simulate_job
from autosac.plans import Plan
from benchmarks.titan_training.jobs import TEXT
from benchmarks.titan_training.jobs import train as train_ranks

_REAL = 160 * 2**20
_PROFILE = """name = "wrong"
description = "a device whose profile is wrong"
vendor = "NVIDIA"
compute_capability = [8, 0]
sm_count = 108
boost_mhz = 1410
tdp_w = 400
memory_bytes = 8589934592
usable_bytes = 8589934592
mem_bandwidth_gbps = 20.0
l2_bytes = 41943040
link = "PCIe"
link_gbps = 25.0
pcie_gbps = 25.0
launch_us = 1.0
kernel_us = 1.0
context_bytes = 0
cublas_workspace_bytes = 8388608
cublaslt_workspace_bytes = 0
[peak_tflops]
float32 = 3.0
bfloat16 = 3.0
"""
_OBSERVE = "[autosac]\nobserve_steps = 2\n"


def train(ranks: int, folder: Path) -> dict[str, Any]:
    """Plan, train with and without AutoSAC, and compare."""
    job, profile, plan_file = folder / "job.toml", folder / "wrong.toml", folder / "tight.json"
    text = TEXT.format(folder=folder.as_posix(), model="llama3", flavor="debugmodel", batch=4, length=64, steps=6)
    job.write_text(text + _OBSERVE)
    profile.write_text(_PROFILE)
    plan = _tightest(job, profile, ranks)
    dataclasses.replace(plan, made_for=dataclasses.replace(plan.made_for, budget_bytes=_REAL)).save(plan_file)
    chosen = ["--autosac.enable", "--autosac.replan", "--autosac.plan", str(plan_file), "--autosac.gpu", str(profile)]
    reports = list(zip(_run(job, ranks, chosen), _run(job, ranks, []), strict=True))
    result: dict[str, Any] = {"ranks": ranks}
    for rank, (replanned, plain) in enumerate(reports):
        names = ("losses", "gradients", "parameters")
        result[f"rank {rank}"] = {
            "checkpointed modules in each step": replanned["planned"],
            "another plan": (folder / "out" / "autosac_plan_again.json").exists(),
            "same as without": all(replanned[name] == plain[name] for name in names),
        }
    result["record"] = json.loads((folder / "out" / "autosac_run.json").read_text())["steps_ms"]
    return result


def _tightest(job: Path, profile: Path, ranks: int) -> Plan:
    """A plan within about what full checkpointing takes."""
    titan = TitanJob.of(str(job), gpu=str(profile), world_size=ranks)
    full, _ = simulate_job(titan, checkpointing="full")
    budget = f"{full.peak_reserved_bytes / 2**20 + 1:.0f}MiB"
    return plan_job(config_file=str(job), overrides=(), gpu=str(profile), world_size=ranks, budget=budget)


def _run(job: Path, ranks: int, arguments: list[str]) -> list[dict[str, Any]]:
    reports = train_ranks(job, ranks, arguments)
    if reports is None:
        raise SystemExit("a rank failed")
    return reports


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks (default 1,2)")
    arguments = parser.parse_args()
    for ranks in map(int, arguments.ranks.split(",")):
        with temporary_folder() as folder:
            print(json.dumps(train(ranks, folder), indent=1), flush=True)


if __name__ == "__main__":
    main()
