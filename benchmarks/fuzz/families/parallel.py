"""Compiled models, DistributedDataParallel and FSDP2, on the CPU. Few trials: each is slow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from benchmarks.fuzz.compiling import compiled
from benchmarks.fuzz.families.hidden import forward_in_float64
from benchmarks.fuzz.families.models import GptBlock, LlamaBlock, language
from benchmarks.fuzz.families.plain import Plain
from benchmarks.fuzz.family import Job, family, rows_of, stack


def _job(rng: random.Random, transform: Any) -> Job:
    kind = rng.randrange(4)
    if kind == 0:
        job = language(rng, lambda: LlamaBlock(16, 2), 16)
    elif kind == 1:
        job = language(rng, lambda: GptBlock(8), 8)
    else:
        job = stack(rng, lambda width: Plain(width, 0.0, kind == 3), 8, double=False)
    job.transform = transform
    return job


def _one_rank() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _ddp(rng: random.Random) -> Any:
    options = {"find_unused_parameters": rng.random() < 0.3, "static_graph": rng.random() < 0.2}

    def transform(model: nn.Module) -> nn.Module:
        _one_rank()
        return nn.parallel.DistributedDataParallel(model, **options)

    return transform


@family(
    "ddp_one_rank",
    "DistributedDataParallel on one gloo rank; the planner plans a model that is wrapped already",
    most=400,
    plan_transformed=True,
)
def ddp_one_rank(rng: random.Random) -> Job:
    """A model of DDP, alone."""
    return _job(rng, _ddp(rng))


@family(
    "ddp_wrapped_before",
    "the plan is applied to a model that is in DistributedDataParallel already",
    most=200,
    planner=False,
)
def ddp_wrapped_before(rng: random.Random) -> Job:
    """DDP first, plan second."""
    _one_rank()
    job = _job(rng, lambda model: model)
    job.model = nn.parallel.DistributedDataParallel(job.model)
    return job


@family("ddp_two_ranks", "DistributedDataParallel on two gloo ranks", most=60, ranks=2, planner=False, limit_s=60.0)
def ddp_two_ranks(rng: random.Random) -> Job:
    """A model of DDP on two processes."""
    return _job(rng, _ddp(rng))


@family(
    "fsdp_two_ranks",
    "FSDP2 (fully_shard) of every block and the model on two gloo ranks",
    most=60,
    ranks=2,
    planner=False,
    limit_s=60.0,
)
def fsdp_two_ranks(rng: random.Random) -> Job:
    """A model whose parameters are sharded."""
    reshard = rng.random() < 0.5

    def transform(model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        return model

    return _job(rng, transform)


class _Gathering(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(torch.sin(self.a(x)) * 0.1)
        all_rows = collectives.all_gather_tensor_autograd(h, 0, dist.group.WORLD)
        rows = collectives.reduce_scatter_tensor_autograd(torch.sin(all_rows), "sum", 0, dist.group.WORLD)
        return x + self.b(torch.sin(rows))


@family(
    "collectives_two_ranks",
    "functional collectives inside units on two gloo ranks, whose results are saved before they have arrived",
    most=40,
    ranks=2,
    planner=False,
    limit_s=60.0,
)
def collectives_two_ranks(rng: random.Random) -> Job:
    """Each result is waited for where it is used."""
    return stack(rng, _Gathering, 8, double=False, rows=(24, 16))


@family(
    "pipeline_two_ranks",
    "a zero-bubble pipeline with four stages on two gloo ranks, whose backwards come in two parts",
    most=40,
    ranks=2,
    planner=False,
    limit_s=90.0,
)
def pipeline_two_ranks(rng: random.Random) -> Job:
    """First the gradients of inputs, then those of weights."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

    is_v = rng.random() < 0.5

    def step(model: nn.Module, batch: Any) -> list[Tensor]:
        rank, blocks = dist.get_rank(), list(model.get_submodule("blocks").children())
        mine = (rank, 3 - rank) if is_v else (rank, rank + 2)
        stages = [PipelineStage(blocks[i], i, 4, torch.device("cpu")) for i in mine]
        kind = ScheduleZBVZeroBubble if is_v else ScheduleInterleavedZeroBubble
        schedule = kind(stages, n_microbatches=4, loss_fn=lambda out, wanted: (out - wanted).pow(2).mean())
        losses: list[Tensor] = []
        ends = {"target": batch[0], "losses": losses} if 3 in mine else {}
        schedule.step(*(batch if 0 in mine else ()), **ends)
        return [loss.detach() for loss in losses]

    return Job(_Stages(), tuple(f"blocks.{i}" for i in range(4)), rows_of(8), step=step, double=False, rows=(24,))


class _Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _compiling(backend: str, *, blocks: bool) -> Callable[[nn.Module], nn.Module]:
    """Compile each block, or the model as a whole."""

    def transform(model: nn.Module) -> nn.Module:
        names = [f"blocks.{name}" for name, _ in model.get_submodule("blocks").named_children()]
        return compiled(model, names if blocks else (), backend)

    return transform


def _compiled(rng: random.Random, backend: str) -> Job:
    job = _job(rng, _compiling(backend, blocks=rng.random() < 0.5))
    job.rows = (24, 24, 16)
    return job


@family(
    "compiled_aot_eager",
    "torch.compile of the model or of each block, aot_eager",
    most=60,
    planner=False,
    limit_s=120.0,
    compiled=True,
)
def compiled_aot_eager(rng: random.Random) -> Job:
    """Compiled by AOTAutograd, run eagerly."""
    return _compiled(rng, "aot_eager")


class _Tables(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        line, quotients = torch.linspace(0, 1, x.shape[-1]), torch.arange(x.shape[-1]) / 7
        y = torch.sin(self.a(x) * line.to(x.dtype) * torch.sin(quotients.to(x.dtype)))
        return y * ((x.detach() > 0) * 1.1).to(x.dtype)


@family(
    "compiled_default_dtype",
    "blocks compiled by aot_eager, whose forward runs under another default dtype than the backward",
    most=20,
    planner=False,
    limit_s=120.0,
    compiled=True,
)
def compiled_default_dtype(rng: random.Random) -> Job:
    """Tables of the default dtype."""
    compiling = _compiling("aot_eager", blocks=True)
    return stack(rng, _Tables, step=forward_in_float64, transform=compiling, double=False, rows=(24,))


@torch.compiler.nested_compile_region
def _region(x: Tensor) -> Tensor:
    return nn.functional.dropout(torch.sin(torch.exp(x * 0.1)), 0.2)


class _Regions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(_region(torch.sin(_region(self.a(x)))))


@family(
    "compiled_regions",
    "nested_compile_region with dropout in a model that is compiled by aot_eager",
    most=20,
    planner=False,
    limit_s=120.0,
    compiled=True,
)
def compiled_regions(rng: random.Random) -> Job:
    """One region in all blocks, twice in each."""
    compiling = _compiling("aot_eager", blocks=False)
    return stack(rng, _Regions, transform=compiling, double=False, rows=(24,))


@family(
    "compiled_inductor",
    "torch.compile of the model or of each block, Inductor on the CPU",
    most=4,
    planner=False,
    limit_s=240.0,
    compiled=True,
    rounds=True,
)
def compiled_inductor(rng: random.Random) -> Job:
    """Compiled by Inductor."""
    return _compiled(rng, "inductor")
