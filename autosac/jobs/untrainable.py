"""Jobs that a capture can follow and the installed PyTorch cannot train: to predict them would be a promise."""

from __future__ import annotations

from autosac.capture.failures import remedy_of
from autosac.errors import CaptureError
from autosac.plans import Plan
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Trace, TraceInfo

# They save device meshes, which are arguments of compiled, checkpointed layers under tensor parallelism, as tensors.
_MESHES_AS_TENSORS = ("2.12.", "2.13.")


def check_trainable(info: TraceInfo, plan: Plan | None = None) -> None:
    """CaptureError if PyTorch's compiler fails on the captured job itself. `plan`: what it ran under."""
    if not info.compiled or info.parallelism.tp == 1 or not info.torch_version.startswith(_MESHES_AS_TENSORS):
        return
    if plan is not None and not plan.settings.job_checkpointing:
        checkpoints = any(unit.memory_budget is None for unit in plan.units)
    else:
        checkpoints = info.checkpointing == "full" or info.checkpointing.startswith("selective")
    if checkpoints:
        raise CaptureError(remedy_of("tensors_saved_with_vc_check", info.torch_version))


def simulation_of_trainable(trace: Trace, target: Target, plan: Plan | None = None) -> Simulation:
    """As `simulation_of`, for a step of the job itself; CaptureError as `check_trainable`."""
    check_trainable(trace.info, plan)
    return simulation_of(trace, target, plan)
