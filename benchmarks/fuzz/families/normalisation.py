"""Normalisations and parametrizations: modules that write to their buffers in the forward."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.fuzz.family import Job, Stack, family, mean_square, rows_of, stack, stacked


def _spectral_old(block: Any, _: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(block.a, n_power_iterations=2)


@stacked(
    "spectral_norm_old",
    "torch.nn.utils.spectral_norm: the power iteration writes u and v in the forward",
    _spectral_old,
)
def spectral_old(block: Any, x: Tensor) -> Tensor:
    """The normalised layer."""
    return block.a(x)


def _spectral(block: Any, _: int) -> None:
    parametrizations.spectral_norm(block.a)
    parametrizations.spectral_norm(block.c, n_power_iterations=3)


@stacked("spectral_norm", "the parametrization spectral_norm", _spectral)
def spectral(block: Any, x: Tensor) -> Tensor:
    """The normalised layer."""
    return block.a(x)


def _weight_norms(block: Any, _: int) -> None:
    parametrizations.weight_norm(block.a)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(block.b)


@stacked(
    "weight_norm",
    "weight norm as a parametrization and as the old hook, which rebinds the weight in every forward",
    _weight_norms,
)
def weight_norms(block: Any, x: Tensor) -> Tensor:
    """The normalised layer."""
    return block.a(x)


@family("orthogonal", "the parametrization orthogonal, by each of its maps")
def orthogonal(rng: random.Random) -> Job:
    """Blocks whose first layer is orthogonal."""
    kind = rng.choice(("matrix_exp", "cayley", "householder"))

    class Orthogonal(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a = parametrizations.orthogonal(nn.Linear(width, width), orthogonal_map=kind)
            self.b = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    return stack(rng, Orthogonal, 6, double=False)


def _batch_norm(block: Any, width: int) -> None:
    block.norm = nn.BatchNorm1d(width, momentum=None if block.place == 1 else 0.1)


@stacked("batch_norm_1d", "BatchNorm1d in training, with and without momentum", _batch_norm)
def batch_norm_1d(block: Any, x: Tensor) -> Tensor:
    """The normalised input."""
    return block.norm(x)


def _half_in_eval(model: nn.Module, batch: Any) -> list[Tensor]:
    model.train()
    for i, block in enumerate(model.get_submodule("blocks").children()):
        block.train(i % 2 == 0)
    loss = mean_square(model(*batch))
    loss.backward()
    return [loss.detach()]


@stacked(
    "batch_norm_eval",
    "every second block is in eval mode: its BatchNorm reads the statistics",
    _batch_norm,
    step=_half_in_eval,
)
def batch_norm_eval(block: Any, x: Tensor) -> Tensor:
    """The normalised input."""
    return block.norm(x)


def _eval_between(model: nn.Module, batch: Any) -> list[Tensor]:
    model.train()
    loss = mean_square(model(*batch))
    loss.backward()
    model.eval()
    with torch.no_grad():
        seen = model(*batch)
    model.train()
    return [loss.detach(), seen]


@stacked(
    "batch_norm_then_eval",
    "an evaluation follows every training step and reads the statistics",
    _batch_norm,
    step=_eval_between,
)
def batch_norm_then_eval(block: Any, x: Tensor) -> Tensor:
    """The normalised input."""
    return block.norm(x)


class _Convolutions(nn.Module):
    def __init__(self, channels: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), norm
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


def _images(channels: int) -> Any:
    return lambda rows: (torch.randn(max(2, rows // 6), channels, 5, 5),)


class _Images(nn.Module):
    def __init__(self, blocks: list[nn.Module], channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, channels, 1)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@family("batch_norm_2d", "residual blocks with BatchNorm2d, in-place ReLU and addition, as ResNet has them")
def batch_norm_2d(rng: random.Random) -> Job:
    """A small residual network."""
    count = rng.randint(1, 3)
    blocks: list[nn.Module] = [_Convolutions(4, nn.BatchNorm2d(4)) for _ in range(count)]
    return Job(_Images(blocks, 4), tuple(f"blocks.{i}" for i in range(count)), _images(4))


@family("instance_norm", "InstanceNorm2d with running statistics, beside BatchNorm2d")
def instance_norm(rng: random.Random) -> Job:
    """A residual network with instance normalisation."""
    count = rng.randint(1, 2)
    blocks: list[nn.Module] = [
        _Convolutions(4, nn.InstanceNorm2d(4, affine=True, track_running_stats=True)) for _ in range(count)
    ]
    return Job(_Images(blocks, 4), tuple(f"blocks.{i}" for i in range(count)), _images(4))


@family("batch_norm_transposed", "BatchNorm1d over channels that a transpose brings to the front, as in audio models")
def batch_norm_transposed(rng: random.Random) -> Job:
    """Blocks on rows x time x width."""

    class Transposed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.a = nn.BatchNorm1d(width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a(F.gelu(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2)))

    return stack(rng, Transposed, 8, batch=lambda rows: (torch.randn(rows, 3, 8),))


def _statistics(block: Any, width: int) -> None:
    block.mean, block.var = torch.zeros(width), torch.ones(width)


@stacked(
    "functional_batch_norm",
    "F.batch_norm that writes to plain attributes, which are no buffers",
    _statistics,
    double=False,
)
def functional_batch_norm(block: Any, x: Tensor) -> Tensor:
    """The normalised input."""
    return F.batch_norm(x, block.mean, block.var, training=True)


@family("sync_and_group_norm", "GroupNorm, LayerNorm and RMSNorm, in half precision weights where the variant says so")
def group_norm(rng: random.Random) -> Job:
    """Blocks with three normalisations."""
    half = rng.random() < 0.3

    class Norms(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.group, self.layer, self.rms = nn.GroupNorm(2, width), nn.LayerNorm(width), nn.RMSNorm(width)
            self.a = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.rms(F.silu(self.layer(self.group(self.a(x)))))

    job = stack(rng, Norms)
    if half:
        job.model.bfloat16()
        width = job.model.get_submodule("first").in_features
        job.batch = lambda rows: (torch.randn(rows, width).bfloat16(),)
        job.double = False
    return job


@family("fake_quantize", "observers of fake quantization, whose fused operator writes scale and zero point")
def fake_quantize(rng: random.Random) -> Job:
    """Blocks with torch.fused_moving_avg_obs_fake_quant."""

    class Observed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a = nn.Linear(width, width)
            for name, value in {
                "on": torch.ones(1, dtype=torch.long),
                "scale": torch.ones(1),
                "low": torch.zeros(1),
            }.items():
                self.register_buffer(name, value)
            self.register_buffer("high", torch.ones(1))
            self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.a(x))
            h = torch.fused_moving_avg_obs_fake_quant(
                h, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.01, 0, 255, 0, False, False
            )
            return self.a(torch.sin(h))

    return stack(rng, Observed, double=False)


@family("shared_norm", "one BatchNorm module that every block uses")
def shared_norm(rng: random.Random) -> Job:
    """Blocks that share their normalisation and its statistics."""
    width = 8
    norm = nn.BatchNorm1d(width)

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a = norm, nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.sin(self.norm(self.a(x)))

    count = rng.randint(2, 3)
    return Job(
        Stack([Sharing() for _ in range(count)], width), tuple(f"blocks.{i}" for i in range(count)), rows_of(width)
    )
