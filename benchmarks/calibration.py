"""A calibrated machine's predictions against its own training steps, of models that no calibration has seen.

    autosac calibrate --device cpu --threads 1 -o cpu.toml
    python -m benchmarks.calibration --profile cpu.toml [--threads 1] [--repeat 3] [--models gpt,mlp] [--save FILE.md]

Every model is captured and simulated with the profile, and trained for real in a process of its own, several times with the
other models in between. Measured is the median over all steps: with one thread by the thread's CPU time, which other processes
disturb less, with several threads by wall time. The wall time is shown beside it. Use the threads that the profile was made
with.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import autosac
from autosac.files.writing import write_text_atomically

_WARM_UP, _STEPS = 3, 12
MakeStep = Callable[[torch.device], Any]


class Attention(nn.Module):
    """Causal self-attention of `heads` heads, from one projection."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A transformer block: GPT's (LayerNorm, GELU, biases) or Llama's (RMSNorm, SwiGLU, none)."""

    def __init__(self, width: int, heads: int, llama: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(width, heads, bias=not llama)
        plain = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp: nn.Module = Gated(width, 8 * width // 3) if llama else plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, words: int, width: int, heads: int, layers: int, length: int, llama: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, llama) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length] -> [batch, length, words]."""
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places.weight[: tokens.shape[1]])))


class Residual(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] -> the same."""
        return torch.relu(x + self.body(x))


class Separable(nn.Module):
    """A depthwise convolution between two of 1x1 (MobileNetV2) or before them (ConvNeXt); the input is added."""

    def __init__(self, channels: int, kernel: int, *, first: bool) -> None:
        super().__init__()
        wide = 4 * channels
        size = channels if first else wide
        depthwise = nn.Conv2d(size, size, kernel, padding=kernel // 2, groups=size, bias=first)
        widen, narrow = nn.Conv2d(channels, wide, 1, bias=first), nn.Conv2d(wide, channels, 1, bias=first)
        inverted = [widen, nn.BatchNorm2d(wide), nn.ReLU6(), depthwise, nn.BatchNorm2d(wide), nn.ReLU6(), narrow]
        convnext = [depthwise, nn.GroupNorm(1, channels), widen, nn.GELU(), narrow]
        self.body = nn.Sequential(*(convnext if first else [*inverted, nn.BatchNorm2d(channels)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] -> the same."""
        return x + self.body(x)


def _language(
    device: torch.device, *, batch: int, length: int, optimizer: Any, checkpointed: bool = False, **shape: Any
) -> Any:
    with device:
        model = Transformer(length=length, **shape)
    if checkpointed:
        model.blocks = nn.Sequential(*(checkpoint_wrapper(block, early_stop=False) for block in model.blocks))
    stepper = optimizer(model.parameters())
    tokens = torch.randint(0, shape["words"], (batch, length), device=device)

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        stepper.step()
        stepper.zero_grad()

    return model, step


def _classifier(device: torch.device, *, parts: Callable[[], list[nn.Module]], inputs: tuple[int, ...]) -> Any:
    with device:
        model = nn.Sequential(*parts())
    stepper = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data, labels = torch.randn(*inputs, device=device), torch.randint(0, 10, inputs[:1], device=device)

    def step() -> None:
        F.cross_entropy(model(data), labels).backward()
        stepper.step()
        stepper.zero_grad()

    return model, step


def _dense(width: int, layers: int, function: type[nn.Module]) -> list[nn.Module]:
    return [part for _ in range(layers) for part in (nn.Linear(width, width), function())] + [nn.Linear(width, 10)]


def _pooled(channels: tuple[int, ...]) -> list[nn.Module]:
    parts: list[nn.Module] = []
    before = 3
    for count in channels:
        parts += [nn.Conv2d(before, count, 3, padding=1), nn.BatchNorm2d(count), nn.ReLU(), nn.MaxPool2d(2)]
        before = count
    return [*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]


def _residual() -> list[nn.Module]:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)]
    return [nn.Conv2d(3, 48, 3, 2, 1), nn.ReLU(), *(Residual(48) for _ in range(4)), *head]


def _separable(channels: int, kernel: int, stride: int, *, first: bool) -> list[nn.Module]:
    stem = nn.Conv2d(3, channels, stride + 1 - stride % 2, stride)
    blocks = [Separable(channels, kernel, first=first) for _ in range(4)]
    return [stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


adamw = partial(torch.optim.AdamW, lr=1e-3)
MODELS: dict[str, MakeStep] = {
    "gpt": partial(
        _language, batch=4, length=256, words=4000, width=256, heads=4, layers=4, llama=False, optimizer=adamw
    ),
    "gpt, fused AdamW": partial(
        _language,
        batch=2,
        length=192,
        words=2000,
        width=320,
        heads=5,
        layers=3,
        llama=False,
        optimizer=partial(adamw, fused=True),
    ),
    "llama": partial(
        _language, batch=2, length=384, words=6000, width=384, heads=6, layers=3, llama=True, optimizer=adamw
    ),
    "llama, tiny": partial(
        _language, batch=2, length=32, words=256, width=64, heads=2, layers=6, llama=True, optimizer=adamw
    ),
    "llama, tiny, checkpointed": partial(
        _language,
        batch=2,
        length=32,
        words=256,
        width=64,
        heads=2,
        layers=6,
        llama=True,
        optimizer=adamw,
        checkpointed=True,
    ),
    "mlp": partial(_classifier, parts=partial(_dense, 768, 4, nn.ReLU), inputs=(256, 768)),
    "mlp, wide": partial(_classifier, parts=partial(_dense, 1536, 3, nn.GELU), inputs=(512, 1536)),
    "convnet": partial(_classifier, parts=partial(_pooled, (16, 32, 64)), inputs=(16, 3, 64, 64)),
    "resnet": partial(_classifier, parts=_residual, inputs=(8, 3, 64, 64)),
    "mobilenet": partial(_classifier, parts=partial(_separable, 24, 3, 2, first=False), inputs=(8, 3, 96, 96)),
    "convnext": partial(_classifier, parts=partial(_separable, 48, 7, 4, first=True), inputs=(8, 3, 128, 128)),
}


# ---- the truth -------------------------------------------------------------------------------------------------


def measure_here(name: str, threads: int) -> None:
    """Train one model and print what its steps took: [CPU ms, wall ms, page faults] of each."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    _, step = MODELS[name](torch.device("cpu"))
    rows = []
    for number in range(_WARM_UP + _STEPS):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        wall, cpu = time.perf_counter(), time.thread_time()
        step()
        row = ((time.thread_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3)
        if number >= _WARM_UP:
            rows.append((*row, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
    print(json.dumps(rows))


def measure(names: list[str], threads: int, repeat: int) -> dict[str, list[list[float]]]:
    """The steps of every model, `repeat` processes each, in turn."""
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(repeat):
        for name in names:
            command = [sys.executable, "-m", "benchmarks.calibration", "--child", name, "--threads", str(threads)]
            child = subprocess.run(command, capture_output=True, text=True)
            if child.returncode:
                raise SystemExit(f"training {name} failed: {child.stderr.strip().splitlines()[-1]}")
            steps[name] += json.loads(child.stdout.splitlines()[-1])
    return steps


# ---- the comparison --------------------------------------------------------------------------------------------


def table(profile: str, names: list[str], threads: int, repeat: int) -> list[str]:
    """The comparison as Markdown."""
    predicted = {name: autosac.simulate(MODELS[name], gpu=profile, target="cpu") for name in names}
    steps = measure(names, threads, repeat)
    clock = "CPU time" if threads == 1 else "wall time"
    lines = [
        f"| model | operators | predicted (ms) | measured, {clock} (ms) | error | quartiles of the steps (ms) | wall (ms) |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    errors = []
    for name in names:
        columns = list(zip(*steps[name], strict=True))
        times = columns[0] if threads == 1 else columns[1]
        low, measured, high = statistics.quantiles(times, n=4)
        step_ms = predicted[name].step_ms
        errors.append(step_ms / measured - 1)
        count = sum(1 for _ in predicted[name].trace.operators())
        lines.append(
            f"| {name} | {count} | {step_ms:.1f} | {measured:.1f} | {errors[-1]:+.1%} | {low:.1f} to {high:.1f} "
            f"| {statistics.median(columns[1]):.1f} |"
        )
    worst = max(errors, key=abs)
    mean = statistics.mean(map(abs, errors))
    return [*lines, "", f"Mean error {mean:.1%}, worst {worst:+.1%}; {threads} thread(s), torch {torch.__version__}."]


def main() -> None:
    """Compare, print, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", help="what autosac calibrate wrote")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3, help="processes for each model (default 3)")
    parser.add_argument("--models", default=None, help=f"a semicolon-separated part of: {'; '.join(MODELS)}")
    parser.add_argument("--save", type=Path, help="write the table here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure_here(arguments.child, arguments.threads)
        return
    names = arguments.models.split(";") if arguments.models else list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown or not arguments.profile:
        raise SystemExit(f"no model {unknown[0]!r}" if unknown else "--profile is needed")
    lines = table(arguments.profile, names, arguments.threads, arguments.repeat)
    print("\n".join(lines))
    if arguments.save:
        write_text_atomically(arguments.save, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
