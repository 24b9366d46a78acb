"""A calibration from beginning to end: measure, fit, write.

1. The operators, the most valuable first, each into the journal (`journal`), until all are done or the time is up. What does
   not fit into memory, or cannot be called, is skipped and listed. Time that is left goes to measuring again, the longest
   first: what else the machine does changes in minutes, and of all errors those of long operators average out least in a step.
2. The host, by the steps of tiny models (`host`); on a CPU also its memory (`timing.measure_host_memory`).
3. The fit, on a CPU or a GPU without a shipped profile: a Gaussian process for each group of operators (`shapes`, `gaussian`).
4. Three files, each whole or not at all, the profile last: the measured operators (`<name>.measured.json`), the fitted models
   (`<name>.calibrated.json`), the hardware profile (`<name>.toml`), which names the other two.

Of a group of operators (say, float32 additions) at most `_MOST_IN_A_GROUP` sizes are measured; of products, attention and
convolutions, whose shapes have more dimensions, more. A captured trace's operators are all measured, those that are expected
to take most of the step first.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosac.errors import UsageError
from autosac.estimator.calibration import timing
from autosac.estimator.calibration.calls import NotReplayable, build_call, tensor_bytes_needed
from autosac.estimator.calibration.fitted import Calibrated, CalibratedOperators, load_calibrated
from autosac.estimator.calibration.gaussian import GaussianProcess, fit_gaussian
from autosac.estimator.calibration.host import Probe, fit_host, measure_probes
from autosac.estimator.calibration.journal import Journal
from autosac.estimator.calibration.machine import Machine
from autosac.estimator.calibration.profile import known_gpu, write_profile
from autosac.estimator.calibration.shapes import ShapeFeatures, distinct, shape_of
from autosac.estimator.hardware import load_hardware
from autosac.estimator.models import Estimate, OperatorModel, first_estimates
from autosac.estimator.pricing import default_models
from autosac.estimator.profiled import save_measured, signature_key
from autosac.estimator.work import family
from autosac.trace import Op, Signature, Trace

_MOST_IN_A_GROUP = 48
_MOST_OF_A_PRODUCT = 200
_PRODUCTS = (
    "matmul",
    "batched_matmul",
    "attention_forward",
    "attention_backward",
    "convolution",
    "convolution_backward",
)
_MEMORY_SHARE = 0.6  # of what is free may be taken by one operator
_LOST = ("CUDA error", "device-side assert", "illegal memory access")
_FEWEST_TO_POOL = 6
_MOST_TIMES = 3
Report = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What is to be calibrated: `signatures` in order of their value, `probes` by name, into `output`, until `deadline`.

    `output`: the profile, a .toml file. `deadline`: by `time.monotonic`. `sampled`: the signatures are a sweep, of which a
    limited number of each group is enough.
    """

    machine: Machine
    signatures: Sequence[Signature]
    probes: Mapping[str, Probe]
    output: Path
    deadline: float
    resume: bool = False
    sampled: bool = True
    collectives: Mapping[tuple[str, int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CampaignResult:
    """What came of it: files, how many operators were measured, which were skipped and why, how many were left."""

    profile: Path
    measured: int
    skipped: Mapping[str, str]
    left: int
    groups: Mapping[str, float]
    host_us: Mapping[str, float]


def calibrate(campaign: Campaign, report: Report = lambda done, total, text: None) -> CampaignResult:
    """Measure, fit, write. UsageError for a journal that does not belong here, or when nothing could be measured."""
    journal_path = campaign.output.with_suffix(".journal.jsonl")
    device = campaign.machine.torch_device
    if device.type == "cpu":
        timing.keep_freed_memory()
    signatures = _limited(campaign.signatures) if campaign.sampled else tuple(dict.fromkeys(campaign.signatures))
    if device.type == "cpu":  # what the host costs is what their steps take beyond them
        signatures = tuple(dict.fromkeys((*_of_probes(campaign.probes), *signatures)))
    with Journal(journal_path, campaign.machine.identity, resume=campaign.resume) as journal:
        with _without_denormals():
            left = _measure(signatures, journal, campaign, report)
            if not left:
                _measure_again(signatures, journal, campaign, report)
        measured = {s: journal.done[signature_key(s)] for s in signatures if signature_key(s) in journal.done}
        if not measured:
            raise UsageError(f"none of the {len(signatures)} operators could be measured; {_first(journal.skipped)}")
        report(len(signatures), len(signatures), "memory and host")
        memory = timing.measure_host_memory() if device.type == "cpu" else None
        report(len(signatures), len(signatures), "fitting")
        calibrated = fit(measured, campaign, memory)
        host_us = _host(campaign, calibrated, measured)
        _write(campaign, calibrated, measured, host_us)
        if not left:
            journal.remove()
    return CampaignResult(
        profile=campaign.output,
        measured=len(measured),
        skipped={
            s.name + " " + _sizes(s): journal.skipped[signature_key(s)]
            for s in signatures
            if signature_key(s) in journal.skipped and s not in measured
        },
        left=left,
        groups={name: process.rel_std for name, process in calibrated.groups.items()},
        host_us=host_us,
    )


def by_value(trace: Trace, gpu: str) -> tuple[Signature, ...]:
    """A trace's operators, those first that are expected to take most of its step, priced as on a known GPU."""
    counts = Counter(event.signature for event in trace.events if type(event) is Op)
    hardware = load_hardware(gpu)
    wanted = [
        i for i in counts if shape_of(trace.signatures[i]) is not None and family(trace.signatures[i].name) != "host"
    ]
    if not wanted:
        raise UsageError("the trace is empty: it has no operators on the device that could be measured")
    models = default_models(hardware, learned=False).operators
    prices = first_estimates(models, [trace.signatures[i] for i in wanted])
    value = {i: counts[i] * price.ms for i, price in zip(wanted, prices, strict=True)}
    return tuple(trace.signatures[i] for i in sorted(wanted, key=lambda i: -value[i]))


# ---- measuring -------------------------------------------------------------------------------------------------


def _limited(signatures: Sequence[Signature]) -> tuple[Signature, ...]:
    """At most so many of each group, in order."""
    counts: Counter[str] = Counter()
    kept = []
    for signature in distinct(signatures):
        shape = shape_of(signature)
        assert shape is not None
        group = shape.groups[0]
        most = _MOST_OF_A_PRODUCT if group.partition(":")[0] in _PRODUCTS else _MOST_IN_A_GROUP
        counts[group] += 1
        if counts[group] <= most:
            kept.append(signature)
    return tuple(kept)


def _of_probes(probes: Mapping[str, Probe]) -> tuple[Signature, ...]:
    return distinct([s for probe in probes.values() for s in probe.trace.signatures])


def _measure(signatures: Sequence[Signature], journal: Journal, campaign: Campaign, report: Report) -> int:
    """Measure what the journal lacks; how many were left when the time was up."""
    timing.spin_up(campaign.machine.torch_device)
    for position, signature in enumerate(signatures):
        key = signature_key(signature)
        if key in journal.done or key in journal.skipped:
            continue
        if time.monotonic() > campaign.deadline:
            return sum(
                signature_key(s) not in journal.done and signature_key(s) not in journal.skipped
                for s in signatures[position:]
            )
        report(position, len(signatures), signature.name)
        _measure_one(signature, key, journal, campaign.machine)
    return 0


def _measure_again(signatures: Sequence[Signature], journal: Journal, campaign: Campaign, report: Report) -> None:
    """Measure what takes longest a second time, and so on, until the time is up or all were measured `_MOST_TIMES`."""
    keys = {signature_key(s): s for s in signatures if signature_key(s) in journal.done}
    longest = sorted(keys, key=lambda key: -journal.done[key][0])
    for times in range(1, _MOST_TIMES):
        for position, key in enumerate(longest):
            if time.monotonic() > campaign.deadline:
                return
            if journal.times[key] == times:
                report(position, len(longest), f"again: {keys[key].name}")
                _measure_one(keys[key], key, journal, campaign.machine)


@contextlib.contextmanager
def _without_denormals() -> Iterator[None]:
    """Denormal numbers, which training hardly has and processors are slow with, count as zero."""
    changed = torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if changed:
            torch.set_flush_denormal(False)


def _measure_one(signature: Signature, key: str, journal: Journal, machine: Machine) -> None:
    device = machine.torch_device
    needed, free = tensor_bytes_needed(signature), machine.free_bytes()
    if needed > free * _MEMORY_SHARE:
        journal.skip(key, f"it needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")
        return
    journal.begin(key)
    try:
        timed = timing.time_call(build_call(signature, device), device)
    except NotReplayable as e:
        journal.skip(key, str(e))
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as e:
        if any(text in str(e) for text in _LOST):
            raise UsageError(
                f"{signature.name} {_sizes(signature)} made the device unusable ({str(e).splitlines()[0]}): "
                "start again with --resume, which leaves it out"
            ) from e
        memory = isinstance(e, torch.OutOfMemoryError) or "memory" in str(e)
        journal.skip(key, "out of memory" if memory else f"{type(e).__name__}: {str(e).splitlines()[0][:200]}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    else:
        journal.finish(key, timed.ms, timed.rel_std)


def _sizes(signature: Signature) -> str:
    return " ".join("x".join(map(str, meta.shape)) for meta in signature.inputs[:3])


def _first(skipped: Mapping[str, str]) -> str:
    return next(iter(skipped.values()), "the time ran out before the first operator: give more --minutes")


# ---- fitting ---------------------------------------------------------------------------------------------------


def fit(measured: Mapping[Signature, tuple[float, float]], campaign: Campaign, memory: Any) -> Calibrated:
    """The models of what was measured.

    A GPU with a shipped profile keeps the shipped models, which know the kernels: `benchmarks/step_kinds --calibrated` prints
    how far models that were fitted to a sweep of an H100 are off beside them in 20 training steps.
    """
    rows = [(shape, ms) for s, (ms, _) in measured.items() if (shape := shape_of(s)) is not None]
    peak: dict[str, float] = {}
    for shape, ms in rows:
        if shape.flops > 0:
            peak[shape.arithmetic] = max(peak.get(shape.arithmetic, 0.0), shape.flops / ms * 1e3)
    large = sorted((shape.nbytes / ms * 1e3 for shape, ms in rows if shape.nbytes >= 2**20 and not shape.flops))
    plain = Calibrated(
        device=campaign.machine.torch_device.type,
        overhead_ms=min(ms for _, ms in rows),
        peak_flops=peak,
        bandwidth=large[int(0.9 * (len(large) - 1))] if large else max(shape.nbytes / ms * 1e3 for shape, ms in rows),
        groups={},
        collectives=campaign.collectives,
        memory=memory,
        about=campaign.machine.about | {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "operators": len(rows)},
    )
    if known_gpu(campaign.machine):
        return plain
    return replace(plain, groups=fitted_groups(rows, plain))


def fitted_groups(rows: Sequence[tuple[ShapeFeatures, float]], plain: Calibrated) -> dict[str, GaussianProcess]:
    """A process for each group of shapes and milliseconds, relative to the baseline of `plain`."""
    groups: dict[str, list[tuple[ShapeFeatures, float]]] = {}
    for shape, ms in rows:
        for group in shape.groups:
            groups.setdefault(group, []).append((shape, ms))
    return {
        group: _process(members, plain)
        for group, members in groups.items()
        if not group.startswith("family ") or len(members) >= _FEWEST_TO_POOL
    }


def _process(members: Sequence[tuple[ShapeFeatures, float]], plain: Calibrated) -> GaussianProcess:
    values = np.array([np.log(ms / plain.baseline_ms(shape)) for shape, ms in members])
    return fit_gaussian(np.array([shape.features for shape, _ in members], dtype=np.float64), values)


def _host(
    campaign: Campaign, calibrated: Calibrated, measured: Mapping[Signature, tuple[float, float]]
) -> dict[str, float]:
    """The host's costs; see `host`. Empty without probes."""
    if not campaign.probes:
        return {}
    device = campaign.machine.torch_device
    models: tuple[OperatorModel, ...] = (_Known(measured), CalibratedOperators(calibrated))
    operators = []
    for probe in campaign.probes.values():
        used = [event.signature for event in probe.trace.events if type(event) is Op] if device.type == "cpu" else []
        asked = [probe.trace.signatures[i] for i in used if not probe.trace.signatures[i].is_view]
        answers = zip(*(model.estimate(asked) for model in models), strict=True)
        operators.append(sum(next((e.ms for e in both if e is not None), 0.0) for both in answers))
    probes = campaign.probes.values()
    return fit_host(list(probes), measure_probes([p.make_step for p in probes], device), operators)


class _Known:
    """The operators that have just been measured."""

    def __init__(self, measured: Mapping[Signature, tuple[float, float]]) -> None:
        self._measured = measured

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        return [Estimate(self._measured[s][0], "profiled", 0.0) if s in self._measured else None for s in signatures]


# ---- writing ---------------------------------------------------------------------------------------------------


def _write(
    campaign: Campaign,
    calibrated: Calibrated,
    measured: Mapping[Signature, tuple[float, float]],
    host_us: Mapping[str, float],
) -> None:
    output = campaign.output
    measured_path, models_path = output.with_suffix(".measured.json"), output.with_suffix(".calibrated.json")
    save_measured(measured_path, measured)
    calibrated.save(models_path)
    write_profile(output, campaign.machine, calibrated, host_us, measured_path.name, models_path.name)
    load_calibrated.cache_clear()
    load_hardware.cache_clear()
