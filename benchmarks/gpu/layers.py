"""Layers of large models in TorchTitan on one GPU: what `benchmarks.gpu.titan --phase measure` runs, with predictions.

    python -m benchmarks.gpu.layers --out DIR [--gpu PROFILE]                               # anywhere
    python -m benchmarks.gpu.titan --profile PROFILE --phase measure --out DIR              # on the GPU

The widths of Llama-3 8B, Qwen3 14B and DeepSeek-V3 16B with fewer layers and parameters in bf16, as FSDP gathers them; eager
and compiled, in bf16 and float8. Each run is long enough for the GPU's power to settle, and its last step is profiled. Writes
``titan-cases.json``, and the folder's jobs and plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.titan import JOB, arguments_of, cases_parser, planned, profiled, simulated, write_cases

COMPILED = ("--compile.enable",)
FLOAT8 = (*COMPILED, "--model.converters", "quantize.linear.float8")
ROWWISE = (*FLOAT8, "--quantize.linear.float8.recipe_name", "rowwise")


class Job(NamedTuple):
    """Some layers of a model, and its batch."""

    model: str
    flavor: str
    batch: int
    length: int


class Run(NamedTuple):
    """A job under one policy; `budget_gib` makes it a plan of AutoSAC's."""

    job: Job
    name: str
    steps: int
    mode: str
    arguments: tuple[str, ...] = ()
    budget_gib: float = 0.0


_LLAMA, _QWEN = Job("llama3", "8B-12", 1, 8192), Job("qwen3", "14B-6", 2, 4096)
_DEEPSEEK = Job("deepseek_v3", "16B-4", 4, 4096)
RUNS = (
    Run(_LLAMA, "eager", 18, "selective-op"),
    Run(_LLAMA, "compiled", 24, "selective-op", COMPILED),
    Run(_LLAMA, "compiled float8, tensorwise", 24, "selective-op", FLOAT8),
    Run(_LLAMA, "compiled float8, rowwise", 24, "selective-op", ROWWISE),
    Run(_DEEPSEEK, "eager", 16, "full"),
    Run(_DEEPSEEK, "compiled", 20, "full", COMPILED),
    Run(_LLAMA, "compiled", 24, "none", COMPILED),
    Run(_QWEN, "compiled", 20, "selective-op", COMPILED),
    Run(_QWEN, "eager", 12, "none", (), 42.0),
    Run(_LLAMA, "eager, planned in the job", 14, "none", ("--autosac.observe", "--autosac.replan"), 36.0),
)


def cases(folder: Path, gpu: str) -> Iterator[dict[str, Any]]:
    """What to run, with predictions."""
    for number, run in enumerate(RUNS):
        file = folder / f"layers-{number}.toml"
        file.write_text(JOB.format(**run.job._asdict(), steps=run.steps, dtype="bfloat16"))
        machine = ["--gpu", gpu, "--world-size", "1"]
        if run.budget_gib:
            budget, plan = f"{run.budget_gib}GiB", folder / f"layers-{number}.json"
            predicted = planned(file, machine, budget, plan)
            applied = ["--autosac.enable", "--autosac.plan", plan.name]
            if run.arguments:
                applied = ["--autosac.enable", "--autosac.budget", budget]
        else:
            predicted = simulated(file, machine, run.mode, run.arguments)
            applied = arguments_of(run.mode)
        policy = f"plan for {run.budget_gib} GiB" if run.budget_gib else run.mode
        yield {
            "model": f"{run.job.model} {run.job.flavor}, {run.job.batch} x {run.job.length}",
            "policy": f"{run.name}, {policy}",
            "predicted": predicted,
            "job": file.name,
            "arguments": [*applied, *run.arguments, *profiled(run.steps)],
            "trace": f"titan-{number:02d}.json.gz",
        }


def main() -> None:
    """Predict all runs and write after each."""
    options = cases_parser(__doc__ or "", "h100-sxm-80gb").parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_cases(options.out, cases(options.out.resolve(), options.gpu))


if __name__ == "__main__":
    main()
