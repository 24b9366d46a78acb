"""Corrects prices by what the first steps of a run took (`autosac.runs`): the time of each module's forward and backward.

A module's time is a sum over many operators, so the corrections are inferred from sums. With p_i the price of an operator that
runs in the part g of a step (a module's forward or backward, or all the rest), n_gi how often, o_g what the part takes beside
its operators (the host, waiting), and y_g as measured,

    log y_g = log(o_g + sum_i n_gi p_i exp(c_i)) + noise_g        c ~ Gaussian process of `traces.correction`

whose greatest posterior is found by Gauss-Newton steps, each the posterior mean of a linear model (Rasmussen and Williams,
chapter 2.2, with sums of the process observed). The prior shares c among operators by machine, family and shape; the less of a
part is operators, the less it says. Equal parts, such as the layers of a transformer, are one observation: their mean. The
corrections are written as rows of a correction's file, which corrects all other prices of the profile (`run_corrected`).

The step time of the timeline is divided among parts as the device comes to the events (`RankTimeline.reached_ms`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.errors import UsageError
from autosac.estimator.calibration.traces.correction import (
    Correction,
    Observed,
    SignaturePoint,
    covariance,
    operator_point,
)
from autosac.estimator.hardware import Hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import Pricing, models_for
from autosac.runs import RunRecord
from autosac.runtime_sim import RankTimeline
from autosac.trace import Op, Phase, Trace

FORWARD, BACKWARD, REST = "forward", "backward", "rest"
_LEVELS = {
    "machine": 0.04,
    "family": 0.05,
    "family_shape": 0.05,
    "operator_shape": 0.02,
    "near": 0.02,
    "noise": 0.0025,
}
_UNIT_STD, _REST_STD, _BESIDE_STD = 0.03, 0.3, 0.3  # the rest holds what no capture shows: data, logging
_ROW_VARIANCE = 1e-4
_ITERATIONS = 8
_MOST_LOG = math.log(100.0)
Key = tuple[str, str]


@dataclass
class TimedPart:
    """A module's forward or backward, or the rest of the step: its time, and that of its operators by signature (ms)."""

    span_ms: float = 0.0
    operators_ms: Counter[int] = field(default_factory=Counter)


class Compared(NamedTuple):
    """One part of the step, or the mean of `alike` equal ones: times in ms, as predicted, as measured, as corrected."""

    name: str
    part: str
    alike: int
    predicted_ms: float
    measured_ms: float
    corrected_ms: float


class LearnedRun(NamedTuple):
    """What a run says of a profile. `more_bytes`: active and reserved peak above the prediction, None if not measured."""

    correction: Correction
    parts: tuple[Compared, ...]
    more_bytes: tuple[int, int] | None


def parts_of(
    trace: Trace, timeline: RankTimeline, event_ms: NDArray[np.float64], step_ms: float, units: Sequence[str]
) -> dict[Key, TimedPart]:
    """The step divided among forward and backward of these modules and the rest."""
    reached = timeline.reached_ms(step_ms)
    spans = np.diff(reached, append=step_ms).tolist()
    spans[0] += float(reached[0])
    unit_of = [_unit(trace, module, set(units)) for module in range(len(trace.modules))]
    found: dict[Key, TimedPart] = {}
    owner: Key = ("", REST)
    for event, span, ms in zip(trace.events, spans, event_ms.tolist(), strict=True):
        phase = getattr(event, "phase", None)
        if phase is not None:
            unit = unit_of[event.module] if event.module >= 0 else ""  # type: ignore[union-attr]
            inside = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.RECOMPUTE: BACKWARD}.get(phase)
            owner = (unit, inside) if unit and inside else ("", REST)
        part = found.setdefault(owner, TimedPart())
        part.span_ms += span
        if type(event) is Op and ms > 0:
            part.operators_ms[event.signature] += ms
    return found


def _unit(trace: Trace, module: int, units: set[str]) -> str:
    while module >= 0:
        if trace.modules[module] in units:
            return trace.modules[module]
        module = trace.module_parents[module]
    return ""


def learn_run(
    record: RunRecord,
    trace: Trace,
    timeline: RankTimeline,
    pricing: Pricing,
    step_ms: float,
    hardware: Hardware,
    peaks: tuple[int, int],
) -> LearnedRun:
    """The correction that a record says of a simulated step on `hardware`; `peaks`: its active and reserved bytes.

    UsageError if the measurements determine no operator of the step.
    """
    parts = parts_of(trace, timeline, pricing.event_ms, step_ms, [unit.fqn for unit in record.units])
    measured = _measured(record, parts)
    groups = _grouped({key: part for key, part in parts.items() if key in measured}, measured)
    signatures = sorted({signature for _, part, _, _ in groups for signature in part.operators_ms})
    points = _points(trace, hardware, signatures)
    inferred = [s for s in signatures if points[s] is not None]
    if not inferred:
        raise UsageError("the run says nothing about the job's operators: neither modules nor steps were timed")
    logs, corrected = _solve(groups, inferred, [p for s in inferred if (p := points[s]) is not None])
    rows = tuple(
        Observed(point, float(log), _ROW_VARIANCE)
        for s, log in zip(inferred, logs, strict=True)
        if (point := points[s]) is not None
    )
    about = {"device": record.device_name or record.device, "job": record.job, "torch": record.torch_version}
    compared = tuple(
        Compared(key[0], key[1], count, part.span_ms, ms, float(after))
        for (key, part, ms, count), after in zip(groups, corrected, strict=True)
    )
    more = None
    if record.memory is not None:
        more = (record.memory.peak_active_bytes - peaks[0], record.memory.peak_reserved_bytes - peaks[1])
    return LearnedRun(Correction(rows, dict(_LEVELS), about), compared, more)


def _points(trace: Trace, hardware: Hardware, signatures: Sequence[int]) -> dict[int, SignaturePoint | None]:
    """Where the correction sees these operators: beside the price that it will correct."""
    tf32 = trace.info.matmul_allows_tf32
    models = models_for(hardware, trace.info)
    rows = [trace.signatures[s] for s in signatures]
    prices = first_estimates(models.operators, rows)
    points = (operator_point(row, price.ms, tf32=tf32) for row, price in zip(rows, prices, strict=True))
    return dict(zip(signatures, points, strict=True))


def _measured(record: RunRecord, parts: dict[Key, TimedPart]) -> dict[Key, float]:
    """What was measured of the parts. What is not known of a module, such as its backward, is joined to the rest."""
    rest_of_step = parts.setdefault(("", REST), TimedPart())
    found: dict[Key, float] = {}
    for unit in record.units:
        for part, ms in ((FORWARD, unit.forward_ms), (BACKWARD, unit.backward_ms)):
            if ms and (unit.fqn, part) in parts:
                found[unit.fqn, part] = ms
    for key, left in parts.items():
        if key not in found and left is not rest_of_step:
            rest_of_step.span_ms += left.span_ms
            rest_of_step.operators_ms.update(left.operators_ms)
    rest = record.step_ms - sum(found.values())
    if rest > 0:
        found["", REST] = rest
    return found


def _grouped(parts: Mapping[Key, TimedPart], measured: Mapping[Key, float]) -> list[tuple[Key, TimedPart, float, int]]:
    """Parts with the same operators are one: (first key, mean of the parts, mean of what was measured, how many)."""
    alike: dict[tuple[str, frozenset[tuple[int, int]]], list[Key]] = {}
    for key, part in parts.items():
        content = frozenset((s, round(ms * 1e6)) for s, ms in part.operators_ms.items())
        alike.setdefault((key[1], content), []).append(key)
    groups = []
    for keys in alike.values():
        mean = TimedPart(sum(parts[key].span_ms for key in keys) / len(keys), parts[keys[0]].operators_ms)
        groups.append((keys[0], mean, sum(measured[key] for key in keys) / len(keys), len(keys)))
    return [group for group in groups if group[1].span_ms > 0]


def _solve(
    groups: Sequence[tuple[Key, TimedPart, float, int]], inferred: Sequence[int], points: Sequence[SignaturePoint]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The logarithms of the corrections, and what the parts take with them (ms)."""
    spent = np.array([[part.operators_ms[s] for s in inferred] for _, part, _, _ in groups])
    span = np.array([part.span_ms for _, part, _, _ in groups])
    beside = np.maximum(span - spent.sum(axis=1), 0.0)
    measured = np.array([ms for _, _, ms, _ in groups])
    own = np.array([_REST_STD if key[1] == REST else _UNIT_STD for key, _, _, _ in groups])
    noise = np.diag(own**2 + (_BESIDE_STD * beside / span) ** 2)
    prior = covariance(points, _LEVELS)
    logs = np.zeros(len(inferred))
    for _ in range(_ITERATIONS):
        now = beside + spent @ np.exp(logs)
        slopes = spent * np.exp(logs) / now[:, None]
        wanted = np.log(measured / now) + slopes @ logs
        gain = prior @ slopes.T
        logs = np.clip(gain @ np.linalg.solve(slopes @ gain + noise, wanted), -_MOST_LOG, _MOST_LOG)
    return logs, beside + spent @ np.exp(logs)
