"""How long `autosac simulate` takes for the largest jobs, and how much memory: nothing may grow with the number of ranks.

    python -m benchmarks.scale [--jobs dense,moe] [--ranks 8192,16384]

Llama-3 405B in five dimensions (pipeline, context and tensor parallel, data parallel sharded and replicated), and
DeepSeek-V3 671B in five (expert instead of context parallel), each in a fresh process whose captures are not kept. More
ranks are more replicas, so that what a rank does is the same. Prints wall and user time, the memory that all processes of
the command hold together at most (proportional set size, sampled every two seconds; Linux), step time and peak; exit code 1
if a row misses its goal. Meant for an idle machine of two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

GOAL_S, GOAL_GIB = 180.0, 8.0
_PERIOD_S = 2.0
_COMMON = """
[training]
local_batch_size = 8
seq_len = {seq_len}
[activation_checkpoint]
mode = "full"
[parallelism]
pipeline_parallel_degree = 8
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatch_size = 1
tensor_parallel_degree = 8
data_parallel_replicate_degree = {replicas}
"""
JOBS = {
    "dense": ("llama3", "405B", 8192, "context_parallel_degree = 2\ndata_parallel_shard_degree = 8\n"),
    # Its attention (flex) excludes context parallelism.
    "moe": ("deepseek_v3", "671B", 4096, "data_parallel_shard_degree = 16\nexpert_parallel_degree = 64\n"),
}
_RANKS_PER_REPLICA = 8 * 8 * 2 * 8


class Measured(NamedTuple):
    """One command: seconds on the clock, user seconds and most memory of all its processes, and what it printed."""

    wall_s: float
    user_s: float
    gib: float
    document: dict[str, Any]


def job_file(folder: Path, name: str, ranks: int) -> Path:
    """Write the job for this many ranks."""
    model, flavor, seq_len, extra = JOBS[name]
    replicas, rest = divmod(ranks, _RANKS_PER_REPLICA)
    if rest or not replicas:
        raise SystemExit(f"{ranks} ranks: a multiple of {_RANKS_PER_REPLICA} is needed")
    text = f'[model]\nname = "{model}"\nflavor = "{flavor}"\n' + _COMMON.format(seq_len=seq_len, replicas=replicas)
    path = folder / f"{name}{ranks}.toml"
    path.write_text(text + extra)
    return path


def measure(job: Path, ranks: int) -> Measured:
    """Simulate a job in a fresh process."""
    command = [sys.executable, "-m", "autosac", "simulate", str(job), "--gpu", "h100-sxm-80gb", "--quiet", "--json"]
    start, before = time.perf_counter(), os.times().children_user
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "--world-size", str(ranks)], stdout=output, env={**os.environ, "AUTOSAC_CACHE": "off"}
        )
        with _most_memory(process.pid) as most:
            status = process.wait()
        if status:
            raise SystemExit(f"autosac simulate failed for {ranks} ranks")
        wall_s, user_s = time.perf_counter() - start, os.times().children_user - before
        output.seek(0)
        return Measured(wall_s, user_s, most[0] / 2**30, json.load(output))


@contextlib.contextmanager
def _most_memory(root: int) -> Iterator[list[float]]:
    """The most bytes that a process and all its descendants hold together, sampled."""
    most, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(_PERIOD_S):
            most[0] = max(most[0], sum(map(_held, _family(root))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def _family(root: int) -> list[int]:
    """A process and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = [root]
    for process in found:
        found += parents.get(process, [])
    return found


def _held(process: int) -> float:
    """Bytes of a process, shared pages divided among those who share them; 0 if it has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1]) * 2**10
    return 0.0


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="dense,moe", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--ranks", default="8192,16384", help=f"multiples of {_RANKS_PER_REPLICA}")
    arguments = parser.parse_args()
    table = Table(title=f"autosac simulate, whole process (goal: {GOAL_S:.0f} s and {GOAL_GIB:.0f} GiB)")
    for heading in ("job", "ranks", "wall", "user", "memory", "step time", "peak reserved"):
        table.add_column(heading, justify="left" if heading == "job" else "right")
    missed = False
    for name in arguments.jobs.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(job_file(Path(folder), name, ranks), ranks)
            missed |= found.wall_s > GOAL_S or found.gib > GOAL_GIB
            table.add_row(
                " ".join(JOBS[name][:2]),
                f"{ranks:,}",
                f"{found.wall_s:.0f} s",
                f"{found.user_s:.0f} s",
                f"{found.gib:.1f} GiB",
                f"{found.document['step']['step_ms'] / 1e3:.2f} s",
                f"{found.document['peak_reserved_bytes'] / 2**30:.1f} GiB",
            )
            Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
