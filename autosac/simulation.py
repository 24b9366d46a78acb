"""One simulated training step: a Trace, priced and executed, with its memory; the figures that plans are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autosac.capture.target import TargetGPU
from autosac.estimator import Cluster, Hardware, Pricing, default_cluster, load_cluster, load_hardware, price
from autosac.memory_sim import MemoryTimeline, WorkspaceModel, simulate_memory
from autosac.memory_sim.allocator_config import AllocatorConfig
from autosac.memory_sim.replay import AllocatorReport, replay_allocator
from autosac.plans import Prediction
from autosac.runtime_sim import HostModel, Timeline, simulate
from autosac.trace import Collective, Phase, Trace

TITAN_ALLOCATOR = "expandable_segments:True"  # what TorchTitan's launcher sets


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a step is simulated for: a GPU in a cluster, with its allocator's settings and its host."""

    hardware: Hardware
    cluster: Cluster
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    host: HostModel = field(default_factory=HostModel)

    @staticmethod
    def of(gpu: str, world_size: int, *, cluster: str | None = None, allocator: str = "") -> Target:
        """The target by the names (or files) of GPU and cluster, and a PYTORCH_CUDA_ALLOC_CONF string.

        UsageError (HardwareError) for what is unknown or wrong.
        """
        hardware = load_hardware(gpu)
        machines = load_cluster(cluster).sized(world_size) if cluster else default_cluster(hardware, world_size)
        host = HostModel()
        return Target(
            hardware=hardware,
            cluster=machines,
            allocator=AllocatorConfig.parse(allocator),
            host=host.scaled(hardware.launch_us) if hardware.launch_us else host,
        )

    @property
    def gpu(self) -> TargetGPU:
        """What a captured program can ask of this GPU."""
        hardware = self.hardware
        return TargetGPU(
            name=hardware.description or hardware.name,
            memory_bytes=hardware.usable_bytes,
            compute_capability=hardware.compute_capability,
            sm_count=hardware.sm_count,
            l2_bytes=hardware.l2_bytes,
        )

    @property
    def workspaces(self) -> WorkspaceModel:
        """What the GPU's libraries take."""
        hardware = self.hardware
        return WorkspaceModel(
            cublas_bytes=hardware.cublas_workspace_bytes,
            sm_count=hardware.sm_count,
            compute_capability=hardware.compute_capability,
        )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated step. Parts are computed when they are asked for."""

    trace: Trace
    target: Target
    selective_modules: tuple[str, ...] = ()

    @cached_property
    def memory(self) -> MemoryTimeline:
        """Allocated bytes over the step."""
        return simulate_memory(self.trace, workspaces=self.target.workspaces)

    @cached_property
    def allocation(self) -> AllocatorReport:
        """The caching allocator over the job's first steps, on the whole device."""
        return replay_allocator(
            self.trace,
            config=self.target.allocator,
            capacity_bytes=self.target.hardware.usable_bytes,
            workspaces=self.target.workspaces,
            context_bytes=self.target.hardware.context_bytes,
            nccl_bytes=self.nccl_bytes,
        )

    @cached_property
    def unlimited_allocation(self) -> AllocatorReport:
        """The same on a device that never runs out: how much the job would reserve."""
        return replay_allocator(self.trace, config=self.target.allocator, workspaces=self.target.workspaces)

    @property
    def nccl_bytes(self) -> int:
        """NCCL's buffers: one set per communicator that the step uses."""
        used = {event.group for event in self.trace.events if type(event) is Collective}
        return self.target.cluster.nccl_buffer_bytes * sum(self.trace.groups[group].size > 1 for group in used)

    @cached_property
    def pricing(self) -> Pricing:
        """Device time of every event."""
        return price(self.trace, self.target.hardware, self.target.cluster)

    @cached_property
    def timeline(self) -> Timeline:
        """The executed step."""
        return simulate(
            self.trace,
            self.pricing,
            host=self.target.host,
            gpus_per_node=self.target.cluster.gpus_per_node,
            selective_modules=self.selective_modules,
        )

    @property
    def step_ms(self) -> float:
        """Step time."""
        return self.timeline.makespan_ms

    @cached_property
    def recompute_ms(self) -> float:
        """Device time of recomputation."""
        events = self.trace.events
        return float(
            sum(ms for event, ms in zip(events, self.pricing.event_ms.tolist(), strict=True)
                if ms and getattr(event, "phase", None) is Phase.RECOMPUTE)
        )  # fmt: skip

    @property
    def peak_active_bytes(self) -> int:
        """PyTorch's ``active_bytes.all.peak``: the sizes of the allocator's live blocks."""
        return self.unlimited_allocation.active_peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that the caching allocator would hold if the device never ran out."""
        return self.unlimited_allocation.reserved_peak_bytes

    def peak_bytes(self, kind: str) -> int:
        """The peak that a budget of this kind ("active" or "reserved") bounds."""
        return self.peak_reserved_bytes if kind == "reserved" else self.peak_active_bytes

    def prediction(self) -> Prediction:
        """The figures that a plan states."""
        verdict = self.allocation.verdict
        return Prediction(
            step_ms=self.step_ms,
            peak_active_bytes=self.peak_active_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            fits=verdict.outcome.value != "out of memory",
            recompute_ms=self.recompute_ms,
        )


def selective_modules_of(info: dict[str, Any], modules: Sequence[str]) -> tuple[str, ...]:
    """The modules that run under selective checkpointing modes when TorchTitan's own "selective-op" is on."""
    if info.get("checkpointing") != "selective-op":
        return ()
    return tuple(name for name in modules if name.rpartition(".")[0] == "layers" and name != "layers")
