"""One simulated training step: the time and memory of a Trace on a target."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autosac.estimator import (
    Cluster,
    CollectiveModel,
    Hardware,
    Pricing,
    default_cluster,
    load_cluster,
    load_hardware,
    price,
)
from autosac.memory_sim import IdleMemory, MemoryTimeline, WorkspaceModel, idle_memory, simulate_memory
from autosac.memory_sim.allocator_config import AllocatorConfig
from autosac.memory_sim.replay import AllocatorReport, replay_allocator
from autosac.plans import Plan, Prediction
from autosac.quantities import format_bytes, format_ms
from autosac.runtime_sim import (
    INSTANT_HOST,
    Breakdown,
    Buffers,
    ConstantOverlap,
    HostModel,
    OverlapModel,
    Throughput,
    Timeline,
    serial_costs,
    simulate,
)
from autosac.target import TargetGPU
from autosac.torch_version import installed_release
from autosac.trace import Collective, Phase, Trace

ROCM_EXPANDABLE_SEGMENTS = (2, 12)
"""The first release of PyTorch whose build for GPUs of AMD has expandable segments (its pull request 177974)."""
TITAN_ALLOCATOR = "expandable_segments:True"  # what TorchTitan's launcher sets


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that a step is simulated for: a GPU in a cluster, the allocator's settings, and the host.

    `overlap`: how overlapping computation and communication slow each other down (`runtime_sim.NoInterference()`: not at
    all). `collectives`: a cost model of collectives (`estimator.ChunkModel`, `estimator.Corrected`, ...), None: the default.
    """

    hardware: Hardware
    cluster: Cluster
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    host: HostModel = field(default_factory=HostModel)
    overlap: OverlapModel = field(default_factory=ConstantOverlap)
    collectives: CollectiveModel | None = None

    @staticmethod
    def of(
        gpu: str,
        world_size: int,
        *,
        cluster: str | None = None,
        allocator: str = "",
        per_node: int | None = None,
        power_limit_w: float | None = None,
    ) -> Target:
        """The target with these names (or files) of GPU and cluster.

        Args:
            gpu: the name of a known GPU, or the path of a profile.
            world_size: number of GPUs.
            cluster: the name of a known cluster, or the path of a file; None: the usual cluster of the GPU.
            allocator: the job's PYTORCH_CUDA_ALLOC_CONF.
            per_node: ranks on each node; None: as many as the cluster's nodes have GPUs.
            power_limit_w: power cap of each GPU in watts; None: the profile's.

        Raises:
            HardwareError: the GPU or the cluster is unknown, or its file is wrong.
            UsageError: `allocator` is wrong.
        """
        hardware = load_hardware(gpu)
        if power_limit_w is not None:
            hardware = replace(hardware, power_limit_w=power_limit_w)
        machines = (
            load_cluster(cluster).sized(world_size) if cluster is not None else default_cluster(hardware, world_size)
        )
        if per_node is not None and per_node != machines.gpus_per_node:
            machines = replace(machines, gpus_per_node=per_node).sized(world_size)
        host = HostModel()
        if hardware.launch_us:
            host = host.scaled(hardware.launch_us)
        return Target(
            hardware=hardware,
            cluster=machines,
            allocator=_supported(AllocatorConfig.parse(allocator), hardware),
            host=replace(host, **cast(dict[str, Any], dict(hardware.host))),
        )

    @property
    def gpu(self) -> TargetGPU:
        """The GPU's properties that a captured program can query."""
        hardware = self.hardware
        return TargetGPU(
            name=hardware.device_name or hardware.description or hardware.name,
            memory_bytes=hardware.usable_bytes,
            compute_capability=hardware.compute_capability,
            sm_count=hardware.sm_count,
            l2_bytes=hardware.l2_bytes,
        )

    @property
    def with_expandable_segments(self) -> Target | None:
        """The same with the allocator's expandable segments; None where they are on, or PyTorch has none."""
        allocator = _supported(replace(self.allocator, expandable_segments=True), self.hardware)
        return None if allocator == self.allocator else replace(self, allocator=allocator)

    @property
    def workspaces(self) -> WorkspaceModel:
        """The memory that the GPU's libraries use."""
        hardware = self.hardware
        return WorkspaceModel(
            cublas_bytes=hardware.cublas_workspace_bytes,
            sm_count=hardware.sm_count,
            compute_capability=hardware.compute_capability,
        )


def _supported(config: AllocatorConfig, hardware: Hardware) -> AllocatorConfig:
    """Without expandable segments where PyTorch warns that the platform has none, and goes on without them."""
    release = installed_release()
    lacking = hardware.vendor == "AMD" and release is not None and release < ROCM_EXPANDABLE_SEGMENTS
    return replace(config, expandable_segments=False) if lacking else config


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated step of one rank. Times are in ms, memory in bytes. Each part is computed on first use.

    With pipeline parallelism `pipeline` contains all stages, this is the one at position `stage`, and its times are those of
    all stages running together. `other_prices` replace the prices of the target.
    """

    trace: Trace
    target: Target
    selective_modules: tuple[str, ...] = ()
    pipeline: Pipeline | None = None
    stage: int = 0
    other_prices: Pricing | None = None

    def __str__(self) -> str:
        """What it found, in a line."""
        reserved = format_bytes(self.peak_reserved_bytes)
        return (
            f"simulated step of {self.trace.info.model or 'a model'} on {self.target.hardware.name}: "
            f"{format_ms(self.step_ms)}, peak {reserved} reserved, {self.allocation.verdict}"
        )

    @property
    def _alone(self) -> Simulation:
        """The stage by itself, whose memory and prices are the same in its pipeline."""
        return self if self.pipeline is None else self.pipeline.stages[self.stage]

    @cached_property
    def memory(self) -> MemoryTimeline:
        """Allocated bytes over the step."""
        if self._alone is not self:
            return self._alone.memory
        return simulate_memory(self.trace, workspaces=self.target.workspaces)

    @cached_property
    def allocation(self) -> AllocatorReport:
        """The caching allocator over the job's first steps, on the whole device."""
        if self._alone is not self:
            return self._alone.allocation
        capacity_bytes = self.target.hardware.usable_bytes
        context_bytes = max(0, self.target.hardware.context_bytes + self.target.hardware.more_reserved_bytes)
        return self.unlimited_allocation.on_device(capacity_bytes, context_bytes, self.nccl_bytes) or replay_allocator(
            self.trace,
            config=self.target.allocator,
            capacity_bytes=capacity_bytes,
            workspaces=self.target.workspaces,
            context_bytes=context_bytes,
            nccl_bytes=self.nccl_bytes,
        )

    @cached_property
    def unlimited_allocation(self) -> AllocatorReport:
        """The caching allocator on a device that never runs out of memory: how much the job would reserve."""
        if self._alone is not self:
            return self._alone.unlimited_allocation
        return replay_allocator(self.trace, config=self.target.allocator, workspaces=self.target.workspaces)

    @cached_property
    def idle(self) -> IdleMemory:
        """Reserved memory that cannot be used when reserved memory peaks, on a device that never runs out of memory."""
        if self._alone is not self:
            return self._alone.idle
        report = self.unlimited_allocation
        return idle_memory(
            self.trace,
            report.reserved_peak_bytes,
            report.active_peak_bytes,
            config=self.target.allocator,
            workspaces=self.target.workspaces,
        )

    @property
    def nccl_bytes(self) -> int:
        """Memory of NCCL's buffers (bytes): one set per communicator that the step uses."""
        used = {event.group for event in self.trace.events if type(event) is Collective}
        return self.target.cluster.nccl_buffer_bytes * sum(self.trace.groups[group].size > 1 for group in used)

    @cached_property
    def pricing(self) -> Pricing:
        """The price of every event of the trace: its device time when it runs alone on the GPU (ms)."""
        if self._alone is not self:
            return self._alone.pricing
        target = self.target
        return self.other_prices or price(self.trace, target.hardware, target.cluster, collectives=target.collectives)

    @cached_property
    def timeline(self) -> Timeline:
        """The step on the simulated host, streams and links: when every event ran (ms)."""
        if self.pipeline is not None:
            return self.pipeline.timeline
        return execute_together((self,))

    @cached_property
    def breakdown(self) -> Breakdown:
        """The rank's step time by kind: computation, exposed communication, waiting, ... (ms)."""
        return self.timeline.breakdown(self.stage)

    @property
    def throughput(self) -> Throughput:
        """Tokens per second and model FLOPs utilization (MFU) of each GPU.

        Raises:
            SimulationError: the trace does not say how many tokens a step has.
        """
        return self.timeline.throughput(self.target.hardware.peak_flops("bfloat16"), self.stage)

    @property
    def step_ms(self) -> float:
        """Step time (ms)."""
        return self.timeline.makespan_ms

    @cached_property
    def recompute_ms(self) -> float:
        """Device time of recomputation (ms)."""
        events = self.trace.events
        return float(
            sum(
                ms
                for event, ms in zip(events, self.pricing.event_ms.tolist(), strict=True)
                if ms and getattr(event, "phase", None) is Phase.RECOMPUTE
            )
        )

    @property
    def peak_active_bytes(self) -> int:
        """PyTorch's ``active_bytes.all.peak``: the sizes of the allocator's live blocks (bytes)."""
        return max(0, self.unlimited_allocation.active_peak_bytes + self.target.hardware.more_active_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """The peak of reserved memory if the device never ran out (bytes)."""
        return max(0, self.unlimited_allocation.reserved_peak_bytes + self.target.hardware.more_reserved_bytes)

    @property
    def event_ms(self) -> NDArray[np.float64]:
        """When the step reaches each event of the trace (ms), one number per event: the time axis of pictures."""
        return self.timeline.ranks[self.stage].reached_ms(self.step_ms)

    def on(self, target: Target) -> Simulation:
        """The same step on another target, with all stages of its pipeline."""
        if target is self.target:
            return self
        if self.pipeline is None:
            return replace(self, target=target)
        stages = tuple(replace(stage, target=target) for stage in self.pipeline.stages)
        return Pipeline(stages=stages).joined()[self.stage]

    def peak_bytes(self, kind: str) -> int:
        """The peak (bytes) that a budget of this kind ("active" or "reserved") limits."""
        return self.peak_reserved_bytes if kind == "reserved" else self.peak_active_bytes

    @property
    def fits(self) -> bool:
        """Whether the job fits the GPU's memory."""
        return self.allocation.verdict.outcome.value != "out of memory"

    def work_ahead(self) -> None:
        """Compute what a prediction of the whole pipeline needs of this stage."""
        _ = self.allocation, self.unlimited_allocation, self.pricing

    def prediction(self) -> Prediction:
        """The figures that a plan states: step time, recomputation, peaks, and whether the step fits the GPU."""
        return Prediction(
            step_ms=self.step_ms,
            peak_active_bytes=self.peak_active_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            fits=self.fits,
            recompute_ms=self.recompute_ms,
        )


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One rank of each pipeline stage, executed together: they meet in their sends and receives."""

    stages: tuple[Simulation, ...]

    @cached_property
    def timeline(self) -> Timeline:
        """The executed step of all stages."""
        return execute_together(self.stages)

    def joined(self) -> tuple[Simulation, ...]:
        """The stages' simulations with the times of the whole pipeline."""
        return tuple(
            Simulation(
                trace=s.trace, target=s.target, selective_modules=s.selective_modules, pipeline=self, stage=position
            )
            for position, s in enumerate(self.stages)
        )


def execute_together(simulations: Sequence[Simulation]) -> Timeline:
    target = simulations[0].target
    pricings, host = [s.pricing for s in simulations], target.host
    if target.hardware.device == "cpu":
        pricings = [replace(s.pricing, event_ms=_serial(s, s.pricing.event_ms)) for s in simulations]
        host = INSTANT_HOST
    return simulate(
        [s.trace for s in simulations],
        pricings,
        host=host,
        overlap=target.overlap,
        gpus_per_node=target.cluster.gpus_per_node,
        selective_modules=sorted({name for s in simulations for name in s.selective_modules}),
        buffers=_nccl_buffers(target.cluster),
    )


def _nccl_buffers(cluster: Cluster) -> Buffers:
    """Those of this cluster. NCCL_BUFFSIZE is read from the environment; what is no number means its default, as in NCCL."""
    given = os.environ.get("NCCL_BUFFSIZE", "")
    linked = max(cluster.gpus_per_node - 1, 1) if cluster.intra_links == "mesh" else 1
    buffers = Buffers(pair_gbps=cluster.intra_gbps / linked, network_gbps=cluster.inter_gbps / cluster.gpus_per_node)
    return replace(buffers, buffer_bytes=int(given)) if given.isascii() and given.isdigit() else buffers


def _serial(simulation: Simulation, event_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    return serial_costs(simulation.trace, event_ms, simulation.target.host, simulation.selective_modules)


def _selective_modules(trace: Trace, plan: Plan | None) -> tuple[str, ...]:
    """The modules that run under dispatch modes: the units of the plan, or those of the job's own selective checkpointing.

    None of a compiled model: its modes run once, while it is compiled.
    """
    if trace.info.compiled:
        return ()
    if plan is not None and not plan.settings.job_checkpointing:
        return tuple(unit.fqn for unit in plan.units if unit.fqn in trace.modules)
    return tuple(name for name in trace.info.selective_modules if name in trace.modules)


def simulation_of(trace: Trace, target: Target, plan: Plan | None = None) -> Simulation:
    """The simulation of a captured step, which pays for selective checkpointing on the host where it is used."""
    return Simulation(trace=trace, target=target, selective_modules=_selective_modules(trace, plan))
