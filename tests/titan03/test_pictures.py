"""Jobs whose data has pictures: what stands in for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from autosac.capture.jobs.titan_pictures import (
    PictureLoader,
    PictureTokenizer,
    has_pictures,
    picture_note,
    picture_size,
)
from autosac.errors import UsageError
from autosac.trace import Op, Trace

SEQ_LEN = 512
# Of 640 x 480 pixels: patches of 16 x 16, of which 2 x 2 become one token.
TOKENS = (480 // 32) * (640 // 32)
NEEDED = all(importlib.util.find_spec(package) for package in ("torchvision", "einops", "fla"))


def as_it_is(height: int, width: int, **_: int) -> tuple[int, int, int, int]:
    """A size in whole tokens, without padding."""
    return height // 32 * 32, width // 32 * 32, 0, 0


def job(**changes: Any) -> SimpleNamespace:
    """A loader's configuration like that of Qwen 3.5."""
    settings = {
        "max_images_per_batch": 128,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "build_mrope_positions": True,
        "patch_order": "block",
        "resize_fn": as_it_is,
        "min_pixels": 65536,
        "max_pixels": 2**24,
        "max_patches": 4096,
        "max_patches_per_side": 512,
    }
    return SimpleNamespace(**{**settings, **changes})


def tokens(**changes: str) -> SimpleNamespace:
    """A tokenizer's configuration with a name for each special token."""
    names = {f"{name}_token": name for name in PictureTokenizer.TOKEN_FIELDS}
    return SimpleNamespace(**{**names, **changes})


@pytest.fixture
def collator(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan's collator, which needs torchvision, gives back what it got."""
    module: Any = ModuleType("torchtitan.hf_datasets.multimodal.mm_collator")
    module.MultiModalCollator = lambda **settings: lambda samples: (settings, samples)
    monkeypatch.setitem(sys.modules, "torchtitan.hf_datasets.multimodal", ModuleType("multimodal"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_picture_and_a_text(collator: None) -> None:
    """A picture's tokens between their marks, without labels, then text; one token more than is trained."""
    tokenizer = PictureTokenizer(PictureTokenizer.Config(vocabulary_size=1000, job=tokens()))
    loader = PictureLoader(PictureLoader.Config(job=job()), tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=2)
    settings, samples = next(iter(loader))
    assert settings == {
        "batch_size": 2,
        "seq_len": SEQ_LEN,
        "tokenizer": tokenizer,
        "max_images_per_batch": 128,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "build_mrope_positions": True,
        "patch_order": "block",
    }
    assert len(samples) == 2
    begin = [tokenizer.vision_start_id, *[tokenizer.image_id] * TOKENS, tokenizer.vision_end_id]
    for sample in samples:
        words, labels = sample["input_ids"], sample["labels"]
        assert words[: len(begin)].tolist() == begin
        assert len(words) == SEQ_LEN + 1
        assert words[len(begin) :].max() < tokenizer.texts == 995
        assert labels[: len(begin)].unique().tolist() == [-100]
        assert torch.equal(labels[len(begin) :], words[len(begin) :])
        assert torch.equal(sample["positions"], torch.arange(SEQ_LEN + 1))
        assert [tuple(picture.shape) for picture in sample["pixel_values"]] == [(1, 480, 640, 3)]


def test_special_tokens() -> None:
    """One for each name: where pictures and videos share theirs, they share the token."""
    apart = PictureTokenizer(PictureTokenizer.Config(vocabulary_size=1000, job=tokens()))
    assert (apart.image_id, apart.video_id, apart.vision_start_id, apart.pad_id) == (995, 996, 997, 999)
    shared = PictureTokenizer(PictureTokenizer.Config(vocabulary_size=1000, job=tokens(video_token="image")))
    assert (shared.image_id, shared.video_id, shared.vision_start_id, shared.pad_id) == (995, 995, 996, 998)


def test_size() -> None:
    """Pictures are halved until their tokens leave room for a text, padding counts, and one line says that none does."""
    assert picture_size(job(), TOKENS + 3) == (480, 640)
    assert picture_size(job(), TOKENS + 2) == (224, 320)
    padded = job(resize_fn=lambda height, width, **_: (height, width, 32, 0))
    assert picture_size(padded, TOKENS + 3) == (272, 320)
    assert "640 x 480 pixels" in picture_note(job(), SEQ_LEN)
    with pytest.raises(UsageError, match=r"training\.seq_len is 50: no picture"):
        picture_size(job(resize_fn=lambda *_, **__: (256, 256, 0, 0)), 50)


def test_which_loaders() -> None:
    """TorchTitan's multimodal loader, and configurations that are derived from it."""
    multimodal = type("Config", (), {"__module__": "torchtitan.hf_datasets.multimodal.mm_datasets"})
    assert has_pictures(multimodal())
    assert has_pictures(type("Mine", (multimodal,), {"__module__": "jobs"})())
    assert not has_pictures(object())


@pytest.mark.skipif(not NEEDED, reason="needs torchvision, einops and flash-linear-attention")
def test_vision_and_text(capture: Callable[..., Trace]) -> None:
    """Qwen 3.5 embeds a picture's patches in the first step, and its text model runs on all tokens; the report says what of
    the data is assumed.
    """
    trace = capture(
        "--parallelism.spmd_backend", "partial_dtensor", job="qwen3_5:qwen35_debugmodel", checkpointing="none"
    )
    assert any("one picture" in note for note in trace.info.notes)
    patches = 4 * TOKENS
    signatures = [trace.signatures[event.signature] for event in trace.events if isinstance(event, Op)]
    assert any(tensor.shape[:2] == (1, patches) for signature in signatures for tensor in signature.inputs)
    assert trace.info.tokens_per_step == SEQ_LEN
