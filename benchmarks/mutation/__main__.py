"""Try mutants, and print how many of them the tests catch in each room.

    python -m benchmarks.mutation [--mutants 150] [--seed 0] [--jobs 1] [--files PATTERN] [--quick] [--again]
                                 [--covered FOLDER] [--list] [-o mutation.json]

Mutants come in an order that depends on the seed, so that a run with more of them goes on where a shorter one ended; what the
results file knows already is not tried again, but for survivors with --again. --quick runs only the tests that capture
nothing, minutes instead of hours: what it finds caught is the least that all tests catch. --covered runs the tests that run
the line, as `make contexts` has recorded, instead of those of the room. Stop it at any time: every result
is written as it comes. The checkout is not changed. Ends with 1 if less than 92 % of the mutants that change behaviour are
caught.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from benchmarks.mutation.covering import Covering
from benchmarks.mutation.mutants import Mutant, sample
from benchmarks.mutation.rooms import stages
from benchmarks.mutation.table import CAUGHT, SURVIVED, Result, load_judged, markdown, outcome
from benchmarks.mutation.trial import Bench, Run

_ROOT = Path(__file__).parents[2]
_GOAL = 0.92


def main() -> int:
    """See the module's docstring."""
    arguments = _arguments()
    chosen = sample(_ROOT, arguments.seed, arguments.mutants, arguments.files)
    if arguments.list:
        print("\n".join(f"{m.key} {m.file}:{m.line} {m.kind}: {m.before} -> {m.after}" for m in chosen))
        return 0
    known = _load(arguments.output)
    left = [m for m in chosen if m.key not in known or (arguments.again and known[m.key].outcome == SURVIVED)]
    _try(left, known, arguments)
    results = {m.key: known[m.key] for m in chosen if m.key in known}
    judged = load_judged()
    print(markdown(results, judged, arguments.seed))
    outcomes = [outcome(result, judged) for result in results.values()]
    return 0 if outcomes.count(CAUGHT) >= _GOAL * (outcomes.count(CAUGHT) + outcomes.count(SURVIVED)) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=150, metavar="N", help="how many mutants (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants come first (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="mutants that are tried side by side (default 1)"
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, metavar="S", help="seconds for a stage of tests (default 900)"
    )
    parser.add_argument("--files", default="", metavar="PATTERN", help="only source files whose path has this")
    parser.add_argument("--quick", action="store_true", help="run only the tests that capture nothing")
    parser.add_argument(
        "--covered",
        type=Path,
        metavar="FOLDER",
        help="run the tests that run the line: what make contexts has recorded",
    )
    parser.add_argument("--again", action="store_true", help="try those again that survived")
    parser.add_argument("--list", action="store_true", help="list the mutants and try none")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/mutation.json"), metavar="FILE.json")
    return parser.parse_args()


def _load(file: Path) -> dict[str, Result]:
    return {k: Result(**values) for k, values in json.loads(file.read_text()).items()} if file.exists() else {}


def _try(left: list[Mutant], known: dict[str, Result], arguments: argparse.Namespace) -> None:
    """Try mutants on several copies of the tree; `known` and the file get each result as it comes."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in left:
        waiting.put(mutant)
    lock = threading.Lock()
    errors: list[Exception] = []
    benches: list[Bench] = []
    covering = Covering(arguments.covered, _ROOT) if arguments.covered else None

    def work(folder: Path) -> None:
        try:
            bench = Bench(_ROOT, folder, arguments.limit, options=("-m", "not capture") if arguments.quick else ())
            benches.append(bench)
            while not errors and not waiting.empty():
                mutant = waiting.get_nowait()
                result = _result(bench, mutant, covering)
                with lock:
                    known[mutant.key] = result
                    _save(arguments.output, known)
                    print(
                        f"{result.outcome:8} {result.seconds:5.0f} s {mutant.file}:{mutant.line}", end=" ", flush=True
                    )
                    print(f"{mutant.before} -> {mutant.after} {result.by}".replace("\n", " "), flush=True)
        except queue.Empty:
            pass
        except Exception as e:
            errors.append(e)

    with tempfile.TemporaryDirectory(prefix="autosac-mutation-") as parent:
        threads = [
            threading.Thread(target=work, args=(Path(parent, str(i)),), daemon=True)
            for i in range(min(arguments.jobs, len(left)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for bench in benches:
                bench.stop()
    if errors:
        raise errors[0]


def _result(bench: Bench, mutant: Mutant, covering: Covering | None) -> Result:
    content = (_ROOT / mutant.file).read_bytes()
    chosen = covering.stages(mutant, content) if covering else stages(_ROOT, mutant.file)
    run = bench.trial(mutant, chosen) if chosen else Run(status=0, failed="", seconds=0.0)
    return Result(
        file=mutant.file,
        line=mutant.line,
        kind=mutant.kind,
        source=mutant.source,
        before=mutant.before,
        after=mutant.after,
        outcome=SURVIVED if run.passed else CAUGHT,
        by=run.failed or ("" if run.passed else "stopped" if run.status is None else f"exit {run.status}"),
        seconds=round(run.seconds, 1),
    )


def _save(file: Path, known: dict[str, Result]) -> None:
    """The file appears whole: a run may be stopped at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps({key: asdict(result) for key, result in known.items()}, indent=1) + "\n")
    new.replace(file)


if __name__ == "__main__":
    sys.exit(main())
