"""The H100 study's configurations as scripts, beside `autosac.simulate`: the same figures, or how far they are apart.

    python -m benchmarks.scripts.study --truth DIR [--config N ...]

`benchmarks.h100_study` says what the study is.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import autosac
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptRequest
from autosac.simulation import simulation_of
from benchmarks.h100_study.configs import read_configs
from benchmarks.h100_study.step import make_step

GPU = "h100-sxm-80gb"


def line(truth: Path, number: int) -> str:
    """One configuration, both ways."""
    config = read_configs(truth)[number]
    expected = autosac.simulate(functools.partial(make_step, config), gpu=GPU)
    begin = time.monotonic()
    request = ScriptRequest(
        script="benchmarks.scripts.study_step",
        is_module=True,
        arguments=(str(truth), str(number)),
        gpu=GPU,
        unlimited=True,
        quiet=True,
    )
    found = simulation_of(run_script(request).trace, expected.target)
    active = found.peak_active_bytes - expected.peak_active_bytes
    reserved = found.peak_reserved_bytes - expected.peak_reserved_bytes
    step = found.step_ms / expected.step_ms - 1
    return (
        f"{number:3d}  {config.describe():60}  {found.step_ms:8.1f} ms ({step:+.2e})  {found.peak_active_bytes} "
        f"({active:+d})  {found.peak_reserved_bytes} ({reserved:+d})  {time.monotonic() - begin:.0f} s"
    )


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the study's CSV files")
    parser.add_argument("--config", type=int, action="append", help="only these")
    options = parser.parse_args()
    for number in options.config or range(len(read_configs(options.truth))):
        print(line(options.truth.resolve(), number), flush=True)


if __name__ == "__main__":
    main()
