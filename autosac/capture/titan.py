"""Capture of a TorchTitan 0.2 job: its own Trainer, unmodified, on the simulated device.

Only two things are replaced, through TorchTitan's public registry of train specs: the tokenizer and the data loader, by
synthetic ones of the right shape. Importing this module imports torchtitan; the simulated device has to be installed before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from autosac.capture import patches, process_group
from autosac.capture.failures import explain, one_line
from autosac.capture.pipeline import StageMetadata
from autosac.capture.request import TitanRequest
from autosac.capture.session import CaptureSession
from autosac.errors import CaptureError, UsageError
from autosac.integrations import modules
from autosac.integrations.titan_settings import check_settings, job_settings
from autosac.plans import Plan
from autosac.trace import Trace


class SyntheticTokenizer:
    """Stands in for the tokenizer: the job's vocabulary without its files."""

    eos_id = bos_id = 0
    pad_id = -1

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size

    def get_vocab_size(self) -> int:
        return self._vocabulary_size

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return [1]


class SyntheticLoader:
    """Random token batches of the job's shape, on the CPU as TorchTitan's loaders yield them."""

    def __init__(self, batch_size: int, seq_len: int, vocabulary_size: int) -> None:
        self.batch_size, self.seq_len, self.vocabulary_size = batch_size, seq_len, vocabulary_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(1, self.vocabulary_size, (self.batch_size, self.seq_len + 1), generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]


def import_torchtitan() -> None:
    """Import torchtitan. CaptureError in one line where it is missing or its own imports fail."""
    try:
        import torchtitan.train  # noqa: F401
    except ImportError as e:
        raise CaptureError(f"torchtitan cannot be imported: {one_line(e)}") from e


def parse_config(request: TitanRequest) -> Any:
    """TorchTitan's JobConfig for the request. UsageError in one line if TorchTitan rejects it."""
    from torchtitan.config import ConfigManager

    arguments = ["--job.config_file", request.config_file] if request.config_file else []
    arguments += [*request.overrides, *request.checkpointing_arguments(), "--comm.mode", "fake_backend"]
    arguments += ["--debug.seed", "0", "--training.steps", "1000", "--checkpoint.no-enable"]
    _check_toml(request.config_file)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return ConfigManager().parse_args(arguments)
    except SystemExit as e:
        raise UsageError(f"TorchTitan rejects the job's arguments: {_plain_text(said.getvalue())}") from e
    except (ValueError, TypeError, ImportError, AttributeError) as e:
        raise UsageError(f"TorchTitan rejects the job: {one_line(e)}") from e


def _plain_text(message: str) -> str:
    """A message that was drawn in a box, on one line."""
    words = [word for word in message.split() if any(map(str.isalnum, word))]
    return re.split(r" (?:For full|Argument) helptext", " ".join(words))[0][:300]


def _check_toml(path: str | None) -> None:
    """UsageError for a job file that is missing or is no TOML (TorchTitan would log a traceback)."""
    if path is None:
        return
    try:
        tomllib.loads(Path(path).read_text())
    except OSError as e:
        raise UsageError(f"job file {path}: {e.strerror or e}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"job file {path} is not valid TOML: {e}") from e


def _install_synthetic_data(config: Any) -> None:
    """Register the job's train spec with a synthetic tokenizer and loader in place of its own."""
    import torchtitan.protocols.train_spec as registry

    try:
        spec = registry.get_train_spec(config.model.name)
    except (ValueError, ImportError, TypeError) as e:
        raise UsageError(f"unknown model {config.model.name!r}: {one_line(e)}") from e
    if config.model.flavor not in spec.model_args:
        raise UsageError(
            f"unknown flavor {config.model.flavor!r} of {config.model.name}; it has: {', '.join(spec.model_args)}"
        )
    vocabulary_size = getattr(spec.model_args[config.model.flavor], "vocab_size", 2048)

    def build_loader(*, job_config: Any, **_: Any) -> SyntheticLoader:
        training = job_config.training
        return SyntheticLoader(training.local_batch_size, training.seq_len, vocabulary_size)

    registry._extra_train_specs[config.model.name] = dataclasses.replace(
        spec,
        build_tokenizer_fn=lambda _: SyntheticTokenizer(vocabulary_size),
        build_dataloader_fn=build_loader,
    )


def fingerprint(settings: dict[str, str], world_size: int) -> str:
    """A hash of what is computed: the decisive settings and the world size, not checkpointing and not the rank."""
    document = json.dumps({"world_size": world_size, **settings}, sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def capture_titan(request: TitanRequest, progress: Callable[[str], None] = lambda _: None) -> Trace:
    """Run the job for `request.steps` steps on the simulated device and return the last step's Trace.

    Once per process. UsageError for a wrong job, CaptureError (with the operator or call) for one that cannot run.
    """
    session = CaptureSession(request.gpu)
    logging.disable(logging.WARNING)
    process_group.initialise(request.world_size, request.rank, request.ranks_per_node)
    import_torchtitan()
    patches.install_torchtitan(request.gpu)
    stages = StageMetadata()
    stages.received = list(request.stage_inputs) if request.stage_inputs else None
    stages.install()
    config = parse_config(request)
    if request.plan_file is not None:
        check_settings(Plan.load(request.plan_file).made_for.job_settings, job_settings(config))
    _install_synthetic_data(config)
    import torchtitan.train

    from autosac.capture.transforms import transform_of

    with session.active() as recorder, transform_of(request, recorder):
        progress("building the model")
        try:
            trainer = torchtitan.train.Trainer(config)
        except Exception as e:
            raise explain(e, "building the job") from e
        for part in trainer.model_parts:
            recorder.add_model(part)
        trainer.step = 1
        trainer.metrics_processor.should_log = lambda _: False
        batches = trainer.batch_generator(trainer.dataloader)
        for step in range(1, request.steps + 1):
            progress(f"step {step} of {request.steps}")
            last = step == request.steps
            if last:
                recorder.begin_recording()
            else:
                recorder.begin_step(step)
            try:
                trainer.train_step(batches)
            except Exception as e:
                raise explain(e, f"training step {step}") from e
        recorder.end_recording()
        return recorder.trace({**_info(request, config, trainer), "stage_outputs": stages.sent})


def _info(request: TitanRequest, config: Any, trainer: Any) -> dict[str, Any]:
    dims = trainer.parallel_dims
    tokens = config.training.local_batch_size * config.training.seq_len * trainer.gradient_accumulation_steps
    degrees = {name: int(getattr(dims, name)) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")}
    processor = trainer.metrics_processor
    settings = job_settings(config)
    return {
        "job_fingerprint": fingerprint(settings, request.world_size),
        "job_settings": settings,
        "model": f"{config.model.name} {config.model.flavor}",
        "world_size": request.world_size,
        "rank": request.rank,
        "gpu": request.gpu.name,
        "torch_version": torch.__version__,
        "torchtitan_version": version("torchtitan"),
        "local_batch_size": config.training.local_batch_size,
        "seq_len": config.training.seq_len,
        "tokens_per_step": tokens,
        "flops_per_token": float(processor.num_flops_per_token),
        "parallelism": degrees,
        "parameter_shapes": modules.shapes_by_name(trainer.model_parts),
        "fsdp_units": fsdp_units(trainer.model_parts),
        "checkpointing": "plan" if request.plan_file else _checkpointing_mode(config.activation_checkpoint),
        "preserve_rng_state": config.activation_checkpoint.preserve_rng_state,
        "early_stop": config.activation_checkpoint.early_stop,
    }


def _checkpointing_mode(section: Any) -> str:
    """none, full, memory_budget, selective-op or selective-N, as the job's settings say."""
    return f"selective-{section.selective_ac_option}" if section.mode == "selective" else str(section.mode)


def fsdp_units(model_parts: list[torch.nn.Module]) -> list[str]:
    """Clean names of the modules that FSDP manages as units; checkpointing may not be applied above them."""
    from torch.distributed.fsdp import FSDPModule

    return sorted(
        {
            modules.clean_name(name)
            for part in model_parts
            for name, module in modules.unwrapped(part).named_modules()
            if isinstance(module, FSDPModule)
        }
    )
