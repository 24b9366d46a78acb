"""One training step as a `make_step`: a model, its batch and its loss, with what surrounds them in users' own loops.

`benchmarks.gpu.unseen` composes its jobs from these parts. Models of libraries come from `transformers`, `timm` and
`torchvision` and are built from their configurations; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Tensor]
MakeStep = Callable[[torch.device], tuple[nn.Module, Step]]
Batch = Callable[[torch.device], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. `compiled` says that it uses torch.compile, which takes a minute to begin."""

    name: str
    make_step: MakeStep
    compiled: bool = False


def job(name: str, build: Callable[[], nn.Module], batch: Batch, loss: Callable[..., Tensor], **options: Any) -> Job:
    """A job of these parts; `options` are those of `trained`."""
    return Job(
        name=name,
        make_step=trained(build, batch, loss, **options),
        compiled=options.get("compile_mode") is not None,
    )


@contextmanager
def _built(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def trained(
    build: Callable[[], nn.Module],
    batch: Batch,
    loss: Callable[..., Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    scaler: bool = False,
    clip: float | None = None,
    channels_last: bool = False,
    compile_mode: str | None = None,
    tf32: bool = False,
) -> MakeStep:
    """A step: forward and loss (under autocast), backward (scaled), clipping, optimizer, gradients set to None.

    `tf32`: the process allows it for float32 products from then on.
    """

    def make_step(device: torch.device) -> tuple[nn.Module, Step]:
        if tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        with _built(dtype, device):
            model = build()
        model.train()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        called: Any = model
        if compile_mode is not None:
            called = torch.compile(model, mode=None if compile_mode == "default" else compile_mode)
        chosen = (optimizer or adamw)(model.parameters())
        scaled = torch.amp.GradScaler(device.type) if scaler else None
        inputs = batch(device)

        def step() -> Tensor:
            context: Any = nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
            with context:
                value = loss(called, *inputs)
            if scaled is None:
                value.backward()
            else:
                scaled.scale(value).backward()
                scaled.unscale_(chosen)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaled is None:
                chosen.step()
            else:
                scaled.step(chosen)
                scaled.update()
            chosen.zero_grad(set_to_none=True)
            return value.detach()

        return model, step

    return make_step


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-4)


def fused(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


# ---- batches and losses -----------------------------------------------------------------------------------------------


def tokens(batch: int, length: int, vocabulary: int) -> Batch:
    """Random ids and labels."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        ids = torch.randint(0, vocabulary, (batch, length), device=device)
        return ids, torch.randint(0, vocabulary, (batch, length), device=device)

    return make


def images(batch: int, size: int, *, channels_last: bool = False) -> Batch:
    """Random images and classes."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        pixels = torch.randn(batch, 3, size, size, device=device)
        if channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return pixels, torch.randint(0, 1000, (batch,), device=device)

    return make


def classified(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of classes."""
    return F.cross_entropy(model(pixels), labels)


def loss_of(name: str) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The loss of a transformers model that calls its input so."""

    def loss(model: nn.Module, given: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = model(**{name: given}, labels=labels).loss
        return found

    return loss


labelled, transcribed = loss_of("input_ids"), loss_of("input_features")


def next_token(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits in their own type."""
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


# ---- models of libraries ------------------------------------------------------------------------------------------------


def hf(class_name: str, config_name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        attention = sizes.get("attn_implementation", "sdpa")
        config = getattr(transformers, config_name)(**{k: v for k, v in sizes.items() if k != "attn_implementation"})
        model: nn.Module = getattr(transformers, class_name)._from_config(config, attn_implementation=attention)
        return model

    return build


def checkpointed(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        model = build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        checkpointed: nn.Module = model
        return checkpointed

    return built


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, **options)
        return model

    return build


def torchvision_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        return model

    return build


def pictures_with_masks(batch: int, size: int, classes: int = 21) -> Batch:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        pixels = torch.randn(batch, 3, size, size, device=device)
        return pixels, torch.randint(0, classes, (batch, size, size), device=device)

    return make


def segmented(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels)["out"], labels)


def speech(batch: int, length: int) -> Batch:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        heard = torch.randn(batch, 80, 3000, device=device)
        return heard, torch.randint(0, 51865, (batch, length), device=device)

    return make
