"""Malformed inputs of all kinds, and what the command line makes of them.

    python -m benchmarks.bad_input [--trials 2500] [--seed 0] [--kind KIND] [--show N]

Every trial spoils a valid input (a plan, a capture, a profile, a cluster, a job, a suite, an option, an environment variable,
an output) and runs the command in this process, up to where a job would be captured. Wanted is exit code 1 or 2 with one
clear line that names the file, the option or the setting; where the spoiled input makes sense all the same, an answer without
control characters. Prints, by kind, how many ended in a traceback, hung (20 s), were wrongly accepted or refused, or were
answered unclearly, and the first of those. Exit code 1 if there was any.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bad_input.command_lines import COMMAND_LINES
from benchmarks.bad_input.kinds import KINDS
from benchmarks.bad_input.trials import Outcome, Trial, attempt
from benchmarks.bad_input.workshop import Workshop

ALL = {**KINDS, **COMMAND_LINES}
VERDICTS = ("traceback", "hang", "wrongly accepted", "wrongly refused", "unclear")


def run(trials: int, seed: int, kinds: tuple[str, ...] = tuple(ALL)) -> Iterator[tuple[Trial, Outcome]]:
    """So many trials, the same for the same seed."""
    rng = random.Random(seed)
    weights = [ALL[kind][1] for kind in kinds]
    with tempfile.TemporaryDirectory(prefix="autosac-bad-input-") as folder:
        shop = Workshop(Path(folder), rng)
        for _ in range(trials):
            (kind,) = rng.choices(kinds, weights)
            trial = ALL[kind][0](shop)
            yield trial, attempt(trial)


def main() -> int:
    """Run them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(ALL), action="append", help="only this kind (may be repeated)")
    parser.add_argument("--show", type=int, default=10, help="how many failures to print (default 10)")
    arguments = parser.parse_args()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    shown = 0
    for trial, outcome in run(arguments.trials, arguments.seed, tuple(arguments.kind or ALL)):
        found[trial.kind][outcome.verdict] += 1
        if outcome.verdict != "ok" and shown < arguments.show:
            shown += 1
            command = " ".join(map(repr, trial.arguments))[:600]
            text = f"{outcome.verdict}: {trial.kind}: {trial.what}\n  {command}\n  {outcome.said}"
            print(text.encode("ascii", "backslashreplace").decode())
    print("| kind | trials | " + " | ".join(VERDICTS) + " |")
    print("|---" * (len(VERDICTS) + 2) + "|")
    total: Counter[str] = sum(found.values(), Counter())
    for kind, counts in [*((kind, found[kind]) for kind in ALL if kind in found), ("all", total)]:
        print(f"| {kind} | {counts.total()} | " + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |")
    return int(total["ok"] != total.total())


if __name__ == "__main__":
    sys.exit(main())
