"""Predicted order beside published order, where several configurations of one model ran on as many of the same GPUs.

For each group: Kendall's tau of the two orders (1: the same, -1: reversed), and the regret: by how much the published rate
of the configuration that is predicted to be the best is below the best published one. Runs that ran out of memory come
last.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import kendalltau

from autosac.capture.process.server import CaptureServer
from autosac.errors import CaptureError
from benchmarks.torchtitan_published.runs import Run, UnreproducibleError, read_runs
from benchmarks.torchtitan_published.simulated import simulate_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A run's published and predicted tokens per second and GPU; 0 where it runs out of memory."""

    run: Run
    published: float
    predicted: float


def published_rate(run: Run) -> float | None:
    """Tokens per second and GPU; 0 if it ran out of memory, None if nothing comparable was published."""
    if run.oom:
        return 0.0
    if run.not_compared:
        return None
    if run.tokens_per_second is not None:
        return run.tokens_per_second
    if run.step_ms is None:
        return None
    others = run.tensor * run.pipeline * run.context
    return 1e3 * run.local_batch * run.sequence / run.step_ms / others


def groups(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of one model on as many of the same GPUs with the same sequence, two different published rates at least."""
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        if published_rate(run) is not None:
            found.setdefault((run.model, run.gpu, run.gpus, run.sequence, run.cluster), []).append(run)
    return [group for group in found.values() if len({published_rate(run) for run in group}) > 1]


def tau_of(ranked: Sequence[Ranked]) -> float:
    """Kendall's tau-b of the two orders."""
    return float(kendalltau([r.published for r in ranked], [r.predicted for r in ranked]).statistic)


def regret_of(ranked: Sequence[Ranked]) -> float:
    """What taking the predicted best costs, as a share of the best published rate."""
    taken = max(ranked, key=lambda r: r.predicted)
    return 1 - taken.published / max(r.published for r in ranked)


Predict = Callable[[Run], float]


def simulating(cache: Path | None) -> Predict:
    """Predictions by simulation: tokens per second and GPU, 0 where a run runs out of memory."""

    def predict(run: Run) -> float:
        with CaptureServer() as server:
            result = simulate_run(run, server, cache)
        return 0.0 if result.oom else result.tokens_per_second

    return predict


def reading(path: Path) -> Predict:
    """Predictions that ``benchmarks.torchtitan_published --csv`` wrote. UnreproducibleError for runs that it left out."""
    with path.open(newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}

    def predict(run: Run) -> float:
        row = rows.get(run.case, {})
        if row.get("oom_sim") == "True":
            return 0.0
        if not row.get("tokens_per_s_sim"):
            raise UnreproducibleError(f"{path} has no prediction")
        return float(row["tokens_per_s_sim"])

    return predict


def rank_published(folder: Path, predict: Predict) -> None:
    """Print every group's orders, tau and regret."""
    taus: list[float] = []
    regrets: list[float] = []
    for group in groups(read_runs(folder)):
        ranked = []
        print(f"\n{group[0].model} on {group[0].gpus} x {group[0].gpu}, {group[0].sequence} tokens", flush=True)
        for run in group:
            try:
                predicted = predict(run)
            except (UnreproducibleError, CaptureError) as e:
                print(f"  {run.case}: {e}", flush=True)
                continue
            rate = published_rate(run)
            assert rate is not None
            ranked.append(Ranked(run=run, published=rate, predicted=predicted))
            options = f"{run.describe()}, {run.checkpointing}{', compiled' if run.compiled else ''}, {run.precision}"
            print(f"  {run.case}  published {rate:8,.0f}  predicted {predicted:8,.0f}  {options}", flush=True)
        if len({r.published for r in ranked}) > 1 and len({r.predicted for r in ranked}) > 1:
            taus.append(tau_of(ranked))
            regrets.append(regret_of(ranked))
            print(f"  Kendall's tau {taus[-1]:+.2f}, regret {regrets[-1]:.1%}", flush=True)
    if taus:
        mean = sum(regrets) / len(regrets)
        tau = sum(taus) / len(taus)
        print(f"\n{len(taus)} groups: tau {tau:+.2f}, regret {mean:.1%} in the mean, {max(regrets):.1%} at worst")
