"""What a captured job does otherwise than its settings say, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autosac.capture.compiler import partition
from autosac.capture.patches.steps import stopped_by_torch
from autosac.titan.settings import compiles_model

_FLOAT8 = "quantize.linear.float8"
WITHOUT_VALIDATION = "the job's validation is left out: steps are simulated, not what runs between them"


def notes_of(
    config: Any, settings: Mapping[str, str], validates: bool = False, *, compiled: bool = True
) -> tuple[str, ...]:
    """One line each. `config` is TorchTitan's, `settings` those of the same job by name. `validates`: its validation is left
    out. `compiled`: some of the model is compiled, if the settings ask for that.
    """
    found = []
    if compiles_model(settings) and not compiled:
        found.append("compile.enable does not compile the model, which TorchTitan's code leaves as it is")
    parallel = int(settings.get("parallelism.tensor_parallel_degree", "1")) > 1
    if parallel and _FLOAT8 in settings.get("model.converters", "") and not _is_rowwise(config):
        found.append(
            "the job runs without float8 all-gathers of activations: TorchTitan 0.2.2 applies its float8 styles of tensor "
            f"parallelism to a converter called float8, and this one is called {_FLOAT8}"
        )
    if parallel and settings.get("parallelism.enable_async_tensor_parallel") == "True" and not _has_symmetric_memory():
        found.append(
            "asynchronous tensor parallelism has no effect: the job does not enable symmetric memory for its group "
            "(torch.distributed._symmetric_memory.enable_symm_mem_for_group), without which Inductor fuses nothing"
        )
    found += [
        f"torch {torch.__version__} stops in the backward of this job, with or without a GPU: {reason}; simulated as torch "
        "2.12 trains it (a plan of AutoSAC trains with every torch)"
        for reason in stopped_by_torch
    ]
    found += [WITHOUT_VALIDATION] * validates
    return (*found, *partition.left_out())


def _is_rowwise(config: Any) -> bool:
    quantize = getattr(config, "quantize", None)
    recipe = getattr(getattr(getattr(quantize, "linear", None), "float8", None), "recipe_name", None)
    return "rowwise" in (recipe or "")


def _has_symmetric_memory() -> bool:
    if not dist.is_available():
        return False
    from torch.distributed import _symmetric_memory as symmetric

    return bool(symmetric._group_name_to_store)
