"""How to get at the model in a TorchTitan 0.2 job: at the very place where TorchTitan applies its own checkpointing.

TorchTitan 0.2's parallelize functions apply tensor parallelism, then call ``apply_ac`` if
``activation_checkpoint.mode`` is not "none", then compile, then apply FSDP. `install` wraps
``get_train_spec`` so that each spec's parallelize function runs with ``apply_ac`` replaced by a *transform*
of the model and with the mode set to "full" meanwhile (`parallelize_transformed`). Pipeline parallelism calls the
parallelize function once for each model part, and so the transform.

The transform is the job's own, which the plugin gives (`install`), unless `transform` has set another one, as capture does.
A plan may be the job's own checkpointing (`OwnCheckpointing`): then TorchTitan's ``apply_ac`` stays, in the plan's mode.

Likewise the spec's loss is computed in as many chunks of rows as the job's plan or the capture asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from autosac.errors import UsageError
from autosac.integrations.chunked_loss import ChunkedLoss

Transform: TypeAlias = Callable[[nn.Module], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnCheckpointing:
    """TorchTitan's own checkpointing, with `values` of the job's ``[activation_checkpoint]`` section. `check` gets each model
    part before.
    """

    check: Transform
    values: Mapping[str, Any]


JobTransform: TypeAlias = "Callable[[Any, Any], Transform | OwnCheckpointing | None]"
"""What is done in a job, from its configuration and its parallel dimensions; None to leave the job's own checkpointing."""

Built: TypeAlias = Callable[[Any, Any, nn.Module], None]
"""Called with each model part that a job has parallelized, with its configuration and its parallel dimensions."""

LossChunks: TypeAlias = Callable[[Any, Any], int]
"""In how many chunks a job computes its loss, from its configuration and its parallel dimensions."""

_JOB_DECIDES: Any = object()
_transform: Any = _JOB_DECIDES
_loss_chunks = 1
_of_job: JobTransform | None = None
_chunks_of_job: LossChunks | None = None
_built: Built | None = None


@contextlib.contextmanager
def transform(function: Transform | None, loss_chunks: int = 1) -> Iterator[None]:
    """Within the context, TorchTitan applies `function` to each model part in place of its own checkpointing, and computes
    its loss in `loss_chunks`.

    None leaves TorchTitan's own in place. Either way the job's ``[autosac]`` section does not count.
    """
    install()
    global _transform, _loss_chunks
    previous = _transform, _loss_chunks
    _transform, _loss_chunks = function, loss_chunks
    try:
        yield
    finally:
        _transform, _loss_chunks = previous


def install(
    of_job: JobTransform | None = None, chunks_of_job: LossChunks | None = None, built: Built | None = None
) -> None:
    """Wrap TorchTitan's ``get_train_spec``, once a process; `of_job` and `chunks_of_job` decide for jobs from now on."""
    global _of_job, _chunks_of_job, _built
    _of_job, _chunks_of_job, _built = of_job or _of_job, chunks_of_job or _chunks_of_job, built or _built
    import torchtitan.protocols.train_spec as registry

    original = registry.get_train_spec
    if getattr(original, "_autosac", False):
        return

    @functools.wraps(original)
    def get_train_spec(name: str) -> Any:
        spec = original(name)
        if getattr(spec.parallelize_fn, "_autosac", False):
            return spec
        return dataclasses.replace(
            spec, parallelize_fn=_wrap(spec.parallelize_fn), build_loss_fn=_in_chunks(spec.build_loss_fn)
        )

    get_train_spec._autosac = True  # type: ignore[attr-defined]
    registry.get_train_spec = get_train_spec


def _wrap(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(original)
    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        function = _transform
        if function is _JOB_DECIDES:
            function = _of_job(job_config, parallel_dims) if _of_job is not None else None
        if function is None:
            parallelized = original(model, parallel_dims, job_config)
        elif isinstance(function, OwnCheckpointing):
            parallelized = parallelize_as(original, function, model, parallel_dims, job_config)
        else:
            parallelized = parallelize_transformed(original, function, model, parallel_dims, job_config)
        if _built is not None and _transform is _JOB_DECIDES:
            _built(job_config, parallel_dims, parallelized)
        return parallelized

    parallelize._autosac = True  # type: ignore[attr-defined]
    return parallelize


def parallelize_as(
    original: Callable[..., nn.Module],
    own: OwnCheckpointing,
    model: nn.Module,
    parallel_dims: Any,
    job_config: Any,
) -> nn.Module:
    """Run TorchTitan's parallelize function with its own checkpointing as wanted. UsageError if it checkpoints nothing."""
    own.check(model)
    section = job_config.activation_checkpoint
    before = {name: getattr(section, name) for name in own.values}
    try:
        for name, value in own.values.items():
            setattr(section, name, value)
        parallelized = original(model, parallel_dims, job_config)
    finally:
        for name, value in before.items():
            setattr(section, name, value)
    layers = getattr(parallelized, "layers", None)
    # A pipeline stage may have none.
    has_layers = not isinstance(layers, nn.ModuleDict | nn.ModuleList) or len(layers) > 0
    if has_layers and not any(isinstance(module, ActivationWrapper) for module in parallelized.modules()):
        raise UsageError(f"TorchTitan's {_name(original)} did not apply activation checkpointing")
    return parallelized


def _in_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_loss_fn(job_config: Any, *args: Any, **kwargs: Any) -> Any:
        loss_fn = original(job_config, *args, **kwargs)
        chunks = _loss_chunks
        if _transform is _JOB_DECIDES:
            chunks = 1 if _chunks_of_job is None else _chunks_of_job(job_config, kwargs.get("parallel_dims"))
        return loss_fn if chunks == 1 else ChunkedLoss(loss_fn, chunks)

    return build_loss_fn


def parallelize_transformed(
    original: Callable[..., nn.Module],
    function: Transform,
    model: nn.Module,
    parallel_dims: Any,
    job_config: Any,
) -> nn.Module:
    """Run TorchTitan's parallelize function with `function` in place of its ``apply_ac``."""
    names = _globals(original)
    if "apply_ac" not in names:
        raise UsageError(f"TorchTitan's {_name(original)} applies no activation checkpointing to replace")
    done: list[nn.Module] = []

    def apply_ac(part: nn.Module, *_: Any, **__: Any) -> None:
        if part is model:  # and not an encoder inside it, which the transform of the whole model has reached
            function(model)
            done.append(model)

    theirs, mode = names["apply_ac"], job_config.activation_checkpoint.mode
    names["apply_ac"], job_config.activation_checkpoint.mode = apply_ac, "full"
    try:
        if job_config.compile.enable:
            # As TorchTitan's apply_ac does: forward and recomputation must find the same compiled variant.
            eval_frame: Any = torch._C._dynamo.eval_frame
            eval_frame._set_lru_cache(False)
        parallelized = original(model, parallel_dims, job_config)
    finally:
        names["apply_ac"], job_config.activation_checkpoint.mode = theirs, mode
    if not done:
        raise UsageError(f"TorchTitan's {_name(original)} did not apply activation checkpointing")
    return parallelized


def _function(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    names: dict[str, Any] = _function(function).__globals__
    return names


def _name(function: Callable[..., Any]) -> str:
    return str(_function(function).__qualname__)
