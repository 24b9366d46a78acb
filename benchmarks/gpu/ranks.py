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

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.layers import COMPILED, FLOAT8, ROWWISE, Job
from benchmarks.gpu.titan import JOB, arguments_of, cases_parser, planned, profiled, simulated, write_cases

_CLUSTER = Path(__file__).with_name("alone.toml")
_TENSORWISE = (*FLOAT8, "--quantize.linear.float8.enable_fsdp_float8_all_gather")
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
    Run(_LLAMA, 8, "compiled", "selective-op", COMPILED),
    Run(_LLAMA, 8, "compiled", _BUDGET, (*COMPILED, "--activation_checkpoint.memory_budget", "0.4")),
    Run(_LLAMA, 8, "compiled", "plan", COMPILED, plan_for="selective-op"),
    Run(_LLAMA, 8, "compiled", "plan", COMPILED, plan_for=_BUDGET),
    Run(_LLAMA, 8, "eager", "plan", plan_for="selective-op"),
    Run(_WIDE, 32, "TP 8", "full", _tensor(8)),
    Run(_WIDE, 32, "TP 8, compiled", "selective-op", (*_tensor(8), *COMPILED)),
    Run(_DEEPSEEK, 8, "EP 8", "full", _EXPERTS),
    Run(_MIXTURE, 8, "EP 8", "none", _EXPERTS),
    Run(_OSS, 8, "FSDP", "none"),
    Run(_LONG, 8, "CP 4", "full", _CONTEXT),
    Run(_LLAMA, 8, "compiled float8, tensorwise", "selective-op", _TENSORWISE),
    Run(_QWEN, 32, "TP 4", "full", _tensor(4)),
    Run(_WIDE, 32, "TP 8, compiled float8, rowwise", "selective-op", (*_tensor(8), *ROWWISE)),
    Run(_DEEPSEEK, 8, "EP 8, compiled", "full", (*_EXPERTS, *COMPILED)),
    Run(_SCOUT, 8, "EP 8", "none", _EXPERTS),
    Run(_LLAMA, 8, "eager", "full"),
    Run(_LLAMA, 8, "compiled", "none", COMPILED),
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
            predicted = planned(file, machine, budget, plan, run.arguments)
            applied = ["--autosac.enable", "--autosac.plan", plan.name]
        elif not only_plans or (run.job, run.name, run.mode) in plans_follow:
            predicted = _simulated(run, file, machine)
            reserved[run.job, run.name, run.mode] = predicted.get("peak_reserved_bytes", 0) / _GIB
        yield {
            "model": f"{run.job.model} {run.job.flavor}, {run.job.batch} x {run.job.length}, {run.ranks} ranks",
            "policy": f"{run.name}, {policy}",
            "predicted": predicted,
            "job": file.name,
            "ranks": run.ranks,
            "arguments": [*applied, *run.arguments, *profiled(run.steps)],
            "trace": f"ranks-{number:02d}.json.gz",
        }


def _simulated(run: Run, file: Path, machine: list[str]) -> dict[str, Any]:
    own = run.mode == _BUDGET  # `--ac` has no budgets
    more = [*(arguments_of(run.mode) if own else ()), *run.arguments]
    try:
        return simulated(file, machine, "" if own else run.mode, more)
    except RuntimeError as e:
        return {"error": str(e)}


def main() -> None:
    """Predict all runs and write after each."""
    parser = cases_parser(__doc__ or "", "h200-sxm-141gb")
    parser.add_argument("--plans", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_cases(options.out, cases(options.out.resolve(), options.gpu, only_plans=options.plans))


if __name__ == "__main__":
    main()
