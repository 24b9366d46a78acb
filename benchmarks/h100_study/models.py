"""The study's seven model families, built from written-out configurations (nothing is downloaded).

A family knows how to build its model under the current default dtype and device, how to draw a random batch, how to get
from a batch to the loss, which classes the study checkpoints, and which optimizer it trains with. The language models
are those of ``transformers==4.46.2``; their configurations are the ones of the model cards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosac.errors import UsageError
from benchmarks.h100_study import vision
from benchmarks.h100_study.configs import StudyConfig

Batch = tuple[Tensor, ...]

NUM_CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    `build` makes the model, `batch` draws the random batch of a configuration on a device and `loss` runs the forward
    pass. `checkpointed` names the classes that activation checkpointing is applied to. `optimizer` makes Adam.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[StudyConfig, torch.device], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    checkpointed: frozenset[str]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-4, eps=1e-6)


def _timm_adam(model: nn.Module) -> torch.optim.Optimizer:
    """What ``timm.optim.create_optimizer_v2(model, opt="adam")`` makes: torch's Adam at its defaults, one group."""
    return torch.optim.Adam(model.parameters(), weight_decay=0.0)


# ---- language models --------------------------------------------------------------------------------------------------


def token_batch(config: StudyConfig, device: torch.device, *, vocab_size: int) -> Batch:
    shape = (config.batch_size, config.seq_len)
    return torch.randint(0, vocab_size, shape, device=device), torch.randint(0, vocab_size, shape, device=device)


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return model(input_ids=ids, labels=labels).loss


def _language(make: Callable[[], nn.Module], vocab_size: int, *checkpointed: str) -> Family:
    return Family(
        build=make,
        batch=functools.partial(token_batch, vocab_size=vocab_size),
        loss=_language_loss,
        checkpointed=frozenset(checkpointed),
        optimizer=_adam,
    )


def _with_sdpa(model_class: Any, config: Any) -> nn.Module:
    """Build a transformers model with `scaled_dot_product_attention` where the class has it."""
    return model_class._from_config(config, attn_implementation="sdpa" if model_class._supports_sdpa else "eager")


def t5_large() -> nn.Module:
    """``t5-large``."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        dropout_rate=0.1,
        feed_forward_proj="relu",
        decoder_start_token_id=0,
    )
    return _with_sdpa(T5ForConditionalGeneration, config)


def gpt2_large() -> nn.Module:
    """``gpt2-large``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _with_sdpa(GPT2LMHeadModel, GPT2Config(vocab_size=50257, n_embd=1280, n_layer=36, n_head=20))


def llama_3_2_1b() -> nn.Module:
    """``meta-llama/Llama-3.2-1B-Instruct``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128009,
    )
    return _with_sdpa(LlamaForCausalLM, config)


def gemma_2b() -> nn.Module:
    """``google/gemma-2b``."""
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=256000,
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=8192,
    )
    return _with_sdpa(GemmaForCausalLM, config)


# ---- image and text ---------------------------------------------------------------------------------------------------


class ContrastiveClip(nn.Module):
    """CLIP and a symmetric contrastive loss with a learned temperature over the normalised embeddings."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        """The loss of a batch of matching captions and images."""
        outputs = self.clip(input_ids=ids, pixel_values=pixels)
        logits = outputs.image_embeds @ outputs.text_embeds.t() * self.logit_scale.exp()
        targets = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2


def clip_vit_large_patch14_336() -> nn.Module:
    """``openai/clip-vit-large-patch14-336``."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        projection_dim=768,
        text_config={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "projection_dim": 768,
        },
        vision_config={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
        },
    )
    return _with_sdpa(CLIPModel, config)


def _image_text_batch(config: StudyConfig, device: torch.device) -> Batch:
    ids = torch.randint(0, 49408, (config.batch_size, config.seq_len), device=device)
    pixels = torch.randn(config.batch_size, 3, config.image_size, config.image_size, device=device)
    return ids, pixels


def _image_batch(config: StudyConfig, device: torch.device) -> Batch:
    pixels = torch.randn(config.batch_size, 3, config.image_size, config.image_size, device=device)
    return pixels, torch.randint(0, NUM_CLASSES, (config.batch_size,), device=device)


def _classifier_loss(model: nn.Module, batch: Batch) -> Tensor:
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels)


def _classifier(make: Callable[[], nn.Module], *checkpointed: str) -> Family:
    return Family(
        build=make,
        batch=_image_batch,
        loss=_classifier_loss,
        checkpointed=frozenset(checkpointed),
        optimizer=_timm_adam,
    )


FAMILIES: dict[str, Family] = {
    "gemma_2b": _language(gemma_2b, 256000, "GemmaMLP", "GemmaRMSNorm"),
    "hf_GPT2": _language(gpt2_large, 50257, "GPT2Block"),
    "hf_T5": _language(t5_large, 32128, "T5LayerFF", "T5LayerNorm"),
    "hf_clip": Family(
        build=lambda: ContrastiveClip(clip_vit_large_patch14_336()),
        batch=_image_text_batch,
        loss=lambda model, batch: model(*batch),
        checkpointed=frozenset({"CLIPEncoderLayer"}),
        optimizer=_adam,
    ),
    "llama_v3_1b": _language(llama_3_2_1b, 128256, "LlamaMLP", "LlamaRMSNorm"),
    "timm_convnext_v2": _classifier(vision.convnextv2_huge, "GlobalResponseNormMlp"),
    "timm_vit": _classifier(vision.vit_huge_patch14_clip_224, "Block"),
}


def family(name: str) -> Family:
    """The family of this name in the study's files. UsageError lists the known ones."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise UsageError(f"unknown model {name!r}; the study has {', '.join(sorted(FAMILIES))}") from None
