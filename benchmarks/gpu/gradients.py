"""Plans on a CUDA device: trained with and without the plan, the parameters are the same bit for bit; time and memory beside
what was predicted.

    python -m benchmarks.gpu.gradients plan --out DIR [--gpu PROFILE]       # anywhere
    python -m benchmarks.gpu.gradients measure --out DIR [--minutes 3]      # on the GPU

Some of the eager jobs of `benchmarks.gpu.unseen`, each planned for two thirds of the memory that it takes without a plan, or
more if it must be. On the device, a process builds the job from the same seed and trains it for three steps: twice without
the plan and once under it, with deterministic kernels; then it counts the parameters and buffers that differ in any bit. Time
and peaks are those of the job under the plan with PyTorch's usual kernels. Writes ``gradients.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import autosac
from autosac.errors import AutosacError, InfeasibleError
from autosac.files.writing import write_text_atomically
from benchmarks.gpu.children import before, one_by_one, told
from benchmarks.gpu.common import environment, write_result
from benchmarks.gpu.steps import figures_of, train
from benchmarks.gpu.unseen import JOBS
from benchmarks.gpu.unseen_steps import Job

_CHOSEN = (
    "gpt2",
    "dit",
    "u-net with",
    "3d u-net",
    "whisper",
    "qwen3 1.7b bf16 4x2048",
    "bert",
    "swin",
    "convnext",
    "wave",
)
_STEPS, _SEED = 3, 20
_SHARES = (0.67, 0.8, 0.93)  # of the memory without a plan: the first that there is a plan for
_LONGEST_S = 90
_GIB = 2**30
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def chosen() -> list[Job]:
    """The jobs that are planned."""
    return [job for job in JOBS if not job.compiled and job.name.startswith(_CHOSEN)]


def plan(out: Path, gpu: str) -> None:
    """Plan every job and predict it."""
    rows = []
    for number, job in enumerate(chosen()):
        row: dict[str, Any] = {"model": job.name}
        try:
            peak = autosac.simulate(job.make_step, gpu=gpu).unlimited_allocation.reserved_peak_bytes
            made = _first_plan(job, gpu, peak)
            made.save(out / f"plan-{number}.json")
            row["policy"] = f"plan for {made.made_for.budget_bytes / _GIB:.4g} GiB"
            row["predicted"] = figures_of(autosac.simulate(job.make_step, gpu=gpu, plan=made))
        except AutosacError as e:
            row["error"] = str(e)
        print(row, flush=True)
        rows.append(row)
        write_text_atomically(out / "gradients-planned.json", json.dumps(rows, indent=1) + "\n")


def _first_plan(job: Job, gpu: str, peak_bytes: int) -> autosac.Plan:
    for share in _SHARES:
        with contextlib.suppress(InfeasibleError):
            return autosac.plan(job.make_step, gpu=gpu, budget=f"{share * peak_bytes / _GIB:.4f}GiB")
    raise AutosacError(f"no plan for {_SHARES[-1]:.0%} of the memory")


def child(number: int, file: Path, result: Path) -> None:
    """One job in a process of its own: trained twice and compared, then timed under the plan."""
    import torch

    job, loaded = chosen()[number], autosac.Plan.load(file)
    for library in ("transformers", "timm"):
        __import__(library)
    told()

    def trained(under: Any) -> list[torch.Tensor]:
        torch.manual_seed(_SEED)
        model, step = job.make_step(torch.device("cuda"))
        if under is not None:
            autosac.apply(model, under)
        for _ in range(_STEPS):
            step()
        values = [value.detach().cpu() for value in (*model.parameters(), *model.buffers())]
        del model, step
        gc.collect()
        torch.cuda.empty_cache()
        return values

    torch.use_deterministic_algorithms(True, warn_only=True)
    first, again, under = trained(None), trained(None), trained(loaded)
    found: dict[str, Any] = {
        "tensors": len(first),
        "differing_without_a_plan": sum(not torch.equal(a, b) for a, b in zip(first, again, strict=True)),
        "differing_under_the_plan": sum(not torch.equal(a, b) for a, b in zip(first, under, strict=True)),
    }
    del first, again, under
    torch.use_deterministic_algorithms(False)
    torch.cuda.reset_peak_memory_stats()

    def planned(device: torch.device) -> Any:
        model, step = job.make_step(device)
        return autosac.apply(model, loaded), step

    found |= train(planned, _STEPS, None)
    result.write_text(json.dumps(found))


def measure(out: Path, minutes: float) -> None:
    """Run all planned jobs, write after each."""
    until = time.monotonic() + 60 * minutes
    rows = json.loads((out / "gradients-planned.json").read_text())
    numbers = [number for number, row in enumerate(rows) if "error" not in row]
    environment("cuda")
    commands = [
        ["benchmarks.gpu.gradients", "child", str(number), str((out / f"plan-{number}.json").resolve())]
        for number in numbers
    ]
    for number, run in zip(numbers, one_by_one(commands, _DETERMINISTIC), strict=True):
        rows[number]["measured"] = before(until, run, _LONGEST_S)
        print(rows[number]["model"], rows[number]["measured"], flush=True)
        write_result(out / "gradients.json", "cuda", rows)


def main() -> None:
    """`plan` or `measure`; `child` is one process of `measure`."""
    if sys.argv[1:2] == ["child"]:
        child(int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("plan", "measure"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--minutes", type=float, default=3.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command == "plan":
        plan(options.out, options.gpu)
    else:
        measure(options.out, options.minutes)


if __name__ == "__main__":
    main()
