"""Pictures between the texts of TorchTitan 0.3's multimodal jobs: synthetic ones, batched by TorchTitan's own collator.

How large the pictures of a data set are, and how many there are, is not in the configuration. Each sequence is taken to begin
with one of `WIDTH` x `HEIGHT` pixels, as the job resizes it: smaller where its tokens would leave no room for a text.
Needs torchvision and einops, as the job does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import Configurable

from autosac.capture.jobs.synthetic_data import SyntheticTokenizer
from autosac.errors import UsageError

WIDTH: Final = 640
HEIGHT: Final = 480
_MODULE: Final = "torchtitan.hf_datasets.multimodal.mm_datasets"
_COLLATED: Final = (
    "max_images_per_batch",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "build_mrope_positions",
    "patch_order",
)


class PictureTokenizer(SyntheticTokenizer, Configurable):
    """The synthetic tokenizer with the special tokens of TorchTitan's `MultiModalTokenizer`, the last of the vocabulary.

    `Config.job`: configures the job's own tokenizer. What has one name there is one token (pictures and videos of Kimi).
    """

    TOKEN_FIELDS = ("image", "video", "vision_start", "vision_end", "pad")

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        vocabulary_size: int
        job: Any

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__(config.vocabulary_size)
        self.texts = config.vocabulary_size - len(self.TOKEN_FIELDS)
        tokens: dict[str, int] = {}
        for name in self.TOKEN_FIELDS:
            token = tokens.setdefault(getattr(config.job, f"{name}_token"), self.texts + len(tokens))
            setattr(self, f"{name}_id", token)


class PictureLoader(Configurable):
    """Sequences of a picture and random text, on the CPU. `Config.job`: the configuration of the job's own loader."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        job: Any

    def __init__(self, config: Config, *, tokenizer: Any, seq_len: int, local_batch_size: int, **_: Any) -> None:
        from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator

        self._job, self._tokenizer, self._seq_len, self._batch_size = config.job, tokenizer, seq_len, local_batch_size
        settings = {name: getattr(config.job, name) for name in _COLLATED}
        self._collate = MultiModalCollator(
            batch_size=local_batch_size, seq_len=seq_len, tokenizer=tokenizer, **settings
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        height, width = picture_size(self._job, self._seq_len)
        picture = torch.zeros(1, height, width, 3)
        names = self._tokenizer
        tokens = [names.image_id] * _tokens(self._job, height, width)
        begin = torch.tensor([names.vision_start_id, *tokens, names.vision_end_id])
        generator = torch.Generator().manual_seed(0)
        length = self._seq_len + 1
        positions = torch.arange(length)
        while True:
            samples = []
            for _ in range(self._batch_size):
                text = torch.randint(1, names.texts, (length - len(begin),), generator=generator)
                words = torch.cat([begin, text])
                labels = torch.where(positions < len(begin), IGNORE_INDEX, words)
                sample = {"input_ids": words, "labels": labels, "positions": positions, "pixel_values": [picture]}
                samples.append(sample)
            yield self._collate(samples)


def has_pictures(loader: Any) -> bool:
    """Whether a configured data loader is TorchTitan's multimodal one."""
    return any(kind.__module__ == _MODULE for kind in type(loader).__mro__)


def picture_size(job: Any, seq_len: int) -> tuple[int, int]:
    """Height and width of a picture for this configured loader, in pixels. UsageError if none leaves room for a text."""
    height, width = HEIGHT, WIDTH
    while height:
        rows, columns, below, beside = job.resize_fn(
            height,
            width,
            patch_size=job.patch_size,
            merge_size=job.spatial_merge_size,
            min_pixels=job.min_pixels,
            max_pixels=job.max_pixels,
            max_patches=job.max_patches,
            max_patches_per_side=job.max_patches_per_side,
        )
        rows, columns = rows + below, columns + beside
        if _tokens(job, rows, columns) + 2 < seq_len:
            return rows, columns
        height, width = height // 2, width // 2
    raise UsageError(f"training.seq_len is {seq_len}: no picture of the job's data loader leaves room for a text")


def picture_note(job: Any, seq_len: int) -> str:
    """What is assumed of the data, for the report."""
    height, width = picture_size(job, seq_len)
    return (
        f"each sequence is taken to have one picture, which the job resizes to {width} x {height} pixels: how many there are "
        "and how large is not in its configuration"
    )


def _tokens(job: Any, height: int, width: int) -> int:
    """That stand for a picture of this size in the text."""
    merged = job.patch_size * job.spatial_merge_size
    return int((height // merged) * (width // merged))
