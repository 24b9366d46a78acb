"""TorchTitan 0.3: jobs are Python configurations, trees of components that build themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import sys
from collections.abc import Callable
from typing import Any

import torch
from torchtitan.config import ConfigManager, Configurable
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, MemoryBudgetAC, SelectiveAC

from autosac.capture.failures import one_line
from autosac.capture.jobs import titan_flux
from autosac.capture.jobs.adapter import Attributes, JobDescription, Transform, planned_by_itself
from autosac.capture.jobs.layers import config_attributes
from autosac.capture.jobs.synthetic_data import SyntheticLoader, SyntheticTokenizer
from autosac.capture.jobs.titan_pictures import PictureLoader, PictureTokenizer, has_pictures, picture_note
from autosac.capture.jobs.transforms import loss_chunks_of
from autosac.capture.request import TitanRequest
from autosac.errors import CaptureError, UsageError
from autosac.integrations.torchtitan.policy_hook import ModelPolicy, reaching_flux
from autosac.titan.python_jobs import missing_package, plain_text
from autosac.titan.settings import python_job_settings
from autosac.titan.version import IN_CHUNKS_BY_ITSELF, split_python_job

_NAMES = {FullAC: "full", SelectiveAC: "selective-op", MemoryBudgetAC: "memory_budget"}


class TitanV03:
    """See `autosac.capture.jobs.adapter.TitanAdapter`."""

    def __init__(self) -> None:
        self._validates = False
        self._own = "none"

    def parse(self, request: TitanRequest) -> Any:
        """The configuration that the job's function returns, under the overrides, without what reads or writes files."""
        config = _parse(request)
        if loss_chunks_of(request) != 1:
            raise UsageError(IN_CHUNKS_BY_ITSELF)
        self._own = _name_of(config.activation_checkpoint)
        config.activation_checkpoint = _checkpointing(config.activation_checkpoint, request)
        _install_synthetic_data(config)
        config.comm.mode = "fake_backend"
        config.debug.seed = 0
        config.training.steps = 1000
        self._validates = config.validator.enable
        config.checkpoint.enable = config.validator.enable = False
        config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
        return config

    def settings(self, config: Any) -> dict[str, str]:
        """By their names in the configuration."""
        return python_job_settings(config)

    def build(self, config: Any, transform: Transform | None) -> Any:
        """The Trainer that the configuration builds; `transform` is its checkpointing policy."""
        _check_pipelines(config)
        if transform is None:
            return _built(config)
        done: list[torch.nn.Module] = []

        def function(model: torch.nn.Module) -> None:
            transform(model)
            done.append(model)

        trainer = _built(dataclasses.replace(config, activation_checkpoint=Transformed.Config(function=function)))
        if not done:
            name = getattr(config.model_spec.parallelize_fn, "__qualname__", "parallelize function")
            raise UsageError(f"TorchTitan's {name} does not apply the job's activation checkpointing policy")
        return trainer

    def layers(self, config: Any) -> list[Attributes]:
        """By the configurations of the layers."""
        return [config_attributes(layer) for layer in getattr(config.model_spec.model, "layers", ())]

    def classes(self, config: Any) -> set[type]:
        """By the configurations that they are built from."""
        owners = (getattr(kind, "_owner", None) for kind in _kinds(config.model_spec.model))
        return {owner for owner in owners if isinstance(owner, type)}

    def with_layers(self, config: Any, count: int) -> Any:
        """The model's configuration lists its layers."""
        spec = config.model_spec
        if not getattr(spec.model, "layers", None):
            raise CaptureError(f"{spec.name} has no layers that could be left out")
        model = dataclasses.replace(spec.model, layers=spec.model.layers[:count])
        return dataclasses.replace(config, model_spec=dataclasses.replace(spec, model=model))

    def alone(self, _: Any, __: int, ___: torch.device) -> None:
        """Its trainer builds nothing without parallelism."""

    def describe(self, config: Any) -> JobDescription:
        """By the class of the policy. TorchTitan 0.3 never lets recomputation stop early."""
        policy, data = config.activation_checkpoint, config.dataloader
        pictures = isinstance(data, PictureLoader.Config)
        return JobDescription(
            model=f"{config.model_spec.name} {config.model_spec.flavor}",
            checkpointing=_name_of(policy),
            preserve_rng_state=_common(policy).get("preserve_rng_state", True),
            early_stop=False,
            loss_chunks=1,
            validates=self._validates,
            own=self._own,
            notes=(picture_note(data.job, config.training.seq_len),) if pictures else (),
        )


def _install_synthetic_data(config: Any) -> None:
    """A synthetic tokenizer and loader in place of the configuration's own."""
    model = config.model_spec.model
    vocabulary_size = getattr(model, "vocab_size", 2048)
    if titan_flux.is_flux(type(model)):
        t5_tokens = config.tokenizer.max_t5_encoding_len
        config.tokenizer = _FluxTokenizer.Config(vocabulary_size=vocabulary_size, max_t5_encoding_len=t5_tokens)
        config.dataloader = _FluxLoader.Config(img_size=config.dataloader.img_size, t5_tokens=t5_tokens)
    elif has_pictures(config.dataloader):
        config.tokenizer = PictureTokenizer.Config(vocabulary_size=vocabulary_size, job=config.tokenizer)
        config.dataloader = PictureLoader.Config(job=config.dataloader)
    else:
        config.tokenizer = _Tokenizer.Config(vocabulary_size=vocabulary_size)
        config.dataloader = _Loader.Config(vocabulary_size=vocabulary_size)


def _name_of(policy: Any) -> str:
    """What a configured checkpointing policy is called in traces."""
    owner = type(policy)._owner if policy is not None else None
    return _NAMES.get(owner, owner.__name__) if owner is not None else "none"


def _kinds(config: Any) -> set[type]:
    """The types of a tree of dataclasses."""
    found: set[type] = set()
    waiting = [config]
    while waiting:
        value = waiting.pop()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found.add(type(value))
            waiting += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        elif isinstance(value, (list, tuple)):
            waiting += value
    return found


def _check_pipelines(config: Any) -> None:
    """CaptureError where TorchTitan calls pipeline schedules in a way that this torch does not know."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    wanted = config.parallelism.pipeline_parallel_degree > 1
    if wanted and "arg_mbs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
        raise CaptureError(
            f"torch {torch.__version__} has no pipeline schedules that take lists of microbatches, as this TorchTitan's do"
        )


def _built(config: Any) -> Any:
    is_flux = titan_flux.is_flux(type(config.model_spec.model))
    trainer = sys.modules[type(config).__module__]
    try:
        with reaching_flux(config), titan_flux.without_weights(trainer) if is_flux else contextlib.nullcontext():
            return config.build()
    except ValueError as e:
        if config.parallelism.spmd_backend == "spmd_types" and "DTensors on the full SPMD mesh" in str(e):
            raise CaptureError(
                f"fully_shard of torch {torch.__version__} does not know TorchTitan's spmd_types: "
                "add -- --parallelism.spmd_backend partial_dtensor (or full_dtensor); a model of spmd_types alone needs "
                "torch 2.14 or newer on several GPUs"
            ) from e
        raise


class Transformed(ModelPolicy):
    """A function of the model in place of the job's checkpointing."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        function: Callable[[torch.nn.Module], None]

    def checkpoint(self, model: torch.nn.Module) -> None:
        self.config.function(model)


class _Tokenizer(SyntheticTokenizer, Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        vocabulary_size: int

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__(config.vocabulary_size)


class _Loader(SyntheticLoader, Configurable):
    """As TorchTitan's text data sets yield: tokens, and their positions in their documents, one to a sequence."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        vocabulary_size: int

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(local_batch_size, seq_len, config.vocabulary_size)

    def inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input": tokens, "positions": torch.arange(self.seq_len).repeat(self.batch_size, 1)}


class _FluxTokenizer(_Tokenizer):
    """Flux's Trainer asks its configuration for the length of texts."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(_Tokenizer.Config):
        max_t5_encoding_len: int


class _FluxLoader(titan_flux.FluxBatches, Configurable):
    """Flux's Trainer asks its configuration for the size of images."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        img_size: int
        t5_tokens: int

    def __init__(self, config: Config, *, local_batch_size: int, **_: Any) -> None:
        super().__init__(local_batch_size, config.img_size, config.t5_tokens, ("clip", "t5"))


def _parse(request: TitanRequest) -> Any:
    assert request.config_file is not None
    module, config = split_python_job(request.config_file)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            parsed = ConfigManager().parse_args(["--module", module, "--config", config, *request.overrides])
    except SystemExit as e:
        raise UsageError(f"TorchTitan rejects the job's arguments: {plain_text(said.getvalue())}") from e
    except (ValueError, TypeError, ImportError, AttributeError) as e:
        why = missing_package(module) if isinstance(e, ImportError) else ""
        raise UsageError(f"TorchTitan rejects the job: {one_line(e)}{why}") from e
    if getattr(parsed, "model_spec", None) is None:
        raise UsageError(f"{request.config_file} gives a {type(parsed).__qualname__} without a model to train")
    return parsed


def _common(policy: Any) -> dict[str, Any]:
    """What all checkpointing policies have in common."""
    if policy is None:
        return {}
    return {field.name: getattr(policy, field.name) for field in dataclasses.fields(ActivationCheckpointing.Config)}


def _checkpointing(own: Any, request: TitanRequest) -> Any:
    """The configuration of the checkpointing policy that the request asks for, given the job's own."""
    mode = request.checkpointing_mode()
    if mode == "job":
        if own is not None and getattr(type(own)._owner, "follows_plan", False):
            raise planned_by_itself(own.plan)
        return own
    if mode == "none":
        return None
    policies = {"full": FullAC.Config, "selective-op": SelectiveAC.Config}
    if mode not in policies:
        raise UsageError(f"this TorchTitan has no {mode} checkpointing: none, full or selective-op")
    return policies[mode](**_common(own))
