"""Policies run for real: each in a process of its own, so that peaks are clean and running out of memory harms nobody.

The child (``python -m autosac.bench.measure``) reads one JSON request from its standard input and writes its result to the
file that the request names. On a CUDA device the peaks are those of the caching allocator (``active_bytes``,
``reserved_bytes``), on a CPU the profiler's record of every allocation, from before the model is built. Steps are timed
after two that are not; the peaks are those of the steps after the first, which makes the optimizer's states.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autosac.bench.results import MeasuredRun
from autosac.bench.suite import Configuration, Model, Suite, make_step_of
from autosac.errors import UsageError
from autosac.files.temporary import temporary_folder
from autosac.plans import Plan

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Where and how long to measure: "cuda" or "cpu", so many timed steps, at most so many seconds a policy."""

    device: str = "cuda"
    steps: int = 5
    time_limit_s: float = 600.0

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise UsageError(f"device {self.device!r}: expected cuda or cpu")
        if self.steps < 1:
            raise UsageError("at least one step must be measured")

    @property
    def target(self) -> str:
        """The target that predictions are made for: what runs on a CPU is predicted with a CPU's operators."""
        return "gpu" if self.device == "cuda" else "cpu"


def check_measurable(suite: Suite, measurement: Measurement) -> None:
    """UsageError where nothing can be measured. Starts no CUDA context in this process."""
    for model in suite.models:
        if model.job:
            raise UsageError(
                f"{model.name!r} is a TorchTitan job: only eager models are measured here; run the job with its plan instead"
            )
    if measurement.device == "cuda" and not _has_cuda():
        raise UsageError("there is no CUDA device to measure on; --device cpu measures tiny models on the CPU")


def _has_cuda() -> bool:
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def measure(
    suite: Suite, model: Model, configuration: Configuration, plan: Plan | None, measurement: Measurement
) -> MeasuredRun:
    """Run one policy of an eager model for real. What goes wrong in the run is the result's `error`."""
    with temporary_folder() as folder:
        plan_file = folder / "plan.json"
        if plan is not None:
            plan.save(plan_file)
        request = {
            "folder": str(suite.folder),
            "make_step": model.make_step,
            "arguments": dict(configuration.arguments),
            "plan": str(plan_file) if plan is not None else None,
            "device": measurement.device,
            "steps": measurement.steps,
            "result": str(folder / "result.json"),
        }
        environment = dict(os.environ)
        if suite.alloc_conf:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = suite.alloc_conf
        try:
            child = subprocess.run(
                [sys.executable, "-m", "autosac.bench.measure"],
                input=json.dumps(request),
                text=True,
                env=environment,
                capture_output=True,
                timeout=measurement.time_limit_s,
            )
        except subprocess.TimeoutExpired:
            return MeasuredRun(error=f"took longer than {measurement.time_limit_s:.0f} s")
        result = folder / "result.json"
        if not result.exists():
            said = child.stderr.strip().splitlines()
            return MeasuredRun(error=f"the run ended early: {said[-1] if said else f'exit code {child.returncode}'}")
        return MeasuredRun(**json.loads(result.read_text()))


# ---- the child -----------------------------------------------------------------------------------------------


def main() -> None:
    """Measure what standard input asks for."""
    import torch

    request = json.load(sys.stdin)
    make_step = make_step_of(Path(request["folder"]), request["make_step"], request["arguments"])
    device = torch.device(request["device"])
    run = _on_cuda if device.type == "cuda" else _on_cpu
    try:
        measured = run(lambda: _build(make_step, device, request["plan"]), request["steps"])
    except torch.OutOfMemoryError:
        measured = MeasuredRun(error="out of memory")
    Path(request["result"]).write_text(json.dumps(asdict(measured)))


def _build(make_step: Callable[..., Any], device: Any, plan_file: str | None) -> Callable[[], Any]:
    made = make_step(device)
    step: Callable[[], Any]
    model, step = made if isinstance(made, tuple) else (None, made)
    if plan_file is not None:
        from autosac.integrations.apply import apply

        apply(model, Plan.load(plan_file))
    return step


def timed_on_cuda(step: Callable[[], Any], steps: int) -> list[float]:
    """Milliseconds that each of these steps takes, waiting for the device after it."""
    import torch

    times_ms = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - began) * 1e3)
    return times_ms


def _on_cuda(build: Callable[[], Callable[[], Any]], steps: int) -> MeasuredRun:
    import torch

    step = build()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_WARM_UP_STEPS - 1):
        step()
    torch.cuda.synchronize()
    times_ms = timed_on_cuda(step, steps)
    stats = torch.cuda.memory_stats()
    return MeasuredRun(
        step_ms=statistics.median(times_ms),
        peak_active_bytes=stats["active_bytes.all.peak"],
        peak_reserved_bytes=stats["reserved_bytes.all.peak"],
    )


def _on_cpu(build: Callable[[], Callable[[], Any]], steps: int) -> MeasuredRun:
    """Time first, without the profiler, by the clock that a CPU is calibrated with; then everything once more under it."""
    from autosac.estimator.calibration.timing import cpu_clock

    step, clock = build(), cpu_clock()
    times_ms = []
    for number in range(_WARM_UP_STEPS + steps):
        began = clock()
        step()
        if number >= _WARM_UP_STEPS:
            times_ms.append((clock() - began) * 1e3)
    del step
    gc.collect()
    return MeasuredRun(step_ms=statistics.median(times_ms), peak_active_bytes=cpu_peak_bytes(build))


def cpu_peak_bytes(build: Callable[[], Callable[[], Any]]) -> int:
    """The most that tensors occupy during the second step, by the profiler's record of allocations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step = build()
        step()
        gc.collect()
        second_ns = time.time_ns()
        step()
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    present = [0, *itertools.accumulate(e.nbytes() for e in changes)]
    before = sum(e.start_ns() < second_ns for e in changes)
    return int(max(present[before:]))


if __name__ == "__main__":
    main()
