"""The H100 study's configurations as scripts, beside `autosac.simulate`: the same figures, or how far they are apart.

    python -m benchmarks.scripts.study --truth DIR [--config N ...]

Each row has what the script takes, and in brackets the difference from `autosac.simulate` (script - simulate). Differences
of memory are in bytes. `benchmarks.h100_study` says what the study is.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import autosac
from autosac.errors import AutosacError
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptRequest
from autosac.scripts.target import script_target
from autosac.simulation import Simulation, simulation_of
from benchmarks.h100_study.configs import StudyConfig, read_configs
from benchmarks.h100_study.step import make_step
from benchmarks.h100_study.study import as_in_2024
from benchmarks.truth import truth_folder

GPU = "h100-sxm-80gb"
HEADING = "| | configuration | step (ms) | peak active (bytes) | peak reserved (bytes) |\n|---:|---|---:|---:|---:|"


def as_script(truth: Path, number: int) -> Simulation:
    """The step of a configuration that `autosac run` runs as a script."""
    request = ScriptRequest(
        script="benchmarks.scripts.study_step",
        is_module=True,
        arguments=(str(truth), str(number)),
        gpu=GPU,
        unlimited=True,
        quiet=True,
    )
    return simulation_of(run_script(request).trace, script_target(request))


def row(truth: Path, number: int, config: StudyConfig) -> str:
    """One configuration, both ways, as a line of the table."""
    try:
        expected = autosac.simulate(functools.partial(make_step, config), gpu=GPU)
        found = as_script(truth, number)
    except AutosacError as e:
        return f"| {number} | {config.describe()} | {e} | | |"
    active = found.peak_active_bytes - expected.peak_active_bytes
    reserved = found.peak_reserved_bytes - expected.peak_reserved_bytes
    return (
        f"| {number} | {config.describe()} | {found.step_ms:,.1f} ({100 * (found.step_ms / expected.step_ms - 1):+.4f} %) | "
        f"{found.peak_active_bytes:,} ({active:+,}) | {found.peak_reserved_bytes:,} ({reserved:+,}) |"
    )


def main() -> None:
    """Print the table."""
    as_in_2024()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=truth_folder("truth"), required=True, help="folder of the study's CSV files")
    parser.add_argument("--config", type=int, action="append", help="only these")
    options = parser.parse_args()
    configs = read_configs(options.truth)
    print(HEADING)
    for number in options.config or range(len(configs)):
        print(row(options.truth.resolve(), number, configs[number]), flush=True)


if __name__ == "__main__":
    main()
