"""Real training on the CPU by TorchTitan 0.2's own Trainer, one gloo rank of it.

A program: ``python -m benchmarks.titan_training.rank JOB.toml [ARGUMENTS ...]`` in the environment of a rank. It writes
``trained-RANK.json`` beside the job: losses and norms of all steps, hashes of this rank's gradients in each and sketches of
those in the first, a hash of its parameters afterwards, how many modules were checkpointed by a plan in each step, and how
many graphs were compiled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as titan_utils
from torch._dynamo.utils import counters

# TorchTitan takes "cuda" where it finds no accelerator. Its other modules copy these two names.
titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

import torchtitan.components.metrics as titan_metrics  # noqa: E402
import torchtitan.distributed.parallel_dims as parallel_dims_module  # noqa: E402
import torchtitan.distributed.utils as distributed_utils  # noqa: E402
import torchtitan.protocols.train_spec as registry  # noqa: E402

parallel_dims_module.device_type = distributed_utils.device_type = "cpu"
distributed_utils.device_module = torch.cpu

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.moe import utils as moe_utils  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from autosac.capture.jobs.synthetic_data import SyntheticLoader, SyntheticTokenizer  # noqa: E402
from autosac.integrations.apply import Checkpointed  # noqa: E402

_SKETCH = 64


def _digest(tensors: Any) -> str:
    """Of this rank's parts; a parameter without a gradient counts as such."""
    found = hashlib.sha256()
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(b"none" if own is None else own.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _sketch(tensors: Any) -> list[list[float]]:
    """Of each tensor sums over random parts of it, with random signs: they are as far from those of another tensor as the
    tensors are from one another.
    """
    found = []
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = torch.zeros(0) if own is None else own.detach().double().flatten()
        draw = torch.Generator().manual_seed(flat.numel())
        signs = torch.randint(0, 2, flat.shape, generator=draw) * 2 - 1
        places = torch.randint(0, _SKETCH, flat.shape, generator=draw)
        found.append(torch.zeros(_SKETCH, dtype=torch.float64).index_add(0, places, flat * signs).tolist())
    return found


def without_memory_statistics() -> None:
    """The CPU has none that TorchTitan could ask for."""
    stats = titan_metrics.DeviceMemStats(*[0] * 6)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    titan_metrics.build_device_memory_monitor = lambda: monitor


def without_kernels_for_gpus() -> None:
    """What mixtures of experts call that the CPU lacks: a histogram of integers, and a kernel that has a reference."""
    histogram, permuted = torch.histc, moe_utils.generate_permute_indices

    def histc(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return histogram(x.float(), *args, **kwargs).to(x.dtype)

    def on_host(*args: Any, **kwargs: Any) -> Any:
        return permuted(*args, **{**kwargs, "use_cpu": True})

    torch.histc, moe_utils.generate_permute_indices = histc, on_host  # type: ignore[assignment]


def synthetic(name: str) -> None:
    """Random tokens in place of a data set and its tokenizer."""
    spec = registry.get_train_spec(name)

    def loader(*, job_config: Any, **_: Any) -> Any:
        torch.manual_seed(7)
        training = job_config.training
        return SyntheticLoader(training.local_batch_size, training.seq_len, 2048)

    registry._extra_train_specs[name] = dataclasses.replace(
        spec, build_tokenizer_fn=lambda *_, **__: SyntheticTokenizer(2048), build_dataloader_fn=loader
    )


def train(config: Any) -> dict[str, Any]:
    """Train once, and report."""
    trainer = Trainer(config)
    losses: list[Any] = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **_: losses.append((loss, norm))
    modules = [module for part in trainer.model_parts for module in part.modules()]
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    for module in modules:
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    gradients: list[str] = []
    sketches: list[list[list[float]]] = []
    update = trainer.optimizers.step

    def noted(*args: Any, **kwargs: Any) -> None:
        gradients.append(_digest(parameter.grad for parameter in parameters))
        if not sketches:
            sketches.append(_sketch(parameter.grad for parameter in parameters))
        update(*args, **kwargs)

    trainer.optimizers.step = noted
    planned: list[int] = []
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, config.training.steps + 1):
        trainer.step = step
        planned.append(sum(isinstance(m, Checkpointed) and m._autosac is not None for m in modules))
        trainer.train_step(batches)
    report: dict[str, Any] = {
        "losses": losses,
        "gradients": gradients,
        "sketches": sketches,
        "parameters": _digest(parameters),
        "planned": planned,
        "graphs": counters["stats"]["unique_graphs"],
    }
    torch.distributed.barrier()
    trainer.close()
    torch.distributed.destroy_process_group()
    return report


def main() -> None:
    """Train, and report."""
    without_memory_statistics()
    without_kernels_for_gpus()
    job, *arguments = sys.argv[1:]
    arguments = ["--job.config_file", job, *arguments]
    sys.argv = ["train.py", *arguments]
    synthetic(ConfigManager().parse_args(arguments).model.name)
    report = train(ConfigManager().parse_args(arguments))
    Path(job).with_name(f"trained-{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
