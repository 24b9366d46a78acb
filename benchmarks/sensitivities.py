"""Which prices the errors of published runs point at.

    python -m benchmarks.sensitivities --truth DIR [--cache DIR] [--results FILE]

By how much a step takes longer if one kind of price rises by a tenth, run by run: products, attention, generated kernels,
other kernels, collectives inside a node and between nodes. Then the weighted least squares of the errors over these
sensitivities, each source counting as one run, for every kind by itself and for all together: a kind whose coefficient is well
above 0 is priced too low by about so much, or runs with much of it have something else in common. *Left out* is the mean error
that is left if the coefficients come from the other sources: a kind that explains nothing does not lower it.

Runs of one pipeline stage and without experts, seen, held out and unseen. Figures are kept in `--results` and not computed
again. A run takes about ten seconds beside its capture, one with tensor parallelism up to a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosac.capture.process.server import CaptureServer
from autosac.errors import CaptureError
from autosac.estimator.work import family, generated_kind
from autosac.simulation import Simulation
from autosac.trace import Collective, Op
from benchmarks.ending import exit_code
from benchmarks.torchtitan_published.runs import Run, UnreproducibleError, read_held_out, read_runs, read_unseen
from benchmarks.torchtitan_published.simulated import simulations_of, step_of, throughput_error, tokens_per_second
from benchmarks.truth import truth_folder

KINDS = ("products", "attention", "generated", "other kernels", "inside a node", "between nodes")
_BY = 0.1


def kinds_of(simulation: Simulation) -> NDArray[np.int64]:
    """The kind of each event's price, -1 for events without one."""
    trace = simulation.trace
    per_node = simulation.target.cluster.gpus_per_node
    operators = [_kind(signature.name) for signature in trace.signatures]
    groups = [4 + (len({rank // per_node for rank in group.ranks()}) > 1) for group in trace.groups]
    found = np.full(len(trace.events), -1)
    for i, event in enumerate(trace.events):
        if type(event) is Op:
            found[i] = operators[event.signature]
        elif type(event) is Collective:
            found[i] = groups[event.group]
    return found


def _kind(name: str) -> int:
    if generated_kind(name):
        return 2
    kind = family(name)
    return 0 if "matmul" in kind else 1 if "attention" in kind else 3


def sensitivities(run: Run, server: CaptureServer, folder: Path | None) -> dict[str, Any]:
    """The logarithm of simulated over published throughput, and the relative change of the step for each kind."""
    (simulation,), target = simulations_of(run, server, folder)
    pricing, kinds = simulation.pricing, kinds_of(simulation)
    step_ms = step_of([simulation], target)
    found = {}
    for number, kind in enumerate(KINDS):
        ms = np.where(kinds == number, (1 + _BY) * pricing.event_ms, pricing.event_ms)
        changed = replace(simulation, other_prices=replace(pricing, event_ms=ms))
        found[kind] = (step_of([changed], target) / step_ms - 1) / _BY if (ms != pricing.event_ms).any() else 0.0
    error = throughput_error(run, tokens_per_second(run, simulation.trace, step_ms), step_ms)
    assert error is not None  # of `runs_of`
    return {"case": run.case, "source": run.source, "error": math.log1p(error), "kinds": found}


def fitted(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coefficients and their standard errors."""
    sizes = Counter(row["source"] for row in rows)
    weights = np.array([1 / math.sqrt(sizes[row["source"]]) for row in rows])
    table = np.array([[row["kinds"][kind] for kind in kinds] for row in rows]) * weights[:, None]
    errors = np.array([row["error"] for row in rows]) * weights
    inverse = np.linalg.pinv(table.T @ table)
    found = inverse @ table.T @ errors
    rest = errors - table @ found
    variance = float(rest @ rest) / max(1, len(rows) - len(kinds))
    return found, np.sqrt(np.diag(inverse) * variance)


def left_out(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> float:
    """The mean absolute error that is left if the coefficients come from other sources."""
    rest = []
    for source in dict.fromkeys(row["source"] for row in rows):
        coefficients, _ = fitted([row for row in rows if row["source"] != source], kinds)
        for row in rows:
            if row["source"] == source:
                explained = sum(c * row["kinds"][kind] for c, kind in zip(coefficients, kinds, strict=True))
                rest.append(abs(row["error"] - explained))
    return float(np.mean(rest))


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table."""
    yield f"{len(rows)} runs, mean error {np.mean([abs(row['error']) for row in rows]):.1%}"
    yield f"{'kind':<16} {'alone':>14} {'left out':>9}   with all others"
    all_of, deviations = fitted(rows, KINDS)
    for kind, coefficient, deviation in zip(KINDS, all_of, deviations, strict=True):
        (alone,), (error,) = fitted(rows, [kind])
        yield (
            f"{kind:<16} {alone:+6.2f} +- {error:4.2f} {left_out(rows, [kind]):>9.1%}   "
            f"{coefficient:+6.2f} +- {deviation:4.2f}"
        )
    yield f"{'all':<31} {left_out(rows, KINDS):>9.1%}"


def runs_of(truth: Path) -> Iterator[Run]:
    """Those that one simulation tells all of, and that have a throughput to compare with."""
    for run in (*read_runs(truth), *read_unseen(), *read_held_out()):
        if throughput_error(run, 1.0, 1.0) is not None and run.pipeline == 1 and not run.is_mixture:
            yield run


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sensitivities", description=__doc__)
    parser.add_argument(
        "--truth", type=truth_folder("truth"), required=True, help="folder of the published figures (CSV)"
    )
    parser.add_argument("--cache", type=Path, help="folder that keeps captures")
    parser.add_argument("--results", type=Path, help="file that keeps what has been computed")
    parser.add_argument("--gpu", default="h", help="beginnings of GPUs' names (default: Hopper)")
    options = parser.parse_args()

    def run_all() -> None:
        kept = options.results.read_text().splitlines() if options.results and options.results.is_file() else []
        rows = {row["case"]: row for row in map(json.loads, kept)}
        chosen = [run for run in runs_of(options.truth) if run.gpu.startswith(options.gpu)]
        for run in chosen:
            if run.case in rows:
                continue
            try:
                with CaptureServer() as server:
                    rows[run.case] = sensitivities(run, server, options.cache)
            except (UnreproducibleError, CaptureError) as e:
                print(f"{run.case}: {e}", file=sys.stderr)
                continue
            if options.results:
                options.results.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        print("\n".join(report([rows[run.case] for run in chosen if run.case in rows])))

    return exit_code(run_all)


if __name__ == "__main__":
    sys.exit(main())
