"""One rank of jobs on many GPUs, on one GPU: what `benchmarks.gpu.titan --phase measure` runs, with predictions.

    python -m benchmarks.gpu.ranks --out DIR [--gpu PROFILE] [--plans]                      # anywhere
    python -m benchmarks.gpu.titan --profile PROFILE --phase measure --out DIR              # on the GPU

TorchTitan's trainer is rank 0 of 8 to 32, whose collectives only copy (`alone`): FSDP, tensor, context and expert
parallelism with their kernels, copies and memory, and without a network. Predictions are those of a cluster whose links are
as fast (`alone.toml`). The budgets of plans are what TorchTitan's selective checkpointing and PyTorch's own budget of 0.4 are
predicted to reserve, so that a plan is measured beside them. Weights do not change (a learning rate of 0), because gradients
are only one rank's. ``--plans`` plans only. Writes ``titan-cases.json``, and the folder's jobs and plans.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autosac.files.writing import write_text_atomically
from benchmarks.gpu.layers import Job
from benchmarks.gpu.titan import JOB, arguments_of, autosac_json, predicted_by

_CLUSTER = Path(__file__).with_name("alone.toml")
_COMPILED = ("--compile.enable",)
_FLOAT8 = (*_COMPILED, "--model.converters", "quantize.linear.float8")
_TENSORWISE = (*_FLOAT8, "--quantize.linear.float8.enable_fsdp_float8_all_gather")
_ROWWISE = (*_FLOAT8, "--quantize.linear.float8.recipe_name", "rowwise")
_BUDGET = "memory_budget"
_GIB = 2**30


class Run(NamedTuple):
    """A job under one policy; `plan_for` makes it a plan within what an earlier run of the same job and name reserves."""

    job: Job
    ranks: int
    name: str
    mode: str
    arguments: tuple[str, ...] = ()
    plan_for: str = ""
    steps: int = 10


def _tensor(degree: int) -> tuple[str, ...]:
    return ("--parallelism.tensor_parallel_degree", str(degree))


_LLAMA, _LONG = Job("llama3", "8B", 1, 8192), Job("llama3", "8B", 1, 32768)
_WIDE, _QWEN = Job("llama3", "70B-16", 4, 8192), Job("qwen3", "32B-16", 8, 4096)
_DEEPSEEK, _MIXTURE = Job("deepseek_v3", "16B", 4, 4096), Job("qwen3", "30B-A3B-12", 4, 4096)
_OSS, _SCOUT = Job("gpt_oss", "20b-6", 2, 8192), Job("llama4", "17bx16e_irope-4", 2, 8192)
_EXPERTS = ("--parallelism.expert_parallel_degree", "8")
_CONTEXT = ("--parallelism.context_parallel_degree", "4")
RUNS = (
    Run(_LLAMA, 8, "eager", "selective-op"),
    Run(_LLAMA, 8, "compiled", "selective-op", _COMPILED),
    Run(_LLAMA, 8, "compiled", _BUDGET, (*_COMPILED, "--activation_checkpoint.memory_budget", "0.4")),
    Run(_LLAMA, 8, "compiled", "plan", _COMPILED, plan_for="selective-op"),
    Run(_LLAMA, 8, "compiled", "plan", _COMPILED, plan_for=_BUDGET),
    Run(_LLAMA, 8, "eager", "plan", plan_for="selective-op"),
    Run(_WIDE, 32, "TP 8", "full", _tensor(8)),
    Run(_WIDE, 32, "TP 8, compiled", "selective-op", (*_tensor(8), *_COMPILED)),
    Run(_DEEPSEEK, 8, "EP 8", "full", _EXPERTS),
    Run(_MIXTURE, 8, "EP 8", "none", _EXPERTS),
    Run(_OSS, 8, "FSDP", "none"),
    Run(_LONG, 8, "CP 4", "full", _CONTEXT),
    Run(_LLAMA, 8, "compiled float8, tensorwise", "selective-op", _TENSORWISE),
    Run(_QWEN, 32, "TP 4", "full", _tensor(4)),
    Run(_WIDE, 32, "TP 8, compiled float8, rowwise", "selective-op", (*_tensor(8), *_ROWWISE)),
    Run(_DEEPSEEK, 8, "EP 8, compiled", "full", (*_EXPERTS, *_COMPILED)),
    Run(_SCOUT, 8, "EP 8", "none", _EXPERTS),
    Run(_LLAMA, 8, "eager", "full"),
    Run(_LLAMA, 8, "compiled", "none", _COMPILED),
)


def cases(folder: Path, gpu: str, *, only_plans: bool) -> Iterator[dict[str, Any]]:
    """What to run, with predictions."""
    reserved: dict[tuple[Job, str, str], float] = {}
    plans_follow = {(run.job, run.name, run.plan_for) for run in RUNS}
    for number, run in enumerate(RUNS):
        file = folder / f"ranks-{number}.toml"
        file.write_text(JOB.format(**run.job._asdict(), steps=run.steps, dtype="float32") + "[optimizer]\nlr = 0.0\n")
        machine = ["--gpu", gpu, "--world-size", str(run.ranks), "--cluster", str(_CLUSTER)]
        applied, policy, predicted = arguments_of(run.mode), run.mode, {}
        if run.plan_for:
            budget = f"{reserved[run.job, run.name, run.plan_for]:.2f}GiB"
            plan, policy = folder / f"ranks-{number}.json", f"plan for {budget}"
            command = ["plan", str(file), *machine, "--budget", budget, "-o", str(plan)]
            document = autosac_json(command, ["--", *run.arguments] if run.arguments else [])
            predicted, applied = document["predictions"]["autosac"], ["--autosac.enable", "--autosac.plan", plan.name]
        elif not only_plans or (run.job, run.name, run.mode) in plans_follow:
            predicted = _simulated(run, file, machine)
            reserved[run.job, run.name, run.mode] = predicted.get("peak_reserved_bytes", 0) / _GIB
        profiled = f"--profiling.enable_profiling --profiling.profile_freq {run.steps} --profiling.profiler_warmup 1"
        yield {
            "model": f"{run.job.model} {run.job.flavor}, {run.job.batch} x {run.job.length}, {run.ranks} ranks",
            "policy": f"{run.name}, {policy}",
            "predicted": predicted,
            "job": file.name,
            "ranks": run.ranks,
            "arguments": [*applied, *run.arguments, *profiled.split()],
            "trace": f"ranks-{number:02d}.json.gz",
        }


def _simulated(run: Run, file: Path, machine: list[str]) -> dict[str, Any]:
    own = run.mode == _BUDGET  # `--ac` has no budgets
    more = [*(arguments_of(run.mode) if own else ()), *run.arguments]
    try:
        document = autosac_json(
            ["simulate", str(file), *machine, *([] if own else ["--ac", run.mode])], ["--", *more] if more else []
        )
    except RuntimeError as e:
        return {"error": str(e)}
    return predicted_by(document)


def main() -> None:
    """Predict all runs and write after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="h200-sxm-141gb")
    parser.add_argument("--plans", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = []
    for case in cases(options.out.resolve(), options.gpu, only_plans=options.plans):
        found.append(case)
        print(case["model"], case["policy"], case["predicted"], flush=True)
        write_text_atomically(options.out / "titan-cases.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
