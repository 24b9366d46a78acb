"""How long the whole command takes, as a user waits for it: `autosac simulate` and `autosac plan` in a fresh process.

    python -m benchmarks.speed [--models 8b,70b,...] [--commands plan] [--cold] [--repeat 3] [--stages] [--growth] [--captures]

Prints, per command, wall time, user time of all processes and peak memory (of the largest process), for a job that is seen
for the first time (cold) and for one whose captures are kept on disk (cached; not with `--cold`); the least of `--repeat`
runs. With `--stages` also what each stage of planning takes; with `--growth` how capture and simulation grow with layers,
ranks and microbatches. Meant for an idle machine of two cores. `--captures` prints only what single captures take, the first
of a capture process and later ones, in processor time, which a busy machine makes longer, but not so much longer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parents[1] / "examples"


class Job(NamedTuple):
    """A job file of the examples with settings of its own, its GPUs and a budget."""

    file: str
    world_size: int
    budget: str
    overrides: tuple[str, ...] = ()


_MOE = ("--parallelism.expert_parallel_degree", "8", "--training.seq_len", "4096", "--training.local_batch_size", "4")
_PP = ("--parallelism.tensor_parallel_degree", "8", "--parallelism.pipeline_parallel_degree", "4")
JOBS = {
    "8b": Job("llama3_8b.toml", 8, "68GiB"),
    "70b": Job("llama3_70b.toml", 128, "68GiB"),
    "deepseek": Job("llama3_8b.toml", 8, "67GiB", ("--model.name", "deepseek_v3", "--model.flavor", "16B", *_MOE)),
    "gpt_oss": Job("llama3_8b.toml", 8, "90%", ("--model.name", "gpt_oss", "--model.flavor", "20b", *_MOE)),
    "70b-pp": Job("llama3_70b.toml", 64, "60GiB", (*_PP, "--training.local_batch_size", "8")),
    "8b-accumulated": Job("llama3_8b.toml", 8, "68GiB", ("--training.global_batch_size", "256")),  # 16 microbatches
    "8b-compiled": Job("llama3_8b.toml", 8, "68GiB", ("--compile.enable",)),
    "70b-compiled": Job("llama3_70b.toml", 128, "68GiB", ("--compile.enable",)),
}
# Whole process, cold, two cores: wall seconds.
GOALS = (
    {("simulate", "8b"): 6, ("simulate", "70b"): 8, ("plan", "8b"): 12, ("plan", "70b"): 20}
    | {("plan", "70b-compiled"): 60}
    | {("plan", name): 30 for name in ("deepseek", "gpt_oss", "70b-pp", "8b-compiled")}
)
LAYERS = (10, 20, 40, 80)  # of the 70B model
RANKS = (8, 128, 2048, 16384)
MICROBATCHES = (1, 2, 4, 8)


class Run(NamedTuple):
    """One command: seconds on the clock, user seconds of all its processes, GiB of the largest one."""

    wall_s: float
    user_s: float
    gib: float


def measure(arguments: list[str], cache: Path) -> Run:
    """Run one command in a fresh process, with its captures kept in `cache`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "AUTOSAC_CACHE": "on"}
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "autosac", *arguments], stdout=subprocess.DEVNULL, env=environment
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    if status:
        raise SystemExit(f"autosac {' '.join(arguments)} failed")
    return Run(wall_s, usage.ru_utime, usage.ru_maxrss / 2**20)


def whole_process(names: list[str], repeat: int, commands: Sequence[str], *, cold_only: bool) -> Table:
    """Every command, cold and cached."""
    table = Table(title="Whole process (seconds)")
    for heading in ("command", "job", "wall", "user", "wall, cached", "user, cached", "GiB", "goal"):
        table.add_column(heading, justify="left" if heading in ("command", "job") else "right")
    for name in names:
        job = JOBS[name]
        words = [str(EXAMPLES / job.file), "--gpu", "h100-sxm-80gb", "--world-size", str(job.world_size), "--quiet"]
        own = ["--", *job.overrides] if job.overrides else []
        for command in commands:
            extra = ["--budget", job.budget] if command == "plan" else []
            cold, cached = [], []
            for _ in range(repeat):
                with tempfile.TemporaryDirectory() as folder:
                    cold.append(measure([command, *words, *extra, *own], Path(folder)))
                    if not cold_only:
                        cached.append(measure([command, *words, *extra, *own], Path(folder)))
            first = least(cold)
            figures = [f"{value:.1f}" for value in (first.wall_s, first.user_s)]
            figures += [f"{value:.1f}" for value in least(cached)[:2]] if cached else ["-", "-"]
            goal = str(GOALS.get((command, name), "-"))
            table.add_row(command, f"{name} x {job.world_size}", *figures, f"{first.gib:.2f}", goal)
    return table


def least(runs: list[Run]) -> Run:
    """The least of each figure."""
    return Run(*map(min, zip(*runs, strict=True)))


def stages(name: str) -> Table:
    """The stages of planning in one process, the captures' imports apart."""
    from autosac.capture.process.server import CaptureServer
    from autosac.induction import capturing
    from autosac.jobs.tasks import TitanJob, simulation_of
    from autosac.memory_sim import replay_allocator, simulate_memory
    from autosac.planning.planner import Goal, Planner

    file, world_size, _, overrides = JOBS[name]
    job = TitanJob.of(str(EXAMPLES / file), gpu="h100-sxm-80gb", world_size=world_size, overrides=overrides)
    table = Table("stage", "seconds", title=f"Stages, {name}")

    def timed(stage: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = action()
        table.add_row(stage, f"{time.perf_counter() - start:.2f}")
        return result

    with CaptureServer() as server:
        debug = JOBS["8b"][0], "--model.flavor", "debugmodel"
        small = TitanJob.of(str(EXAMPLES / debug[0]), gpu="h100-sxm-80gb", world_size=1, overrides=debug[1:])
        timed("capture process (imports, a small capture)", lambda: server.capture(small.request("none")))
        timed("capture of all layers", lambda: server.capture(job.request("none", observe=True)))
        trace = timed("capture by induction", lambda: capturing(server, job.request("none", observe=True)).result())
    simulation = simulation_of(trace, job.target)
    workspaces = job.target.workspaces
    timed("memory timeline and its peak", lambda: simulate_memory(trace, workspaces=workspaces).peak())
    timed("caching allocator", lambda: replay_allocator(trace, config=job.target.allocator, workspaces=workspaces))
    timed("prices", lambda: simulation.pricing)
    timed("execution of two steps", lambda: simulation.timeline)
    goal = Goal(budget_bytes=simulation.peak_active_bytes * 6 // 10, budget_kind="active")
    planner = timed("statistics and global problem", lambda: Planner(simulation, goal))
    timed("global MILP and local policies", lambda: planner.solve(goal.budget_bytes))
    return table


def growth() -> Table:
    """What capture (all layers, none induced) and simulation take, beside what grows."""
    from autosac.capture.process.server import CaptureServer
    from autosac.jobs.tasks import TitanJob, simulation_of

    table = Table(title="Growth (capture of all layers; imports apart)")
    for heading in ("job", "operators and other events", "capture s", "simulation s"):
        table.add_column(heading, justify="left" if heading == "job" else "right")

    def cases() -> Iterator[tuple[str, TitanJob, int | None]]:
        def job(name: str, ranks: int, *overrides: str) -> TitanJob:
            file = str(EXAMPLES / JOBS[name][0])
            return TitanJob.of(file, gpu="h100-sxm-80gb", world_size=ranks, overrides=overrides)

        yield "warming up", job("8b", 8), 1
        for layers in LAYERS:
            yield f"70b on 128 GPUs, {layers} layers", job("70b", 128), layers
        for ranks in RANKS:
            yield f"8b on {ranks} GPUs", job("8b", ranks), None
        for count in MICROBATCHES:
            batch = ("--training.local_batch_size", "1", "--training.global_batch_size", str(8 * count))
            yield f"8b on 8 GPUs, {count} microbatches", job("8b", 8, *batch), None

    with CaptureServer() as server:
        for name, job, layers in cases():
            start = time.perf_counter()
            trace = server.capture(replace(job.request("none"), layers=layers))
            captured = time.perf_counter()
            simulation = simulation_of(trace, job.target)
            simulation.prediction()
            done = time.perf_counter()
            if name != "warming up":
                table.add_row(name, f"{len(trace.events):,}", f"{captured - start:.2f}", f"{done - captured:.2f}")
    return table


def captures() -> Table:
    """Processor time of captures one after the other in one process: the first finds out what the others are handed."""
    from autosac.capture.process.server import CaptureServer
    from autosac.jobs.tasks import TitanJob

    tp = ("--parallelism.tensor_parallel_degree", "8")
    cases = (
        ("8b on 8 GPUs, 1 layer", "8b", (), 1),
        ("70b on 128 GPUs, TP 8, 1 layer", "70b", tp, 1),
        ("70b on 64 GPUs, TP 8, PP 4, 12 layers", "70b-pp", JOBS["70b-pp"].overrides, 12),
    )
    table = Table(title="Captures (seconds of processor time)")
    for heading in ("job", "first", "again", "full", "selective-op"):
        table.add_column(heading, justify="left" if heading == "job" else "right")
    for title, name, overrides, layers in cases:
        file, world_size, *_ = JOBS[name]
        job = TitanJob.of(str(EXAMPLES / file), gpu="h100-sxm-80gb", world_size=world_size, overrides=overrides)
        with CaptureServer(use_cache=False) as server:
            taken = []
            for mode in ("none", "none", "full", "selective-op"):
                before_s = children_s(server.process_id())
                server.capture(replace(job.request(mode, observe=mode == "none"), layers=layers))
                time.sleep(1.0)  # the process has waited for its child by then
                taken.append(children_s(server.process_id()) - before_s)
        table.add_row(title, *(f"{seconds:.2f}" for seconds in taken))
    return table


def children_s(process: int | None) -> float:
    """Processor time of a process's children that have ended, in seconds (Linux); 0 without a process."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="8b,70b")
    parser.add_argument("--commands", default="simulate,plan")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--captures", action="store_true")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    commands = arguments.commands.split(",")
    unknown = sorted({*names, *commands} - {*JOBS, "simulate", "plan"})
    if unknown or arguments.repeat < 1:
        parser.error(f"unknown models or commands {unknown}" if unknown else "--repeat must be at least 1")
    out = Console(width=110)
    if arguments.captures:
        out.print(captures())
        return
    out.print(whole_process(names, arguments.repeat, commands, cold_only=arguments.cold))
    os.environ["AUTOSAC_CACHE"] = "off"
    for name in names if arguments.stages else ():
        out.print(stages(name))
    if arguments.growth:
        out.print(growth())


if __name__ == "__main__":
    main()
