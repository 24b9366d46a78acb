"""What is done to the model during a capture, at the place where TorchTitan applies its own checkpointing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from autosac.capture.record.recorder import Recorder
from autosac.capture.record.regions import RecomputationLog, RegionLog, candidate_modules
from autosac.capture.request import TitanRequest
from autosac.integrations.apply import apply, planned_modules
from autosac.integrations.observe import observe
from autosac.integrations.operators.modules import selectively_checkpointed
from autosac.integrations.optimizer_slices import sliced_optimizers
from autosac.integrations.recompute.entries import observer
from autosac.plans import Plan
from autosac.plans.layers import of_few_layers


def observe_candidates(model_parts: list[nn.Module], recorder: Recorder) -> None:
    """Observe all modules that could be checkpointed."""
    log = RegionLog(recorder)
    for part in model_parts:
        observe(part, candidate_modules(part), log)


def apply_plan_file(
    model: nn.Module, path: str, recorder: Recorder, layers: int | None = None, *, strictly: bool = True
) -> None:
    """Apply the plan in the file `path`, to the first so many `layers` if the others are left out.

    `strictly`: a recorded step that does not follow it stops, rather than to recompute more. Steps of a script may differ;
    each is as a real one would be.
    """
    observer[0] = RecomputationLog(recorder, strictly=strictly)
    _say_once()
    plan = Plan.load(path)
    apply(model, plan if layers is None else of_few_layers(plan, layers))


def checkpointing_of(model_parts: Sequence[nn.Module], plan_file: str | None) -> dict[str, Any]:
    """What a trace says of an eager program's checkpointing (arguments of `TraceInfo`): its own, or that of a plan, which the
    capture or the program has applied.
    """
    planned = planned_modules(model_parts)
    return {
        "checkpointing": "plan" if planned or plan_file is not None else "job",
        "selective_modules": tuple(sorted({*planned, *selectively_checkpointed(model_parts)})),
    }


def _say_once() -> None:
    """No warnings that every capture under a plan would repeat: the step without a plan has said the one about products, and
    plans know what their modules do in place.
    """
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def loss_chunks_of(request: TitanRequest) -> int:
    """In how many chunks the step computes its loss: as the plan says, or the request."""
    if request.plan_file is not None:
        return Plan.load(request.plan_file).settings.loss_chunks
    return request.loss_chunks


def sliced_as_asked(plan_file: str | None, slice_bytes: int) -> AbstractContextManager[None]:
    """Optimizers that work in slices as the plan says, or without one so many bytes at once."""
    asked = Plan.load(plan_file).settings.optimizer_slice_bytes if plan_file is not None else slice_bytes
    return sliced_optimizers(asked)


def transform_of(
    request: TitanRequest, recorder: Recorder, layers: int | None = None
) -> Callable[[nn.Module], None] | None:
    """What is done to each part of the model where the job applies its checkpointing: observe its modules, or apply a plan;
    None to leave the job's own alone. `layers`: how many are there, if others have been left out.
    """
    if request.observe:
        return partial(_observe, recorder)
    if request.plan_file is not None and request.checkpointing == "plan":
        return partial(_apply, request.plan_file, recorder, layers)
    return None


def _observe(recorder: Recorder, model: nn.Module) -> None:
    observe_candidates([model], recorder)


def _apply(plan_file: str, recorder: Recorder, layers: int | None, model: nn.Module) -> None:
    apply_plan_file(model, plan_file, recorder, layers)
