"""How long the whole command takes, as a user waits for it: `autosac simulate` and `autosac plan` in a fresh process.

    python -m benchmarks.speed [--models 8b,70b] [--repeat 1]

Prints wall time, CPU time and peak resident memory (of the largest process) per command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parents[1] / "examples"
JOBS = {
    "8b": ("llama3_8b.toml", 8, "68GiB"),
    "70b": ("llama3_70b.toml", 64, "68GiB"),
}
# Whole process, two cores (seconds).
GOALS = {("simulate", "8b"): 6, ("simulate", "70b"): 8, ("plan", "8b"): 60, ("plan", "70b"): 150}


def measure(arguments: list[str]) -> tuple[float, float, float]:
    """(wall s, CPU s of all processes, peak GiB of the largest one) of one command."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "autosac", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    if status:
        raise SystemExit(f"autosac {' '.join(arguments)} failed")
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", default="8b,70b")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    table = Table(title="Whole process")
    for heading in ("command", "job", "wall s (best)", "CPU s", "peak GiB", "goal s"):
        table.add_column(heading, justify="left" if heading in ("command", "job") else "right")
    for name in arguments.models.split(","):
        file, world_size, budget = JOBS[name]
        job = [str(EXAMPLES / file), "--gpu", "h100-sxm-80gb", "--world-size", str(world_size), "--quiet"]
        for command, extra in (("simulate", []), ("plan", ["--budget", budget])):
            runs = [measure([command, *job, *extra]) for _ in range(arguments.repeat)]
            wall_s, cpu_s, gib = min(runs)
            table.add_row(
                command, name, f"{wall_s:.1f}", f"{cpu_s:.1f}", f"{gib:.2f}", str(GOALS.get((command, name), "-"))
            )
    Console().print(table)


if __name__ == "__main__":
    main()
