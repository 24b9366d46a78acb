"""Flux in TorchTitan 0.2: batches of images and texts, and frozen encoders that its own Trainer runs before the model.

The encoders' weights do not matter, only their configurations: they are built on the meta device and get their memory in the
Trainer's precision. Needs transformers and torchvision, as the job does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

_PACKAGE = "torchtitan.models.flux"
_CLIP_TOKENS = 77  # fixed in TorchTitan's `build_flux_tokenizer`


class FluxLoader:
    """Random images with the tokens of their texts, on the CPU as TorchTitan's loader yields them."""

    def __init__(self, config: Any) -> None:
        training = config.training
        self.batch_size, self.image_size = training.local_batch_size, training.img_size
        self.t5_tokens = config.encoder.max_t5_encoding_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = {
                name: torch.ones(self.batch_size, 1, length, dtype=torch.int64)
                for name, length in (("clip_tokens", _CLIP_TOKENS), ("t5_tokens", self.t5_tokens))
            }
            yield tokens, torch.zeros(self.batch_size, 3, self.image_size, self.image_size)


def is_flux(spec: Any) -> bool:
    """Whether a train spec is TorchTitan's Flux."""
    return str(spec.model_cls.__module__).startswith(f"{_PACKAGE}.")


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """The Trainer that is built inside makes its encoders of their configurations alone."""
    import torchtitan.models.flux.train as flux
    from torchtitan.models.flux.model.hf_embedder import CLIPTextModel, FluxEmbedder, T5EncoderModel

    class Embedder(FluxEmbedder):
        """An encoder that moves to the device without a copy on the host."""

        def __init__(self, version: str, random_init: bool = False, **settings: Any) -> None:
            with torch.device("meta"):
                super().__init__(version, random_init, **settings)

        def to(self, *, device: torch.device, dtype: torch.dtype) -> Any:
            self.hf_module.to(dtype=dtype)
            return self.to_empty(device=device)

    def of_configuration(cls: Any, /, version: str, **_: Any) -> Any:
        return cls._from_config(cls.config_class.from_pretrained(version))

    kept = flux.FluxEmbedder, flux.load_ae
    flux.FluxEmbedder, flux.load_ae = Embedder, _with(flux.load_ae, random_init=True)
    readers = {cls: cls.__dict__.get("from_pretrained") for cls in (CLIPTextModel, T5EncoderModel)}
    reader: Any = classmethod(of_configuration)
    for cls in readers:
        cls.from_pretrained = reader
    try:
        yield
    finally:
        flux.FluxEmbedder, flux.load_ae = kept
        for cls, own in readers.items():
            if own is None:
                del cls.from_pretrained
            else:
                cls.from_pretrained = own


def _with(function: Any, **chosen: Any) -> Any:
    """`function`, with keyword arguments that overrule the caller's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **chosen})

    return call
