"""Simulate the published runs: ``python -m benchmarks.torchtitan_published --truth DIR`` from the repository's root.

Options: ``--case E0046`` (may be repeated), ``--era now`` (simulate with the installed TorchTitan's defaults instead of those
of the run's time, see eras.py), ``--slow-products 2`` (products beside collectives inside a node take twice as long),
``--cache DIR`` (keep captures), ``--csv FILE``, ``--list``; ``--unseen`` in place of ``--truth``: the runs of ``unseen.csv``,
which were found after all models were fitted; ``--held-out``: those of ``held_out.csv``, of pages that were looked at.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autosac.capture.process.server import CaptureServer
from autosac.errors import CaptureError, UsageError
from benchmarks.ending import exit_code
from benchmarks.torchtitan_published import tables
from benchmarks.torchtitan_published.eras import ERAS
from benchmarks.torchtitan_published.runs import Run, UnreproducibleError, read_held_out, read_runs, read_unseen
from benchmarks.torchtitan_published.simulated import Result, SlowProducts, simulate_run
from benchmarks.truth import truth_folder


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torchtitan_published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--truth", type=truth_folder("truth"), help="folder of the published figures (CSV)")
    source.add_argument("--unseen", action="store_true", help="the runs that were found after all models were fitted")
    source.add_argument("--held-out", action="store_true", help="runs of pages whose other rows were looked at")
    parser.add_argument("--case", action="append", help="only this run (may be repeated)")
    parser.add_argument("--era", choices=[era.name for era in ERAS], help="TorchTitan's defaults of this time, for all")
    parser.add_argument(
        "--slow-products", type=float, help="products beside collectives inside a node take so many times"
    )
    parser.add_argument("--cache", type=Path, help="folder that keeps captures")
    parser.add_argument("--csv", type=Path, help="write the figures to this file")
    parser.add_argument("--list", action="store_true", help="list the runs and stop")
    parser.add_argument("--debug", action="store_true", help="show the capture process's own output")
    return parser


def chosen(runs: Sequence[Run], options: argparse.Namespace) -> list[Run]:
    """The runs that the options ask for. UsageError for an unknown case."""
    known = {run.case: run for run in runs}
    for case in options.case or ():
        if case not in known:
            raise UsageError(f"--case {case}: the runs are {', '.join(known)}")
    picked = [run for run in runs if options.case is None or run.case in options.case]
    if options.era:
        era = next(era for era in ERAS if era.name == options.era)
        picked = [replace(run, era=era) for run in picked]
    return picked


def _runs(options: argparse.Namespace) -> list[Run]:
    if options.unseen:
        return read_unseen()
    return read_held_out() if options.held_out else read_runs(options.truth)


def run(options: argparse.Namespace) -> None:
    """Simulate what was asked for and print it."""
    runs = chosen(_runs(options), options)
    if options.list:
        for one in runs:
            print(f"{one.case:<6} {one.model:<14} {one.gpu} x {one.gpus}, {one.describe()}, {one.checkpointing}")
        return
    results: list[Result] = []
    overlap = None if options.slow_products is None else SlowProducts(options.slow_products)
    print(tables.header(), flush=True)
    for one in runs:
        try:
            with CaptureServer(debug=options.debug) as server:
                results.append(simulate_run(one, server, options.cache, overlap))
        except (UnreproducibleError, CaptureError) as e:
            print(tables.missing_line(one, str(e)), flush=True)
            continue
        print(tables.line(results[-1]), flush=True)
        if options.csv is not None:
            tables.write_csv(options.csv, results)
    print(f"\n{tables.summary(results)}")


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    return exit_code(lambda: run(_arguments().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
