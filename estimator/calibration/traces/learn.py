"""Calibration from profiler traces: reads them, corrects the shipped models, and writes a hardware profile.

Beside the profile lie two files: `*.measured.json`, the operators that were seen (they come first, as those of the
other calibrations do), and `*.corrections.json` (module `correction`). Host times carry the profiler's own cost, which
is as large as the operator's, so they are reported and not written.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autosac.errors import UsageError
from autosac.estimator.calibration.profile import profile_base
from autosac.estimator.calibration.traces.correction import (
    Correction,
    Observed,
    collective_point,
    load_correction,
    operator_point,
)
from autosac.estimator.calibration.traces.evidence import EvidenceRow, TraceEvidence, gather, occupied
from autosac.estimator.cluster import default_cluster
from autosac.estimator.gpu import match_gpu
from autosac.estimator.hardware import Hardware, load_hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.estimator.profiled import save_measured
from autosac.estimator.work import family, work_of
from autosac.files.writing import write_text_atomically
from autosac.kineto import Profile, TransferTimes, read_profile, transfers
from autosac.trace import Signature

_FOLDS = 5
_LEAST_RESIDUE = 1e-4  # variance of an operator between equal calls that no median takes away
_QUANTUM = 1 / math.sqrt(12)
_LONG_US, _PRODUCTS = 100.0, ("matmul", "batched_matmul")
_FEWEST_CALLS_STD = 0.02
_ONE_NODE = 8
_TRANSFER_STD = 0.1
_BESIDE_STD = 0.3  # of the slowdown beside collectives, from one kind of call to another
Report = Callable[[int, int, str], None]


class PricedRow(NamedTuple):
    """One row of evidence beside the shipped models' price, and its point of the correction."""

    row: EvidenceRow
    shipped_us: float
    source: str
    observed: Observed


class FamilyError(NamedTuple):
    """Median absolute relative errors of one family: as shipped, of operators that the fit had not seen, of those it had."""

    family: str
    kinds: int
    ms: float
    shipped: float
    held_out: float
    fitted: float


class Clock(NamedTuple):
    """The fastest long product: its rate, its share of the peak, and the least clock that allows for that rate."""

    tflops: float
    share: float
    least_mhz: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the traces of one GPU say, and the correction that follows. `lost_transfers`: how many, and microseconds."""

    hardware: Hardware
    traces: tuple[TraceEvidence, ...]
    priced: tuple[PricedRow, ...]
    correction: Correction
    errors: tuple[FamilyError, ...]
    transfers: tuple[TransferTimes, ...]
    lost_transfers: tuple[int, float]
    clock: Clock | None


# ---- reading ---------------------------------------------------------------------------------------------------


def learn(paths: Sequence[Path], gpu: str = "", report: Report = lambda done, total, text: None) -> Learned:
    """Read the traces, all of one GPU type (`gpu`: a profile; else what the traces say), and fit.

    UsageError for traces that cannot be read, of several GPUs, without shapes, or without an operator that could be priced.
    """
    found: list[TraceEvidence] = []
    names: dict[str, str] = {}
    for i, path in enumerate(paths):
        report(i, len(paths) + 1, f"reading {path.name}")
        profile = read_profile(path)
        if not profile.with_shapes:
            raise UsageError(f"{path} holds no shapes: profile with record_shapes=True")
        names[gpu or profile_gpu(profile)] = str(path)
        found.append(gather(profile))
    if len(names) > 1:
        raise UsageError(f"the traces are from several GPUs: {', '.join(f'{n} ({p})' for n, p in names.items())}")
    report(len(paths), len(paths) + 1, "fitting")
    hardware = load_hardware(next(iter(names)))
    moved, lost = _transfers(found)
    priced = price_rows(hardware, occupied(found))
    observed = [p.observed for p in priced] + _observed_transfers(hardware, moved, found)
    if not observed:
        raise UsageError(f"no operator of {', '.join(map(str, paths))} could be identified: --json shows why")
    correction = Correction.fit(observed, _about(found))
    return Learned(
        hardware=hardware,
        traces=tuple(found),
        priced=priced,
        correction=correction,
        errors=family_errors(priced, correction),
        transfers=moved,
        lost_transfers=lost,
        clock=_clock(hardware, priced),
    )


def profile_gpu(profile: Profile) -> str:
    """The hardware profile of the GPU that a trace is of. UsageError if it does not tell or is unknown."""
    gpu = profile.gpu
    try:
        facts = (str(gpu["name"]), (int(gpu["computeMajor"]), int(gpu["computeMinor"])))
        return match_gpu(*facts, int(gpu["numSms"]), int(gpu["totalGlobalMem"]))
    except (KeyError, TypeError, ValueError) as e:
        if isinstance(e, UsageError):
            raise UsageError(f"{profile.path}: {e}; give it with --gpu") from e
        raise UsageError(f"{profile.path} does not say which GPU it is from: give it with --gpu") from e


def price_rows(hardware: Hardware, traces: Iterable[TraceEvidence]) -> tuple[PricedRow, ...]:
    """All rows that run on the device, with the shipped models' prices. `traces`: as `occupied` makes them."""
    priced: list[PricedRow] = []
    for trace in traces:
        for tf32 in (False, True):
            rows = [row for row in trace.rows if row.tf32 is tf32]
            models = default_models(hardware, tf32=tf32).operators
            estimates = first_estimates(models, [row.signature for row in rows]) if rows else []
            for row, estimate in zip(rows, estimates, strict=True):
                point = operator_point(row.signature, estimate.ms, tf32=tf32)
                if point is None or not row.us > 0:
                    continue
                variance = (_QUANTUM * trace.resolution_us / row.us) ** 2 + row.rel_std**2 / row.calls + _LEAST_RESIDUE
                variance += _BESIDE_STD**2 if row.beside else 0.0
                log_ratio = math.log(row.us / (estimate.ms * 1e3))
                observed = Observed(point, log_ratio, variance)
                priced.append(PricedRow(row, estimate.ms * 1e3, estimate.source, observed))
    return tuple(priced)


def _about(traces: Sequence[TraceEvidence]) -> dict[str, Any]:
    names = [Path(trace.path).name for trace in traces]
    return {"traces": names, "date": datetime.now(UTC).strftime("%Y-%m-%d")}


# ---- collectives -----------------------------------------------------------------------------------------------


def _transfers(traces: Sequence[TraceEvidence]) -> tuple[tuple[TransferTimes, ...], tuple[int, float]]:
    """Of all traces; those of one world, of which every rank is there once, are taken for the ranks of one job."""
    jobs: list[dict[int, TraceEvidence]] = []
    for trace in traces:
        mine = next((j for j in jobs if trace.rank not in j and _world(j) == trace.world_size > 1), None)
        if mine is None:
            jobs.append({trace.rank: trace})
        else:
            mine[trace.rank] = trace
    moved: list[TransferTimes] = []
    lost, lost_us = 0, 0.0
    for job in jobs:
        some, (count, us) = transfers({rank: t.collectives for rank, t in job.items()}, _world(job))
        moved += some
        lost, lost_us = lost + count, lost_us + us
    return tuple(moved), (lost, lost_us)


def _world(job: Mapping[int, TraceEvidence]) -> int:
    return next(iter(job.values())).world_size


def _observed_transfers(
    hardware: Hardware, moved: Sequence[TransferTimes], traces: Sequence[TraceEvidence]
) -> list[Observed]:
    """Transfers among the ranks of one node, which eight consecutive ones are taken for, beside the shipped model."""
    model = default_models(hardware).collectives
    cluster = default_cluster(hardware, max(trace.world_size for trace in traces))
    found = []
    for transfer in moved:
        placement = cluster.place(transfer.ranks)
        if placement.nodes > 1 or len(transfer.ranks) > _ONE_NODE or transfer.transfer_us <= 0:
            continue
        ms = model.estimate(transfer.kind, transfer.nbytes, placement).ms
        log_ratio = math.log(transfer.transfer_us / (ms * 1e3))
        # One rank's trace gives an upper bound, for part of its time may be waiting: above the model's time it says nothing.
        if transfer.traced == 1 and log_ratio > 0:
            continue
        point = collective_point(transfer.kind, transfer.nbytes, len(transfer.ranks), ms)
        found.append(Observed(point, log_ratio, _TRANSFER_STD**2 / transfer.calls + _LEAST_RESIDUE))
    return found


# ---- judging ---------------------------------------------------------------------------------------------------


def held_out_logs(observed: Sequence[Observed], correction: Correction) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The correction of each row by a fit that has not seen its point: five folds over points, with the variances of all."""
    points = sorted({o.point for o in observed})
    order = np.random.default_rng(0).permutation(len(points)) % _FOLDS
    fold = dict(zip(points, order.tolist(), strict=True))
    logs = np.zeros(len(observed))
    for k in range(_FOLDS):
        rest = tuple(o for o in observed if fold[o.point] != k)
        left = [i for i, o in enumerate(observed) if fold[o.point] == k]
        if rest and left:
            logs[left] = Correction(rest, correction.levels).predict([observed[i].point for i in left])[0]
    return logs


def errors_of(priced: Sequence[PricedRow], logs: Sequence[float]) -> list[float]:
    """Absolute relative errors of the shipped prices with these corrections."""
    return [abs(math.exp(log) * p.shipped_us / p.row.us - 1) for p, log in zip(priced, logs, strict=True)]


def family_errors(priced: Sequence[PricedRow], correction: Correction) -> tuple[FamilyError, ...]:
    """By family, the one with most device time first, and "all"."""
    observed = [p.observed for p in priced]
    if not observed:
        return ()
    shipped = errors_of(priced, [0.0] * len(priced))
    held_out = errors_of(priced, held_out_logs(observed, correction).tolist())
    fitted = errors_of(priced, correction.predict([o.point for o in observed])[0].tolist())
    members: dict[str, list[int]] = {"all": list(range(len(priced)))}
    for i, p in enumerate(priced):
        members.setdefault(p.observed.point.family, []).append(i)

    def error(name: str) -> FamilyError:
        mine = members[name]
        ms = sum(priced[i].row.us * priced[i].row.calls for i in mine) / 1e3
        middles = [statistics.median(column[i] for i in mine) for column in (shipped, held_out, fitted)]
        return FamilyError(name, len(mine), ms, *middles)

    return tuple(sorted((error(name) for name in members), key=lambda e: (e.family == "all", -e.ms)))


def _clock(hardware: Hardware, priced: Sequence[PricedRow]) -> Clock | None:
    """From the fastest product of at least a tenth of a millisecond: its rate cannot be above the peak at the clock held."""
    best: tuple[float, float] | None = None
    for p in priced:
        if family(p.row.signature.name) in _PRODUCTS and p.row.us >= _LONG_US:
            work = work_of(p.row.signature, tf32=p.row.tf32)
            rate = work.flops / (p.row.us * 1e-6)
            share = rate / hardware.peak_flops(work.arithmetic)
            best = max(best or (0.0, 0.0), (share, rate))
    return Clock(best[1] / 1e12, best[0], best[0] * hardware.boost_mhz) if best is not None else None


# ---- writing ---------------------------------------------------------------------------------------------------


def write_learned(learned: Learned, output: Path, gpu: str = "") -> None:
    """The profile and the two files beside it; each appears whole or not at all."""
    measured, corrections = output.with_suffix(".measured.json"), output.with_suffix(".corrections.json")
    save_measured(measured, measured_operators(learned.priced))
    learned.correction.save(corrections)
    names = ", ".join(Path(trace.path).name for trace in learned.traces)
    lines = [
        f"# Written by autosac calibrate --from-trace on {learned.correction.about['date']}.",
        f"base = {json.dumps(profile_base(learned.hardware, output, gpu))}",
        f"description = {json.dumps(f'{learned.hardware.description}, corrected by traces: {names}'[:500])}",
        f"measured = {json.dumps(measured.name)}",
        f"corrected = {json.dumps(corrections.name)}",
    ]
    write_text_atomically(output, "\n".join(lines) + "\n")
    load_correction.cache_clear()
    load_hardware.cache_clear()


def measured_operators(priced: Sequence[PricedRow]) -> dict[Signature, tuple[float, float]]:
    """Milliseconds and relative standard error of the operators that a capture would show alike.

    Left out are products in float32, for their price depends on whether a job allows TF32, copies from and to the
    host, and what only ran beside collectives.
    """
    rows: dict[Signature, list[EvidenceRow]] = {}
    for p in priced:
        product = family(p.row.signature.name) in _PRODUCTS and p.row.signature.inputs[0].dtype == "float32"
        known = p.row.has_strides and not p.row.beside
        if known and not product and p.observed.point.family != "host copy":
            rows.setdefault(p.row.signature, []).append(p.row)
    found = {}
    for signature, mine in rows.items():
        calls = sum(row.calls for row in mine)
        us = sum(row.us * row.calls for row in mine) / calls
        spread = max(row.rel_std for row in mine) / math.sqrt(calls)
        found[signature] = (us / 1e3, math.hypot(spread, _FEWEST_CALLS_STD))
    return found
