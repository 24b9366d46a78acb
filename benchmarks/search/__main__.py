"""Searches: ``python -m benchmarks.search --truth DIR`` ranks published runs; ``--job FILE --world-size N`` measures a search,
or checks the bounds of so many layouts with ``--check COUNT``, or compares pipeline stages with ``--splits``. ``--small FIRST
COUNT`` works out small spaces taken at random as a whole, and compares the search's best with the best of all.

Options: ``--gpu NAME``, ``--space FILE``, ``--budget BUDGET``, ``--seed N``, ``--workers N``, ``--sample-seconds S`` (default:
as long as the search), ``--cache DIR`` (captures of published runs), ``--csv FILE`` (their predictions, by
``benchmarks.torchtitan_published``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autosac.capture.processors import available_processors
from autosac.configurations.space.offers import Offer
from autosac.configurations.space.request import SearchRequest
from autosac.configurations.space.space import Space, load_space
from benchmarks.ending import exit_code
from benchmarks.search.checks import check_bounds
from benchmarks.search.ranking import rank_published, reading, simulating
from benchmarks.search.small import check_small
from benchmarks.search.speed import measure
from benchmarks.search.splits import compare_splits
from benchmarks.truth import truth_folder


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--truth", type=truth_folder("truth"), help="folder of the published figures (CSV)")
    parser.add_argument("--cache", type=Path, help="folder that keeps captures of published runs")
    parser.add_argument("--csv", type=Path, help="what benchmarks.torchtitan_published --csv wrote: simulate nothing")
    parser.add_argument("--job", help="job file to search")
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=available_processors())
    parser.add_argument("--sample-seconds", type=float, default=None)
    parser.add_argument("--space", type=Path)
    parser.add_argument("--budget", default="85%")
    parser.add_argument("--splits", action="store_true")
    parser.add_argument("--check", type=int, default=0, metavar="COUNT")
    parser.add_argument("--small", type=int, nargs=2, metavar=("FIRST", "COUNT"))
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(options: argparse.Namespace) -> int:
    """Do what was asked for. 1 if a bound did not hold."""
    if options.truth is not None:
        rank_published(options.truth, reading(options.csv) if options.csv is not None else simulating(options.cache))
    if options.small is not None:
        first, count = options.small
        return int(check_small(range(first, first + count)) > 0)
    if options.job is not None:
        offer = Offer(gpu=options.gpu, world_size=options.world_size)
        request = SearchRequest(
            job=options.job,
            offers=(offer,),
            space=load_space(options.space) if options.space is not None else Space(),
            budget=options.budget,
            workers=options.workers,
            use_cache=False,
        )
        if options.splits:
            return int(compare_splits(request) == 0)
        if options.check:
            return int(check_bounds(request, options.check, options.seed) > 0)
        measure(request, options.sample_seconds)
    return 0


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    return exit_code(lambda: run(_arguments().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
