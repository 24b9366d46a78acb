"""Flux in TorchTitan: batches of images and texts, and frozen encoders that its own Trainer runs before the model.

The encoders' weights do not matter, only their configurations: they are built on the meta device and get their memory in the
Trainer's precision. Needs transformers and torchvision, as the job does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_PACKAGE = "torchtitan.models.flux"
_CLIP_TOKENS = 77  # fixed in TorchTitan's `build_flux_tokenizer` and `FluxTokenizerContainer`


class FluxBatches:
    """Random images with the tokens of their texts, on the CPU as TorchTitan's loader yields them. `names`: the batch's names
    for the tokens of CLIP and of T5.
    """

    def __init__(self, batch_size: int, image_size: int, t5_tokens: int, names: tuple[str, str]) -> None:
        self.batch_size, self.image_size = batch_size, image_size
        self.lengths = dict(zip(names, (_CLIP_TOKENS, t5_tokens), strict=True))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = {
                name: torch.ones(self.batch_size, 1, length, dtype=torch.int64) for name, length in self.lengths.items()
            }
            yield tokens, torch.zeros(self.batch_size, 3, self.image_size, self.image_size)


def is_flux(model_class: type) -> bool:
    """Whether a model (0.2), or its configuration (0.3), is TorchTitan's Flux."""
    return model_class.__module__.startswith(f"{_PACKAGE}.")


@contextlib.contextmanager
def without_weights(trainer: Any) -> Iterator[None]:
    """The Trainer built inside, by the module `trainer`, makes its encoders of their configurations alone."""
    from torchtitan.models.flux.model.hf_embedder import CLIPTextModel, FluxEmbedder, T5EncoderModel

    make = FluxEmbedder.__init__

    def on_meta(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            make(self, *args, **kwargs)

    def moved(self: Any, *, device: torch.device, dtype: torch.dtype) -> Any:
        self.hf_module.to(dtype=dtype)
        return self.to_empty(device=device)  # without a copy on the host

    def of_configuration(cls: Any, /, version: str, **_: Any) -> Any:
        return cls._from_config(cls.config_class.from_pretrained(version))

    reader: Any = classmethod(of_configuration)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(FluxEmbedder, __init__=on_meta, to=moved))
        stack.enter_context(mock.patch.object(trainer, "load_ae", _with(trainer.load_ae, random_init=True)))
        for cls in (CLIPTextModel, T5EncoderModel):
            stack.enter_context(mock.patch.object(cls, "from_pretrained", reader))
        yield


def _with(function: Any, **chosen: Any) -> Any:
    """`function`, with keyword arguments that overrule the caller's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **chosen})

    return call
