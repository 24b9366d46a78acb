"""Runs the scripts of this folder under `autosac run` and writes a table of their figures.

    python -m benchmarks.scripts [--examples | --gpt] [--only NAME] [--out TABLE.md]

A script whose package is not installed has a row that says so. Times are those of the whole command: wall time, and (not with
--examples and --gpt) what all its processes take of processors, in the kernel too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.scripts.cases import CASES, EXAMPLES, GPT2, Case

FOLDER = Path(__file__).parent


def row(case: Case) -> str:
    """The case's line of the table; the last column is what others report or, if nobody does, the processors' time."""
    *figures, cpu = _figures(case)
    cells = (case.name, f"{case.nodes * (case.nproc or 1)} x {case.gpu}", *figures, case.theirs or cpu)
    return f"| {' | '.join(cells)} |"


def _figures(case: Case) -> tuple[str, str, str, str, str]:
    """Step, peaks, wall time and processors' time; or why there are none."""
    missing = [name for name in case.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed", "", "", "", ""
    command = [
        sys.executable,
        "-m",
        "autosac",
        "run",
        str(FOLDER / case.script),
        "--gpu",
        case.gpu,
        "--json",
        "--unlimited",
    ]
    command += [] if case.nproc is None else ["--nproc", str(case.nproc), "--nodes", str(case.nodes)]
    begin, before = time.monotonic(), _children_s()
    ended = subprocess.run([*command, "--", *case.arguments], capture_output=True, text=True, check=False)
    wall_s, cpu_s = time.monotonic() - begin, _children_s() - before
    if ended.returncode:
        return ended.stderr.strip().splitlines()[-1], "", "", "", ""
    found = json.loads(ended.stdout)
    active, reserved = (found[f"peak_{name}_bytes"] / 2**30 for name in ("active", "reserved"))
    return f"{found['step']['step_ms']:,.1f}", f"{active:.2f}", f"{reserved:.2f}", f"{wall_s:.0f}", f"{cpu_s:.0f}"


def _children_s() -> float:
    """Seconds that processes which have ended took of processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--examples", action="store_true", help="those of Phantora and Maya, with what they report")
    kinds.add_argument("--gpt", action="store_true", help="GPT-2 124M, beside published steps")
    parser.add_argument("--only", default="", metavar="NAME", help="cases with this in their names")
    parser.add_argument("--out", type=Path, metavar="TABLE.md")
    options = parser.parse_args()
    cases = EXAMPLES if options.examples else GPT2 if options.gpt else CASES
    last, side = ("processors (s)", "---:") if cases is CASES else ("reported", "---")
    heading = ("script", "GPUs", "step (ms)", "peak active (GiB)", "peak reserved (GiB)", "wall time (s)", last)
    lines = [f"| {' | '.join(heading)} |", f"|{'|'.join(('---', '---', *['---:'] * 4, side))}|"]
    for case in cases:
        if options.only in case.name:
            lines.append(row(case))
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
