"""More training steps that nothing was fitted to, written down after the jobs of `benchmarks.gpu.unseen` had become known.

Rules were fitted to those; these judge the rules.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.unseen_models import waves
from benchmarks.gpu.unseen_steps import (
    Batch,
    Job,
    classified,
    fused,
    hf,
    images,
    job,
    labelled,
    loss_of,
    pictures_with_masks,
    sgd,
    timm_model,
    tokens,
    torchvision_model,
)

_BF16, _FP16 = torch.bfloat16, torch.float16
_T5 = {
    "d_model": 1024,
    "d_ff": 2816,
    "num_layers": 12,
    "num_heads": 16,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
_NEOX = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_MOE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 50304,
}
_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


def _distilled(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels."""
    return F.cross_entropy(model(pixels), labels, label_smoothing=0.1)


def _language_and_sound() -> Iterator[Job]:
    yield job(
        "t5 large's width bf16 16x512",
        hf("T5ForConditionalGeneration", "T5Config", **_T5),
        tokens(16, 512, 32128),
        labelled,
        dtype=_BF16,
        optimizer=fused,
    )
    yield job(
        "gpt-neox 410m autocast fp16 with scaler 4x2048",
        hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_NEOX),
        tokens(4, 2048, 50432),
        labelled,
        autocast=_FP16,
        scaler=True,
        clip=1.0,
    )
    yield job(
        "qwen3 moe 8 layers bf16 4x2048",
        hf("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_MOE),
        tokens(4, 2048, 50304),
        labelled,
        dtype=_BF16,
        optimizer=fused,
    )
    yield job(
        "wav2vec2 base autocast bf16 8x160000",
        hf("Wav2Vec2ForCTC", "Wav2Vec2Config", mask_time_prob=0.0, layerdrop=0.0, ctc_zero_infinity=True),
        waves(8, 160_000, 60),
        loss_of("input_values"),
        autocast=_BF16,
    )


def _vision() -> Iterator[Job]:
    yield job(
        "segformer autocast bf16 8x512",
        hf("SegformerForSemanticSegmentation", "SegformerConfig", num_labels=150),
        pictures_with_masks(8, 512, classes=150),
        loss_of("pixel_values"),
        autocast=_BF16,
    )
    yield job(
        "vit base fp32 with TF32 64x224", timm_model("vit_base_patch16_224"), images(64, 224), _distilled, tf32=True
    )
    yield job(
        "resnext50 channels-last autocast bf16 128x224",
        torchvision_model("resnext50_32x4d"),
        images(128, 224, channels_last=True),
        classified,
        autocast=_BF16,
        channels_last=True,
        optimizer=sgd,
    )
    yield job(
        "mobilenet v3 channels-last autocast fp16 with scaler 256x224",
        timm_model("mobilenetv3_large_100"),
        images(256, 224, channels_last=True),
        _distilled,
        autocast=_FP16,
        scaler=True,
        channels_last=True,
        optimizer=sgd,
    )
    yield job(
        "maxvit tiny autocast bf16 64x224",
        timm_model("maxvit_tiny_tf_224"),
        images(64, 224),
        classified,
        autocast=_BF16,
    )
    yield job(
        "mlp-mixer b16 bf16 128x224", timm_model("mixer_b16_224"), _bf16_images(128, 224), classified, dtype=_BF16
    )


def _bf16_images(batch: int, size: int) -> Batch:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        pixels, labels = images(batch, size)(device)
        return pixels.to(_BF16), labels

    return make


def _compiled() -> Iterator[Job]:
    yield job(
        "llama 1b bf16 4x4096, compiled",
        hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        tokens(4, 4096, 128256),
        labelled,
        dtype=_BF16,
        optimizer=fused,
        compile_mode="default",
    )
    yield job(
        "convnext base channels-last autocast bf16 64x224, compiled",
        timm_model("convnext_base"),
        images(64, 224, channels_last=True),
        classified,
        autocast=_BF16,
        channels_last=True,
        compile_mode="default",
    )
    yield job(
        "gpt-neox 410m autocast bf16 4x2048, compiled",
        hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_NEOX),
        tokens(4, 2048, 50432),
        labelled,
        autocast=_BF16,
        optimizer=fused,
        compile_mode="default",
    )


JOBS = (*_language_and_sound(), *_vision(), *_compiled())
