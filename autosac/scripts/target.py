"""The machines that a script is run for."""

from __future__ import annotations

from autosac.scripts.request import ScriptRequest
from autosac.simulation import Target


def script_target(request: ScriptRequest) -> Target:
    """The GPU, and nodes with `nproc` of them each. UsageError (HardwareError) for what is unknown or wrong."""
    return Target.of(
        request.gpu, request.world_size, cluster=request.cluster, allocator=request.allocator, per_node=request.nproc
    )
