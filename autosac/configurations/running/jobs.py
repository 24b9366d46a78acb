"""What a TorchTitan job says of itself before anything is captured: the search's starting point."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, get_args

from autosac.configurations.found.job_files import OWN_SPLITS
from autosac.configurations.space.layout import USUAL_STAGES, ModelFacts
from autosac.configurations.space.space import MEANINGS, Optimizer, Space
from autosac.configurations.space.wanted import Own
from autosac.errors import UsageError
from autosac.jobs.checks import given_settings, read_setting
from autosac.titan.python_jobs import PythonJob, read_python_job
from autosac.titan.source import has_pipelines, model_facts
from autosac.titan.version import has_python_jobs

_KNOB_OF = {
    "parallelism.data_parallel_replicate_degree": "data_parallel_replicate",
    "parallelism.data_parallel_shard_degree": "data_parallel_replicate",
    "parallelism.fsdp_reshard_after_forward": "reshard_after_forward",
    "parallelism.tensor_parallel_degree": "tensor_parallel",
    "parallelism.context_parallel_degree": "context_parallel",
    "parallelism.pipeline_parallel_degree": "pipeline_parallel",
    "parallelism.pipeline_parallel_schedule": "pipeline_schedule",
    "parallelism.pipeline_parallel_schedule_csv": "pipeline_schedule",
    "parallelism.pipeline_parallel_layers_per_stage": "stages_per_rank",
    "parallelism.module_fqns_per_model_part": "pipeline_split",
    "parallelism.pipeline_parallel_microbatch_size": "microbatch",
    "parallelism.expert_parallel_degree": "expert_parallel",
    "parallelism.expert_tensor_parallel_degree": "expert_tensor_parallel",
    "parallelism.enable_async_tensor_parallel": "async_tensor_parallel",
    "compile.enable_async_tensor_parallel": "async_tensor_parallel",
    "activation_checkpoint.mode": "checkpointing",
    "activation_checkpoint.selective_ac_option": "checkpointing",
    "training.enable_cpu_offload": "cpu_offload",
    "compile.enable": "compile",
    "optimizer.implementation": "optimizer",
}
_PER_PARAMETER = {"Adam": 2, "AdamW": 2}
assert set(_KNOB_OF.values()) <= set(MEANINGS)


def own_of(config_file: str, overrides: Sequence[str], world_size: int, global_batch: int | None) -> Own:
    """The job's facts, and the global batch that the search keeps: the one given, else the job's own.

    UsageError for arguments that are knobs of the search, and for a global batch that cannot be.
    """
    for name in given_settings(overrides):
        if name in _KNOB_OF:
            raise UsageError(
                f"--{name} is a knob of the search: give its values with --space ({_KNOB_OF[name]} = [...])"
            )
    python = read_python_job(config_file, overrides) if has_python_jobs() else None
    read = python.settings.get if python is not None else read_setting(config_file, overrides)
    model = python.facts if python is not None else model_facts(str(read("model.name")), str(read("model.flavor")))
    facts = ModelFacts(
        layers=model.get("n_layers", 0),
        heads=model.get("n_heads", 0),
        kv_heads=model.get("n_kv_heads", 0),
        experts=model.get("n_experts", 0),
        active_experts=model.get("top_k", 0),
        seq_len=_number(read("training.seq_len")) or 0,
        pipelines=python.pipelines if python is not None else has_pipelines(str(read("model.name"))),
        own_stages=python is None and "n_layers" in model,
        ends_less=(_less(read, "first"), _less(read, "last")),
        python=python is not None,
        local_batch=_local_batch(read),
    )
    each = 2 if read("training.dtype") == "bfloat16" else 4
    optimizer = str(read("optimizer.implementation") or "fused")
    of_states = 2 if "bf16" in optimizer else each
    converters = read("model.converters") or ()
    return Own(
        facts=facts,
        compiled=str(read("compile.enable")).lower() == "true",
        global_batch=global_batch or _global_batch(read, world_size),
        converters=tuple(converters.split(",")) if isinstance(converters, str) else tuple(converters),
        state_bytes=each + of_states * _PER_PARAMETER.get(str(read("optimizer.name")), 0),
        gradient_bytes=each,
        python=python,
        optimizer=None if optimizer in get_args(Optimizer) else optimizer,
    )


def check_space(space: Space, python: PythonJob | None) -> None:
    """UsageError for what a space asks for and is not installed, or what cannot be set of a job of TorchTitan 0.3."""
    if python is None:
        if True in space.float8 and importlib.util.find_spec("torchao") is None:
            raise UsageError("float8 = [true] needs torchao, which is not installed (pip install torchao)")
        return
    if True in space.float8:
        raise UsageError(
            "float8 = [true]: with TorchTitan 0.3 the configuration itself chooses it (its model's converters)"
        )
    if True in space.chunk_loss:
        raise UsageError("chunk_loss = [true]: with TorchTitan 0.3 the configuration itself chooses it (ChunkedCELoss)")
    if "balanced" in (space.pipeline_split or ()):
        raise UsageError('pipeline_split = ["balanced"] needs TorchTitan 0.2')
    if set(space.stages_per_rank) != {USUAL_STAGES}:
        raise UsageError(f"stages_per_rank other than [{USUAL_STAGES}] needs TorchTitan 0.2")
    own = [name for name in OWN_SPLITS if python.settings.get(name)]
    if own and python.pipelines and space.pipeline_parallel != (1,):
        raise UsageError(
            f"the configuration sets {own[0]}, which divides layers for one number of stages: leave it out, or search without "
            "pipelines (pipeline_parallel = [1])"
        )


def check_experts(space: Space, facts: ModelFacts) -> None:
    """UsageError for a space that asks for expert parallelism only, of a model that is not known to have experts."""
    asked = space.expert_parallel
    if asked is not None and 1 not in asked and not facts.experts:
        raise UsageError(f"expert_parallel = {list(asked)}: the model is not known to have experts; leave the knob out")


def _global_batch(read: Any, world_size: int) -> int:
    """The job's own global batch: what it says, or its local batch times its data-parallel ranks."""
    said = _number(read("training.global_batch_size"))
    if said is not None and said > 0:
        return said
    others = 1
    for name in ("tensor", "context", "pipeline"):
        others *= _number(read(f"parallelism.{name}_parallel_degree")) or 1
    local = _number(read("training.local_batch_size")) or 1
    return local * max(1, world_size // others)


def _local_batch(read: Any) -> int:
    """The job's own local batch, as far as it goes through the model at once."""
    in_pipelines = (_number(read("parallelism.pipeline_parallel_degree")) or 1) > 1
    return 0 if in_pipelines else _number(read("training.local_batch_size")) or 0


def _less(read: Any, end: str) -> int:
    """How many layers fewer the job gives its first or last pipeline stage."""
    said = _number(read(f"parallelism.pipeline_parallel_{end}_stage_less_layers"))
    return 1 if said is None else said


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
