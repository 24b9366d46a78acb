"""Run the study: ``python -m benchmarks.h100_study --truth DIR [--model M] [--config N] [--csv out.csv]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from autosac.errors import UsageError
from benchmarks.ending import exit_code
from benchmarks.h100_study.configs import StudyConfig, read_configs, read_measured
from benchmarks.truth import truth_folder


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.h100_study", description=__doc__)
    parser.add_argument("--truth", type=truth_folder("truth"), required=True, help="folder of the study's CSV files")
    parser.add_argument("--model", action="append", help="only this model (may be repeated)")
    parser.add_argument("--config", type=int, action="append", help="only this configuration, counted from 0")
    parser.add_argument("--measured", action="store_true", help="only configurations with measured figures")
    parser.add_argument("--csv", type=Path, help="write the figures to this file")
    parser.add_argument("--list", action="store_true", help="list the configurations and stop")
    return parser


def _chosen(configs: Sequence[StudyConfig], options: argparse.Namespace) -> list[int]:
    for number in options.config or ():
        if not 0 <= number < len(configs):
            raise UsageError(f"--config {number}: the study has configurations 0 to {len(configs) - 1}")
    models = {config.model for config in configs}
    for model in options.model or ():
        if model not in models:
            raise UsageError(f"--model {model}: the study has {', '.join(sorted(models))}")
    return [
        i
        for i, config in enumerate(configs)
        if (options.config is None or i in options.config) and (options.model is None or config.model in options.model)
    ]


def run(options: argparse.Namespace) -> None:
    """Simulate what was asked for and print it. AutosacError for wrong usage or a step that cannot be captured."""
    configs = read_configs(options.truth)
    known = read_measured(options.truth)
    numbers = [i for i in _chosen(configs, options) if not options.measured or configs[i] in known]
    if options.list:
        for i in numbers:
            print(f"{i:3d}  {configs[i].describe()}{'  (measured)' if configs[i] in known else ''}")
        return
    from benchmarks.h100_study import study

    results = []
    print(study.header(), flush=True)
    for i in numbers:
        results.append(study.simulate(configs[i], known.get(configs[i])))
        print(study.line(results[-1]), flush=True)
        if options.csv is not None:
            study.write_csv(options.csv, results)
    print(f"\n{study.summary(results)}")


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    return exit_code(lambda: run(_arguments().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
