"""What is done to the model during a capture, at the place where TorchTitan applies its own checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from autosac.capture.recorder import Recorder
from autosac.capture.regions import RegionLog, candidate_modules
from autosac.capture.request import TitanRequest
from autosac.integrations.eager import apply
from autosac.integrations.observe import observe
from autosac.plan import Plan


def observe_candidates(model_parts: list[nn.Module], recorder: Recorder) -> None:
    """Observe all modules that could be checkpointed."""
    log = RegionLog(recorder)
    for part in model_parts:
        observe(part, candidate_modules(part), log)


def apply_plan_file(model: nn.Module, path: str) -> None:
    """Apply the plan in the file `path`."""
    apply(model, Plan.load(path))


@contextlib.contextmanager
def transform(fn):
    import dataclasses, torchtitan.protocols.train_spec as registry
    original = registry.get_train_spec
    def get(name):
        spec = original(name)
        inner = spec.parallelize_fn
        def parallelize(model, parallel_dims, job_config):
            if fn is None:
                return inner(model, parallel_dims, job_config)
            g = inner.__globals__
            old = g["apply_ac"]
            g["apply_ac"] = lambda model, *a, **k: fn(model)
            mode = job_config.activation_checkpoint.mode
            job_config.activation_checkpoint.mode = "full"
            try:
                return inner(model, parallel_dims, job_config)
            finally:
                g["apply_ac"] = old
                job_config.activation_checkpoint.mode = mode
        return dataclasses.replace(spec, parallelize_fn=parallelize)
    registry.get_train_spec = get
    try:
        yield
    finally:
        registry.get_train_spec = original


@contextlib.contextmanager
def transform_of(request: TitanRequest, recorder: Recorder) -> Iterator[None]:
    """While a TorchTitan job is built: observe its modules, apply a plan, or leave TorchTitan's checkpointing alone."""
    if request.observe:
        with transform(lambda model: observe_candidates([model], recorder)):
            yield
    elif request.plan_file is not None:
        path = request.plan_file
        with transform(lambda model: apply_plan_file(model, path)):
            yield
    else:
        with transform(None):
            yield
