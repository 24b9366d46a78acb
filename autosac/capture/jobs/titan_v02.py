"""TorchTitan 0.2: jobs are files (TOML), models come from a registry of train specs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autosac.capture.failures import one_line
from autosac.capture.jobs import titan_flux
from autosac.capture.jobs.adapter import Attributes, JobDescription, Transform, planned_by_itself
from autosac.capture.jobs.layers import module_attributes
from autosac.capture.jobs.pipeline import overlapped_in_order
from autosac.capture.jobs.synthetic_data import SyntheticLoader, SyntheticTokenizer
from autosac.capture.jobs.transforms import loss_chunks_of
from autosac.capture.request import TitanRequest
from autosac.errors import CaptureError, UsageError
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_toml, read_bounded
from autosac.target import TargetGPU
from autosac.titan.python_jobs import plain_text
from autosac.titan.settings import job_settings


class TitanV02:
    """See `autosac.capture.jobs.adapter.TitanAdapter`."""

    def __init__(self) -> None:
        self._gpu = TargetGPU()
        self._loss_chunks = 1
        self._own = "none"
        self._validates = False

    def parse(self, request: TitanRequest) -> Any:
        """TorchTitan's JobConfig, without validation, which would read a data set."""
        self._gpu = request.gpu
        self._loss_chunks = loss_chunks_of(request)
        config = _parse(request)
        plugin = getattr(config, "autosac", None)
        if plugin is not None and plugin.enable and request.checkpointing_mode() == "job":
            beside = Path(request.config_file or "").parent / plugin.plan
            raise planned_by_itself(str(beside) if plugin.plan and beside.is_file() else plugin.plan)
        self._own = config.activation_checkpoint.mode
        _checkpoint_by(config.activation_checkpoint, request.checkpointing_mode())
        self._validates = config.validation.enable
        config.validation.enable = False
        return config

    def settings(self, config: Any) -> dict[str, str]:
        """By their names in the job file."""
        return job_settings(config)

    def build(self, config: Any, transform: Transform | None) -> Any:
        """The model's own Trainer or that of ``torchtitan.train``; `transform` gets where ``apply_ac`` would be called."""
        from autosac.integrations.torchtitan import hook

        overlapped_in_order()
        _install_synthetic_data(config)
        spec = _train_spec(config)
        if self._validates and spec.build_validator_fn is None:
            raise UsageError(f"TorchTitan has no validation for {config.model.name}: switch off validation.enable")
        trainer = trainer_class(spec)
        is_flux = titan_flux.is_flux(spec.model_cls)
        encoders = titan_flux.without_weights(sys.modules[trainer.__module__]) if is_flux else contextlib.nullcontext()
        with hook.transform(transform, self._loss_chunks), encoders:
            return trainer(config)

    def layers(self, config: Any) -> list[Attributes]:
        """By the modules of the model as it is built on the meta device."""
        model, count = _on_meta(config)
        layers = list(getattr(model, "layers", nn.ModuleList()).children())
        return [module_attributes(layer) for layer in layers] if len(layers) == count else []

    def classes(self, config: Any) -> set[type]:
        """By the same."""
        model, _ = _on_meta(config)
        return set() if model is None else {type(module) for module in model.modules()}

    def with_layers(self, config: Any, count: int) -> Any:
        """Registers the train spec again; the configuration is the same."""
        import torchtitan.protocols.train_spec as registry

        spec = _train_spec(config)
        arguments: Any = spec.model_args[config.model.flavor]
        if not hasattr(arguments, "n_layers"):
            raise CaptureError(f"{config.model.name} has no layers that could be left out")
        fewer = dataclasses.replace(arguments, n_layers=count)
        registry._extra_train_specs[config.model.name] = dataclasses.replace(
            spec, model_args={**spec.model_args, config.model.flavor: fewer}
        )
        return config

    def alone(self, config: Any, layers: int, device: torch.device) -> Callable[[], torch.Tensor] | None:
        """As the Trainer prepares batches, masks among them."""
        spec = _train_spec(config)
        model, count = _on_meta(config, layers)
        if model is None or titan_flux.is_flux(spec.model_cls) or not count:
            return None
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, config.training.mixed_precision_param))
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=device)  # type: ignore[operator]
        vocabulary_size = _vocabulary_size(spec, config)
        training = config.training
        batch, labels = next(iter(SyntheticLoader(training.local_batch_size, training.seq_len, vocabulary_size)))
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        trainer = SimpleNamespace(
            model_args=model.model_args,
            model_parts=[model],
            tokenizer=SyntheticTokenizer(vocabulary_size),
            parallel_dims=SimpleNamespace(cp_enabled=False),
        )

        def run() -> torch.Tensor:
            prepare = trainer_class(spec).post_dataloading_process
            inputs, _, more, keywords = prepare(trainer, dict(batch), labels)
            result: torch.Tensor = model(inputs, **more, **keywords)
            return result

        return run

    def describe(self, config: Any) -> JobDescription:
        """As the job file says it."""
        section = config.activation_checkpoint
        selective = section.mode == "selective"
        return JobDescription(
            model=f"{config.model.name} {config.model.flavor}",
            checkpointing=f"selective-{section.selective_ac_option}" if selective else str(section.mode),
            preserve_rng_state=section.preserve_rng_state,
            early_stop=section.early_stop,
            loss_chunks=self._loss_chunks,
            validates=self._validates,
            own=self._own,
        )


def _on_meta(config: Any, layers: int | None = None) -> tuple[nn.Module | None, int]:
    """The model, or its first layers, on the meta device, and how many layers it has; none if it is not said to have any."""
    spec = _train_spec(config)
    arguments = copy.deepcopy(spec.model_args[config.model.flavor])
    arguments.update_from_config(config)
    count = getattr(arguments, "n_layers", None)
    if count is None:
        return None, 0
    if layers is not None:
        arguments.n_layers = layers
    with torch.device("meta"):
        return spec.model_cls(arguments), count


def _checkpoint_by(section: Any, mode: str) -> None:
    """Replace the job's own checkpointing by the request's."""
    if mode != "job":
        section.mode, _, option = mode.partition("-")
        section.selective_ac_option = option or section.selective_ac_option


_parsed: dict[tuple[object, ...], Any] = {}  # a process that captures are forked from reads a job once for all of them


def _parse(request: TitanRequest) -> Any:
    """TorchTitan's JobConfig for the request. UsageError in one line if TorchTitan rejects it."""
    arguments = ["--job.config_file", request.config_file] if request.config_file else []
    arguments += [*request.overrides, "--comm.mode", "fake_backend"]
    arguments += ["--debug.seed", "0", "--training.steps", "1000", "--checkpoint.no-enable"]
    key = (*arguments, _checked_toml(request.config_file))
    if key not in _parsed:
        _parsed[key] = _parse_arguments(arguments)
    return copy.deepcopy(_parsed[key])


def _parse_arguments(arguments: list[str]) -> Any:
    from torchtitan.config import ConfigManager

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return ConfigManager().parse_args(arguments)
    except SystemExit as e:
        raise UsageError(f"TorchTitan rejects the job's arguments: {plain_text(said.getvalue())}") from e
    except (ValueError, TypeError, ImportError, AttributeError) as e:
        raise UsageError(f"TorchTitan rejects the job: {one_line(e)}") from e


def _checked_toml(path: str | None) -> bytes:
    """A job file's content. UsageError if it is missing or is no TOML (TorchTitan would log a traceback)."""
    if path is None:
        return b""
    try:
        content = read_bounded(path, TEXT_BYTES)
        parse_toml(content)
    except OSError as e:
        raise UsageError(f"job file {path}: {e.strerror or e}") from e
    except DocumentError as e:
        raise UsageError(f"job file {path} is not valid TOML: {e}") from e
    return content


def _train_spec(config: Any) -> Any:
    """The job's train spec, perhaps one of its own. UsageError if there is none, or it has no such flavor."""
    import torchtitan.protocols.train_spec as registry

    _import_own(config.experimental.custom_import)
    try:
        spec = registry.get_train_spec(config.model.name)
    except ImportError as e:
        raise UsageError(f"model {config.model.name!r} cannot be imported here: {one_line(e)}") from e
    except (ValueError, TypeError) as e:
        raise UsageError(f"unknown model {config.model.name!r}: {one_line(e)}") from e
    if config.model.flavor not in spec.model_args:
        raise UsageError(
            f"unknown flavor {config.model.flavor!r} of {config.model.name}; it has: {', '.join(spec.model_args)}"
        )
    return spec


def _import_own(module: str) -> None:
    """Import the job's own module, as the Trainer does before it looks for the model. UsageError if it cannot be found."""
    try:
        if module:
            importlib.import_module(module)
    except ImportError as e:
        raise UsageError(f"experimental.custom_import = {module!r}: {one_line(e)}") from e


def trainer_class(spec: Any) -> Any:
    """The Trainer in the ``train`` module of the innermost package around the model; TorchTitan's own, if no other."""
    import torchtitan.train as general

    package = spec.model_cls.__module__
    while package := package.rpartition(".")[0]:
        if importlib.util.find_spec(f"{package}.train") is not None:
            module = importlib.import_module(f"{package}.train")
            own = [
                value
                for value in vars(module).values()
                if isinstance(value, type)
                and issubclass(value, general.Trainer)
                and value.__module__ == module.__name__
            ]
            if own:
                return own[-1]
    return general.Trainer


def _install_synthetic_data(config: Any) -> None:
    """Register the job's train spec with a synthetic tokenizer and loader in place of its own."""
    import torchtitan.protocols.train_spec as registry

    spec = _train_spec(config)
    vocabulary_size = _vocabulary_size(spec, config)

    def build_loader(*, job_config: Any, **_: Any) -> Any:
        training = job_config.training
        if titan_flux.is_flux(spec.model_cls):
            t5_tokens = job_config.encoder.max_t5_encoding_len
            names = ("clip_tokens", "t5_tokens")
            return titan_flux.FluxBatches(training.local_batch_size, training.img_size, t5_tokens, names)
        return SyntheticLoader(training.local_batch_size, training.seq_len, vocabulary_size)

    registry._extra_train_specs[config.model.name] = dataclasses.replace(
        spec,
        build_tokenizer_fn=lambda _: SyntheticTokenizer(vocabulary_size),
        build_dataloader_fn=build_loader,
    )


def _vocabulary_size(spec: Any, config: Any) -> int:
    return int(getattr(spec.model_args[config.model.flavor], "vocab_size", 2048))
