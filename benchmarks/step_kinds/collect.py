"""Writes the evidence of profiled steps: ``python -m benchmarks.step_kinds.collect FILE --gpu GPU JOB=TRACE...``.

Every kind of call in the traces, with what it is priced at now, before anything is learned from them. Prices are those at full
clock. Kinds that ran beside collectives are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autosac.estimator import load_hardware
from autosac.estimator.calibration.traces.evidence import gather, occupied
from autosac.estimator.calibration.traces.learn import price_rows
from autosac.kineto import read_profile
from benchmarks.step_kinds.evidence import Kind, save


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("traces", nargs="+", metavar="JOB=TRACE")
    parser.add_argument("--gpu", required=True)
    options = parser.parse_args()
    kinds = []
    for number, named in enumerate(options.traces):
        job, _, path = named.rpartition("=")
        for p in price_rows(load_hardware(options.gpu), occupied([gather(read_profile(Path(path)))])):
            if not p.row.beside:
                row = p.row
                kinds.append(Kind(number, job, row.signature, row.us, row.calls, p.shipped_us, row.tf32))
    save(options.file, kinds)
    print(len(kinds), "kinds")


if __name__ == "__main__":
    main()
