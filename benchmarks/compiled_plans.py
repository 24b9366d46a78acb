"""Plans of compiled jobs beside what PyTorch and TorchTitan offer by themselves.

    python -m benchmarks.compiled_plans [--jobs "8B, 2 sequences;Qwen3 14B"] [--results results.json] [--list]

For each job: the plan; the job's own selective and full checkpointing; and of the memory budgets 0.1 to 0.9 of PyTorch's
partitioner (`activation_checkpoint.mode = "memory_budget"`) the largest that fits, which is the fastest that fits. All are
captured as compiled and simulated. With `--results`, rows are added to a file; what it has already is not run again, and the
table is of all rows in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from autosac.capture.process.server import CaptureServer
from autosac.errors import AutosacError, CaptureError, InfeasibleError
from autosac.induction import capturing
from autosac.jobs.tasks import plan_in, simulation_of
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Goal
from autosac.plans import Prediction
from autosac.quantities import parse_budget

EXAMPLES = Path(__file__).parents[1] / "examples"
_BUDGETS = tuple(k / 10 for k in range(1, 10))
_SLOWER = 1.001


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row: a name, the job file, TorchTitan's arguments, GPUs, how many, and the memory that may be reserved."""

    name: str
    file: str = "llama3_8b.toml"
    arguments: str = ""
    gpu: str = "h100-sxm-80gb"
    world_size: int = 8
    budget: str = "68GiB"


_QWEN = "--model.name qwen3 --model.flavor 14B"
_TP = "--parallelism.tensor_parallel_degree"
_EP = "--parallelism.expert_parallel_degree"
_FLOAT8 = "--model.converters quantize.linear.float8"
JOBS = (
    Job(name="8B, 2 sequences"),
    Job(name="8B, 1 sequence", arguments="--training.local_batch_size 1", budget="44GiB"),
    Job(name="8B, 4 sequences of 4k", arguments="--training.local_batch_size 4 --training.seq_len 4096"),
    Job(name="8B, TP 2", arguments=f"{_TP} 2", budget="48GiB"),
    Job(name="8B, float8", arguments=_FLOAT8),
    Job(name="8B, float8, TP 2", arguments=f"{_FLOAT8} {_TP} 2", budget="48GiB"),
    Job(name="Qwen3 14B, 1 sequence", arguments=f"{_QWEN} --training.seq_len 8192 --training.local_batch_size 1"),
    Job(name="Qwen3 14B, 2 sequences", arguments=f"{_QWEN} --training.seq_len 4096", world_size=16),
    Job(name="70B, 64 GPUs", file="llama3_70b.toml", world_size=64),
    Job(name="70B, 128 GPUs", file="llama3_70b.toml", world_size=128),
    Job(
        name="70B, 2 sequences of 4k",
        file="llama3_70b.toml",
        world_size=128,
        arguments="--training.local_batch_size 2 --training.seq_len 4096",
    ),
    Job(name="70B, TP 8", file="llama3_70b.toml", world_size=64, arguments=f"{_TP} 8 --training.local_batch_size 8"),
    Job(
        name="deepseek_v3 16B, EP 8",
        arguments=f"--model.name deepseek_v3 --model.flavor 16B --training.seq_len 4096 {_EP} 8",
    ),
    Job(
        name="Qwen3 30B-A3B, EP 8",
        arguments=f"--model.name qwen3 --model.flavor 30B-A3B --training.seq_len 4096 {_EP} 8",
        world_size=16,
    ),
    Job(
        name="8B, HSDP 2 x 8",
        arguments="--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 8",
        world_size=16,
        budget="60GiB",
    ),
    Job(
        name="8B, CP 2, 1 sequence of 32k",
        arguments="--parallelism.context_parallel_degree 2 --training.seq_len 32768 --training.local_batch_size 1",
        budget="70GiB",
    ),
    Job(name="8B, float8 by row", arguments=f"{_FLOAT8} --quantize.linear.float8.recipe_name rowwise", budget="64GiB"),
    Job(name="8B, 4 microbatches", arguments="--training.global_batch_size 64", budget="62GiB"),
    Job(name="8B, loss not compiled", arguments="--compile.components model", budget="60GiB"),
    Job(
        name="8B, parameters stay gathered",
        arguments="--parallelism.fsdp_reshard_after_forward never",
        world_size=32,
        budget="66GiB",
    ),
    Job(name="8B, 4 sequences", arguments="--training.local_batch_size 4", budget="58GiB"),
    Job(
        name="8B, asynchronous TP 4",
        arguments=f"{_TP} 4 --parallelism.enable_async_tensor_parallel --training.local_batch_size 8",
        world_size=16,
        budget="66GiB",
    ),
    Job(
        name="8B, PP 2, TP 2",
        arguments=f"--parallelism.pipeline_parallel_degree 2 {_TP} 2 --training.local_batch_size 8",
        budget="40GiB",
    ),
    Job(name="8B, A100s", arguments="--training.seq_len 4096", gpu="a100-sxm-80gb", budget="50GiB"),
    Job(
        name="Qwen3 32B, 1 sequence",
        arguments="--model.name qwen3 --model.flavor 32B --training.seq_len 8192 --training.local_batch_size 1",
        world_size=32,
        budget="72GiB",
    ),
    Job(
        name="70B, TP 4, B200s",
        file="llama3_70b.toml",
        arguments=f"{_TP} 4 --training.local_batch_size 4",
        gpu="b200-sxm-180gb",
        world_size=64,
        budget="150GiB",
    ),
    Job(
        name="Llama 4 Scout, EP 8, H200s",
        arguments="--model.name llama4 --model.flavor 17bx16e --training.seq_len 8192 --training.local_batch_size 1 "
        f"{_EP} 8",
        gpu="h200-sxm-141gb",
        world_size=64,
        budget="110GiB",
    ),
    Job(
        name="Qwen3 235B-A22B, EP 32, H200s",
        arguments=f"--model.name qwen3 --model.flavor 235B-A22B --training.seq_len 4096 {_EP} 32",
        gpu="h200-sxm-141gb",
        world_size=128,
        budget="125GiB",
    ),
)


def run(row: Job) -> dict[str, Any]:
    """The figures of one job."""
    began = time.monotonic()
    job = TitanJob.of(
        str(EXAMPLES / row.file),
        gpu=row.gpu,
        world_size=row.world_size,
        overrides=("--compile.enable", *row.arguments.split()),
        progress=lambda text: print(f"{time.monotonic() - began:6.1f} {row.name}: {text}", file=sys.stderr),
    )
    budget_bytes = parse_budget(row.budget, job.target.hardware.usable_bytes)
    with CaptureServer(on_progress=job.progress) as server:
        (planned,) = plan_in(server, job, Goal(budget_bytes=budget_bytes))
        planning_s = time.monotonic() - began
        if isinstance(planned, InfeasibleError):
            raise planned
        found = dict(planned.plan.predictions)
        value, own = None, None
        with contextlib.suppress(CaptureError):  # what the job cannot run under is no competitor
            value, own = _largest_budget(server, job, budget_bytes, found)
    if own is not None:
        found["memory_budget"] = own
    fitting = {n: p for n, p in found.items() if n != "autosac" and (p.peak_reserved_bytes or 0) <= budget_bytes}
    fastest = min(fitting, key=lambda name: fitting[name].step_ms, default=None)
    return {
        "job": row.name,
        "budget_gib": budget_bytes / 2**30,
        "planning_s": planning_s,
        "policies": planned.plan.graphs,
        "ratio": value,
        "fastest": fastest,
        **{name: _figures(prediction) for name, prediction in found.items()},
    }


def _figures(prediction: Prediction) -> list[float]:
    return [prediction.step_ms, (prediction.peak_reserved_bytes or 0) / 2**30]


def _largest_budget(
    server: CaptureServer, job: TitanJob, budget_bytes: int, known: Mapping[str, Prediction]
) -> tuple[float | None, Prediction | None]:
    """The largest memory budget that fits, from where it would be if peaks were linear in it."""

    @cache
    def predicted(i: int) -> Prediction:
        values = (
            "--activation_checkpoint.mode",
            "memory_budget",
            "--activation_checkpoint.memory_budget",
            str(_BUDGETS[i]),
        )
        request = replace(job, overrides=(*job.overrides, *values)).request()
        return simulation_of(capturing(server, request).result(), job.target).prediction()

    def fits(i: int) -> bool:
        return i < 0 or (i < len(_BUDGETS) and (predicted(i).peak_reserved_bytes or 0) <= budget_bytes)

    most, least = ((known[name].peak_reserved_bytes or 0) if name in known else 0 for name in ("none", "full"))
    share = (budget_bytes - least) / max(1, most - least)
    i = min(max(round(len(_BUDGETS) * share) - 1, 0), len(_BUDGETS) - 1)
    while fits(i + 1) and i + 1 < len(_BUDGETS):
        i += 1
    while not fits(i):
        i -= 1
    return (_BUDGETS[i], predicted(i)) if i >= 0 else (None, None)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown. What exceeds the budget is in brackets."""
    lines = [
        "| job | budget | plan | used | none | selective-op | full | memory_budget | plan against the fastest that fits |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['job']} | | {row['error']} | | | | | | |")
            continue
        cells = [_cell(row, name) for name in ("none", "selective-op", "full", "memory_budget")]
        if row["ratio"] is not None:
            cells[-1] += f" ({row['ratio']:g})"
        step_ms, peak_gib = row["autosac"]
        against = "" if row["fastest"] is None else f"{step_ms / row[row['fastest']][0] - 1:+.1%} ({row['fastest']})"
        lines.append(
            f"| {row['job']} | {row['budget_gib']:.0f} GiB | {step_ms:,.1f} ms | {peak_gib / row['budget_gib']:.1%} | "
            + " | ".join(cells)
            + f" | {against} |"
        )
    return "\n".join(lines)


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row or row[name] is None or not isinstance(row[name], list):
        return "–"
    step_ms, peak_gib = row[name]
    return f"{step_ms:,.1f} ms" if peak_gib <= row["budget_gib"] else f"[{step_ms:,.1f} ms, {peak_gib:.1f} GiB]"


def main(argv: Sequence[str]) -> int:
    """Parse, run, print. 1 if a plan is slower than something of the job's own that fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=";".join(job.name for job in JOBS), help="names, separated by semicolons")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(job.name for job in JOBS))
        return 0
    known = {job.name: job for job in JOBS}
    rows: list[dict[str, Any]] = []
    if arguments.results is not None and arguments.results.exists():
        rows = json.loads(arguments.results.read_text())
    for name in arguments.jobs.split(";"):
        if any(row["job"] == name for row in rows):
            continue
        try:
            rows.append(run(known[name]))
        except (CaptureError, InfeasibleError, AutosacError) as e:
            rows.append({"job": name, "error": str(e)})
        if arguments.results is not None:
            arguments.results.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    slower = [r for r in rows if r.get("fastest") and r["autosac"][0] > _SLOWER * r[r["fastest"]][0]]
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
