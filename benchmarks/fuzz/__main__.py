"""Fuzz `autosac.apply`: models of many families under planned, legal and hostile plans, compared bitwise with no plan.

    python -m benchmarks.fuzz --trials 20000 --seed 0 [--family NAME ...] [--jobs N] [--json FILE] [--markdown FILE]
    python -m benchmarks.fuzz --compiled aot_eager [--trials N ...]
    python -m benchmarks.fuzz --repro FAMILY:NUMBER

Prints a table by family. Ends with 1 if any trial is wrong or obscure (see `benchmarks.fuzz.trial`), else with 0. `--repro`
runs one trial of the table's last column and prints what was found with the whole traceback. `--plans DIR` keeps the planner's
plans for the next run; they are made anew otherwise. `--compiled` compiles the model of every family that can be compiled
(`benchmarks.fuzz.compiling`); its families have names like `gpt@aot_eager`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from autosac.files.writing import write_text_atomically
from benchmarks.fuzz.run import one_trial, prepared, run
from benchmarks.fuzz.table import BAD, Results
from benchmarks.fuzz.trial import NUMBERS_PER_SEED, Outcome


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    options = _parser().parse_args(arguments)
    os.environ["AUTOSAC_CACHE"] = "off"
    import benchmarks.fuzz.families  # noqa: F401
    from benchmarks.fuzz.compiling import family_of
    from benchmarks.fuzz.family import FAMILIES

    if options.list:
        for family in FAMILIES.values():
            print(f"{family.name:24} {family.about}")
        return 0
    unknown = [name for name in _names(options) if family_of(name) is None]
    if unknown:
        print(f"error: no family {unknown[0]!r}; --list shows all {len(FAMILIES)}", file=sys.stderr)
        return 2
    with _plans(options.plans) as plans:
        return _repro(options.repro, plans) if options.repro else _run(options, plans)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=_count, default=2000, metavar="N", help="trials in all (default 2000)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="which trials (default 0)")
    parser.add_argument(
        "--family", action="append", default=[], metavar="NAME", help="only this family; may be repeated"
    )
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="processes at a time (default 1)")
    parser.add_argument("--repro", default="", metavar="FAMILY:NUMBER", help="run one trial, with its traceback")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and failures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a page with the table")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="keep the planner's plans here")
    parser.add_argument("--quick", action="store_true", help="no plans of the planner, which take seconds each")
    parser.add_argument("--compiled", choices=("aot_eager", "inductor"), help="compile every model by this")
    parser.add_argument("--list", action="store_true", help="list the families")
    return parser


def _names(options: argparse.Namespace) -> list[str]:
    """The families of the run, as their names are written."""
    from benchmarks.fuzz.compiling import is_suitable
    from benchmarks.fuzz.family import FAMILIES

    if not options.compiled:
        return options.family or list(FAMILIES)
    names = options.family or [name for name, family in FAMILIES.items() if is_suitable(family)]
    return [f"{name}@{options.compiled}" for name in names]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


@contextmanager
def _plans(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="autosac-fuzz-") as made:
        yield Path(made)


def shares(names: list[str], most: dict[str, int | None], trials: int) -> dict[str, int]:
    """How many trials each family gets: as equal as the bounds of the slow ones allow."""
    found = dict.fromkeys(names, 0)
    left = trials
    open_ = list(names)
    while left and open_:
        each, more = divmod(left, len(open_))
        for i, name in enumerate(list(open_)):
            bound = most[name]
            wanted = each + (i < more)
            room = wanted if bound is None else min(wanted, bound - found[name])
            found[name] += room
            left -= room
            if bound is not None and found[name] == bound:
                open_.remove(name)
    return found


def all_numbers(seed: int, count: int) -> list[int]:
    """The first trials of a seed."""
    return list(range(seed * NUMBERS_PER_SEED, seed * NUMBERS_PER_SEED + count))


def quick_numbers(seed: int, count: int) -> list[int]:
    """The first trials of a seed that need no planner; hostile ones as often as legal ones."""
    first = seed * NUMBERS_PER_SEED
    return [first + 4 * (i // 2) + (1, 3)[i % 2] for i in range(count)]


def _run(options: argparse.Namespace, plans: Path) -> int:
    from benchmarks.fuzz.compiling import family_of

    results, began = Results(), time.monotonic()
    names = _names(options)
    families = {name: family for name in names if (family := family_of(name)) is not None}
    for name, family in families.items():
        if family.needs and find_spec(family.needs) is None:
            names.remove(name)
            results.skipped[name] = f"the package {family.needs} is not installed"
    counts = shares(names, {name: families[name].most for name in names}, options.trials)
    numbers = quick_numbers if options.quick or options.compiled else all_numbers
    done = 0

    def report(family: str, number: int, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        results.add(family, number, outcome)
        if outcome.kind in BAD and len(results.rows[family].failures) <= 3:
            line = " ".join(outcome.detail.split())[:200]
            print(f"{outcome.kind}: {family}:{number} ({outcome.plan_kind} plan): {line}", file=sys.stderr, flush=True)
        if done % 500 == 0:
            print(
                f"{done} of {sum(counts.values())} trials in {time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    run(
        [(name, numbers(options.seed, count)) for name, count in counts.items()], report, jobs=options.jobs, plans=plans
    )
    print(results.markdown())
    print(f"{time.monotonic() - began:.0f} s")
    if options.json:
        write_text_atomically(options.json, results.as_json())
    if options.markdown:
        command = (
            f"python -m benchmarks.fuzz{f' --compiled {options.compiled}' if options.compiled else ''} "
            f"--trials {options.trials} --seed {options.seed}{' --quick' * options.quick}"
        )
        write_text_atomically(options.markdown, results.page(command))
    return 0 if results.good else 1


def _repro(what: str, plans: Path) -> int:
    from benchmarks.fuzz.compiling import family_of
    from benchmarks.fuzz.plans import Planner
    from benchmarks.fuzz.trial import Session, course_of

    name, _, number = what.partition(":")
    family = family_of(name)
    if family is None or not number.isdecimal():
        print(f"error: --repro {what}: expected FAMILY:NUMBER, as gpt:17", file=sys.stderr)
        return 2
    course = course_of(family, int(number))
    print(f"{family.name}: {family.about}")
    print(
        f"variant {course.variant}, {course.plan_kind} plan, steps {course.steps} (rows by default or choice, autocast)"
    )
    outcome = one_trial(family, int(number), prepared(Session(Planner(plans))))
    print(outcome.trace or "no traceback")
    print(f"{outcome.kind}: {outcome.detail}")
    return 1 if outcome.kind in BAD else 0


if __name__ == "__main__":
    sys.exit(main())
