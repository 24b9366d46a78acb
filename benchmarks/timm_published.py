"""Vision models on GeForce cards, beside what PyTorch Image Models published: ``python -m benchmarks.timm_published --truth
DIR`` from the repository's root.

DIR is the folder `results` of github.com/huggingface/pytorch-image-models. Its benchmarks ran each model under autocast to
float16: training steps with SGD on an RTX 3090 (PyTorch 1.12, whose attention was not fused), and forwards on an RTX 3090,
an RTX 4090 (PyTorch 2.4) and an RTX 5090 (2.9). ViT and ConvNeXt are written out in `h100_study.vision`, convolutional
networks in `timm_convnets`; these are published with channels first and last.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autosac
from autosac.errors import UsageError
from benchmarks import timm_convnets
from benchmarks.ending import exit_code
from benchmarks.h100_study.vision import ConvNeXt, VisionTransformer, convnextv2_huge


class ConvNeXtV1Block(nn.Module):
    """The block of ConvNeXt's first version: no response norm, a scale for each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Mix space, then channels."""
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        return y.permute(0, 3, 1, 2) * self.gamma.reshape(1, -1, 1, 1) + x


def _vit(patch: int, dim: int, depth: int, heads: int) -> nn.Module:
    return VisionTransformer(image_size=224, patch_size=patch, dim=dim, depth=depth, num_heads=heads, num_classes=1000)


def convnext(*dims: int) -> nn.Module:
    return ConvNeXt(depths=(3, 3, 27, 3), dims=dims, num_classes=1000, block=ConvNeXtV1Block)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit_base_patch16_224": functools.partial(_vit, 16, 768, 12, 12),
    "vit_large_patch16_224": functools.partial(_vit, 16, 1024, 24, 16),
    "vit_huge_patch14_224": functools.partial(_vit, 14, 1280, 32, 16),
    "convnext_base": functools.partial(convnext, 128, 256, 512, 1024),
    "convnext_large": functools.partial(convnext, 192, 384, 768, 1536),
    "convnextv2_huge": convnextv2_huge,
    "resnet18": functools.partial(timm_convnets.resnet, (2, 2, 2, 2), bottleneck=False),
    "resnet50": functools.partial(timm_convnets.resnet, (3, 4, 6, 3), bottleneck=True),
    "resnext50_32x4d": functools.partial(timm_convnets.resnet, (3, 4, 6, 3), bottleneck=True, groups=32, width=4),
    "mobilenetv2_100": timm_convnets.mobilenet_v2,
    "vgg16": timm_convnets.vgg16,
}
# Of those that are no convolutional networks channels first only: they move channels last themselves.
_BOTH_LAYOUTS = ("resnet18", "resnet50", "resnext50_32x4d", "mobilenetv2_100", "vgg16")


class Published(NamedTuple):
    """One published figure: milliseconds of a step, or of a forward."""

    gpu: str
    model: str
    trains: bool
    fused: bool
    batch: int
    ms: float
    channels_last: bool = False


_LINE = "{:<10} {:<23} {:<12} {:>5} {:>16} {:>16} {:>8}"
FILES = {  # GPU, whether it trains, whether attention was fused
    "benchmark-train-amp-{}-pt112-cu113-rtx3090.csv": ("rtx-3090", True, False),
    "benchmark-infer-amp-{}-pt240-cu124-rtx3090.csv": ("rtx-3090", False, True),
    "benchmark-infer-amp-{}-pt240-cu124-rtx4090.csv": ("rtx-4090", False, True),
    "benchmark-infer-amp-nchw-pt291-cu130-5090.csv": ("rtx-5090", False, True),
}
LAYOUTS = ("nchw", "nhwc")


def published(folder: Path) -> Iterator[Published]:
    """The figures of MODELS at 224 pixels. UsageError if a file is not there."""
    for (name, (gpu, trains, fused)), layout in itertools.product(FILES.items(), LAYOUTS):
        if layout != LAYOUTS[0] and name.format(layout) == name:  # published in one layout only
            continue
        path = folder / name.format(layout)
        last = layout == "nhwc"
        if not path.is_file():
            raise UsageError(f"{path} is not there: --truth is the folder `results` of pytorch-image-models")
        kind = "train" if trains else "infer"
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                models = _BOTH_LAYOUTS if last else MODELS
                if row["model"] in models and row[f"{kind}_img_size"] == "224":
                    batch, ms = int(row[f"{kind}_batch_size"]), float(row[f"{kind}_step_time"])
                    yield Published(gpu, row["model"], trains, fused, batch, ms, last)


def make_step(run: Published, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A step of the published run."""
    with torch.device(device):
        model = MODELS[run.model]()
    layout = torch.channels_last if run.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]  # a keyword that its stub lacks
    model.train(run.trains)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION] if run.fused else [SDPBackend.MATH]

    def step() -> Tensor:
        images = torch.randn(run.batch, 3, 224, 224, device=device).contiguous(memory_format=layout)
        with sdpa_kernel(kernels), torch.set_grad_enabled(run.trains):
            with torch.autocast(device.type, dtype=torch.float16):
                logits = model(images)
                labels = torch.zeros(run.batch, dtype=torch.long, device=device)
                loss = F.cross_entropy(logits, labels)
            if run.trains:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()

    return model, step


def run() -> None:
    """Simulate every figure and print them side by side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timm_published", description=__doc__)
    parser.add_argument("--truth", type=Path, required=True, help="folder of the published CSV files")
    errors = []
    runs = list(published(parser.parse_args().truth))
    print(_LINE.format("GPU", "model", "what", "batch", "simulated (ms)", "published (ms)", "error"), flush=True)
    for one in runs:
        ms = autosac.simulate(functools.partial(make_step, one), gpu=one.gpu).step_ms
        errors.append(ms / one.ms - 1)
        what = ("step" if one.trains else "forward") + (" NHWC" if one.channels_last else "")
        figures = (f"{ms:.1f}", f"{one.ms:.1f}", f"{errors[-1]:+.1%}")
        print(_LINE.format(one.gpu, one.model, what, one.batch, *figures), flush=True)
    size = statistics.fmean(map(abs, errors))
    print(f"mean error {size:.1%}, worst {max(errors, key=abs):+.1%} ({len(errors)} figures)")


def main() -> int:
    """Run, and turn errors into a message and an exit code."""
    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
