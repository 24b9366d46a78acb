"""Capture (or take from the cache) and simulate a run; its figures beside the published ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import autosac
from autosac.capture.moe_load import MoELoad
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.estimator import price
from autosac.estimator.work import family
from autosac.jobs.tasks import simulation_of
from autosac.runtime_sim import ConstantOverlap, OverlapModel, simulate
from autosac.simulation import Simulation, Target
from autosac.trace import Signature, Trace
from benchmarks.torchtitan_published.former_products import models_of
from benchmarks.torchtitan_published.runs import Run

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run's simulation. Memory is that of the rank that reserves most; `verdict` the allocator's on that rank."""

    run: Run
    reserved_gib: float
    allocated_gib: float
    oom: bool
    verdict: str
    step_ms: float
    tokens_per_second: float

    @property
    def memory_gib(self) -> float:
        """What compares with the published figure."""
        return self.allocated_gib if self.run.allocated else self.reserved_gib

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak; None if none was published."""
        return None if self.run.memory_gib is None else self.memory_gib / self.run.memory_gib - 1

    @property
    def throughput_error(self) -> float | None:
        """Relative error of the throughput (of the inverse step time); None if there is nothing to compare."""
        return throughput_error(self.run, self.tokens_per_second, self.step_ms)


def throughput_error(run: Run, tokens_per_second: float, step_ms: float) -> float | None:
    """See `Result.throughput_error`."""
    if run.not_compared:
        return None
    if run.tokens_per_second is not None:
        return tokens_per_second / run.tokens_per_second - 1
    return None if run.step_ms is None else run.step_ms / step_ms - 1


def tokens_per_second(run: Run, trace: Trace, step_ms: float) -> float:
    """Of each GPU."""
    tokens = trace.info.tokens_per_step
    assert tokens is not None  # TorchTitan says it
    return 1e3 * tokens / step_ms / (run.tensor * run.pipeline * run.context)


class SlowProducts(OverlapModel):
    """Products are slower by `factor` beside collectives inside a node, as where their kernels expect all processors."""

    def __init__(self, factor: float) -> None:
        self._factor, self._usual = factor, ConstantOverlap()

    def compute_slowdown(self, signature: Signature, inter_node: bool) -> float:
        """`factor` for products inside a node, else the usual one."""
        if not inter_node and family(signature.name) in ("matmul", "batched_matmul"):
            return self._factor
        return self._usual.compute_slowdown(signature, inter_node)

    def communication_slowdown(self, kind: str, inter_node: bool) -> float:
        """The usual one."""
        return self._usual.communication_slowdown(kind, inter_node)


@cache
def _program() -> bytes:
    """A digest of what decides a capture besides its request: the capture's and the eras' source."""
    files = sorted((Path(autosac.__file__).parent / "capture").rglob("*.py"))
    files += sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        if file.name in ("specs.py", "eras.py") or "capture" in file.parts:
            digest.update(file.read_bytes())
    return digest.digest()


def captured(server: CaptureServer, request: TitanRequest, folder: Path | None) -> Trace:
    """The request's trace; from `folder` if it has been captured by the same program. CaptureError if it fails."""
    if folder is None:
        return server.capture(request)
    path = folder / (hashlib.sha256(_program() + request.to_json().encode()).hexdigest()[:24] + ".trace")
    if path.is_file():
        return Trace.load(path)
    trace = server.capture(request)
    folder.mkdir(parents=True, exist_ok=True)
    trace.save(path)
    return trace


def simulations_of(
    run: Run, server: CaptureServer, folder: Path | None = None, overlap: OverlapModel | None = None
) -> tuple[list[Simulation], Target]:
    """One simulation for each pipeline stage of a run, and its machine. Errors as `simulate_run`."""
    target = Target.of(run.gpu, run.gpus, cluster=run.cluster, allocator=run.allocator)
    if overlap is not None:
        target = replace(target, overlap=overlap)
    request = run.request(target.gpu, target.cluster.gpus_per_node)
    traces = [captured(server, request, folder)]
    for rank in run.later_ranks():
        shapes = traces[0].info.stage_outputs
        traces.append(captured(server, replace(request, rank=rank, stage_inputs=shapes), folder))
    return [_simulated(run, trace, target) for trace in traces], target


def busiest(run: Run, server: CaptureServer, folder: Path | None, target: Target) -> Simulation:
    """The step of the rank that gets most tokens, for which all others wait, as long as routers have learnt nothing."""
    request = run.request(target.gpu, target.cluster.gpus_per_node)
    uneven = replace(request, moe_load=MoELoad(kind="untrained", busiest=True))
    return _simulated(run, captured(server, uneven, folder), target)


def simulate_run(
    run: Run, server: CaptureServer, folder: Path | None = None, overlap: OverlapModel | None = None
) -> Result:
    """Simulate a run. UnreproducibleError if it cannot be expressed, CaptureError if it cannot be captured."""
    simulations, target = simulations_of(run, server, folder, overlap)
    step_ms = step_of([busiest(run, server, folder, target)] if run.is_uneven else simulations, target)
    worst = max(simulations, key=lambda s: s.peak_reserved_bytes)
    verdict, report = worst.allocation.verdict, worst.unlimited_allocation
    oom = verdict.outcome.value == "out of memory"
    if worst.allocation.retries and not oom:
        report = worst.allocation  # what is reserved is what the full device left after its retries
    return Result(
        run=run,
        reserved_gib=report.reserved_peak_bytes / GIB,
        allocated_gib=report.allocated_peak_bytes / GIB,
        oom=oom,
        verdict=str(verdict),
        step_ms=step_ms,
        tokens_per_second=tokens_per_second(run, simulations[0].trace, step_ms),
    )


def _simulated(run: Run, trace: Trace, target: Target) -> Simulation:
    """With the prices of the run's time."""
    models = models_of(run.made, trace.info, target.hardware)
    prices = price(trace, target.hardware, target.cluster, models=models, collectives=target.collectives)
    return replace(simulation_of(trace, target), other_prices=prices)


def step_of(simulations: Sequence[Simulation], target: Target) -> float:
    """The step of all stages (ms)."""
    if len(simulations) == 1:
        return simulations[0].step_ms
    names = dict.fromkeys(name for s in simulations for name in s.selective_modules)
    return simulate(
        [s.trace for s in simulations],
        [s.pricing for s in simulations],
        host=target.host,
        overlap=target.overlap,
        gpus_per_node=target.cluster.gpus_per_node,
        selective_modules=tuple(names),
    ).makespan_ms
