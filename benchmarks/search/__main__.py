"""Searches: ``python -m benchmarks.search --truth DIR`` ranks published runs; ``--job FILE --world-size N`` measures a search.

Options: ``--gpu NAME``, ``--workers N``, ``--sample-seconds S`` (default: as long as the search), ``--cache DIR`` (captures of
published runs).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from autosac.configurations.offers import Offer
from autosac.configurations.sessions import Inputs
from autosac.errors import AutosacError
from benchmarks.search.ranking import rank_published
from benchmarks.search.speed import measure


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--truth", type=Path, help="folder of the published figures (CSV)")
    parser.add_argument("--cache", type=Path, help="folder that keeps captures of published runs")
    parser.add_argument("--job", help="job file to search")
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample-seconds", type=float, default=None)
    options = parser.parse_args()
    try:
        if options.truth is not None:
            rank_published(options.truth, options.cache)
        if options.job is not None:
            offer = Offer(gpu=options.gpu, world_size=options.world_size)
            inputs = Inputs(config_file=options.job, offers=(offer,), workers=options.workers, use_cache=False)
            measure(inputs, options.sample_seconds)
    except AutosacError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
