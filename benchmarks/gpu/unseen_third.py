"""A third list of training steps that nothing was fitted to, written down after those of `unseen` and `unseen_later` had
become known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.unseen_steps import (
    Batch,
    Job,
    adamw,
    checkpointed,
    classified,
    fused,
    hf,
    images,
    job,
    labelled,
    next_token,
    sgd,
    timm_model,
    tokens,
)

_BF16, _FP16 = torch.bfloat16, torch.float16
_PHI = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
}
_OPT = {"hidden_size": 2048, "num_hidden_layers": 12, "ffn_dim": 8192, "num_attention_heads": 32}
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_implementation": "eager",
}


class _Lstm(nn.Module):
    """A language model of LSTMs with tied embeddings."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return F.linear(self.lstm(self.embedding(ids))[0], self.embedding.weight)


class _WaveNet(nn.Module):
    """Dilated one-dimensional convolutions with gates."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 3, padding=2 ** (i % 10), dilation=2 ** (i % 10)) for i in range(layers)
        )
        self.mixing = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers))
        self.last = nn.Conv1d(channels, 256, 1)

    def forward(self, waves: Tensor) -> Tensor:
        """Logits of 256 classes."""
        x = self.first(waves)
        for dilated, mixing in zip(self.dilated, self.mixing, strict=True):
            value, gate = dilated(x).chunk(2, dim=1)
            x = x + mixing(torch.tanh(value) * torch.sigmoid(gate))
        logits: Tensor = self.last(F.relu(x))
        return logits


def _sound(batch: int, length: int) -> Batch:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        return torch.randn(batch, 1, length, device=device), torch.randint(0, 256, (batch, length), device=device)

    return make


def _pairs(batch: int) -> Batch:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        ids = torch.randint(0, 49000, (batch, 77), device=device)
        return ids, torch.randn(batch, 3, 224, 224, device=device)

    return make


def _contrasted(model: nn.Module, ids: Tensor, pixels: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, pixel_values=pixels, return_loss=True).loss
    return loss


def _restored(model: nn.Module, pixels: Tensor, _: Tensor) -> Tensor:
    loss: Tensor = model(pixel_values=pixels).loss
    return loss


def _language() -> Iterator[Job]:
    phi = hf("Phi3ForCausalLM", "Phi3Config", **_PHI)
    yield job("phi3 12 layers bf16 2x4096", phi, tokens(2, 4096, 32064), labelled, dtype=_BF16, optimizer=fused)
    yield job(
        "phi3 12 layers bf16 4x4096, checkpointed",
        checkpointed(phi),
        tokens(4, 4096, 32064),
        labelled,
        dtype=_BF16,
        optimizer=fused,
        clip=1.0,
    )
    yield job(
        "opt 12 layers bf16 8x1024, dropout",
        hf("OPTForCausalLM", "OPTConfig", **_OPT),
        tokens(8, 1024, 50272),
        labelled,
        dtype=_BF16,
    )
    yield job(
        "bloom 560m autocast bf16 4x2048",
        hf("BloomForCausalLM", "BloomConfig", hidden_size=1024, n_layer=24, n_head=16),
        tokens(4, 2048, 250880),
        labelled,
        autocast=_BF16,
        optimizer=fused,
    )
    yield job(
        "gemma2 8 layers bf16 2x2048",
        hf("Gemma2ForCausalLM", "Gemma2Config", **_GEMMA2),
        tokens(2, 2048, 256000),
        labelled,
        dtype=_BF16,
        optimizer=fused,
    )
    yield job(
        "roberta base autocast fp16 with scaler 32x512",
        hf("RobertaForMaskedLM", "RobertaConfig", max_position_embeddings=514),
        tokens(32, 512, 50265),
        labelled,
        autocast=_FP16,
        scaler=True,
    )
    yield job("lstm 2x1024 fp32 64x256", lambda: _Lstm(33000, 1024, 2), tokens(64, 256, 33000), next_token)
    yield job(
        "phi3 12 layers bf16 2x4096, compiled",
        phi,
        tokens(2, 4096, 32064),
        labelled,
        dtype=_BF16,
        optimizer=fused,
        compile_mode="default",
    )


def _vision_and_sound() -> Iterator[Job]:
    yield job(
        "clip vit-b/32 autocast bf16 256", hf("CLIPModel", "CLIPConfig"), _pairs(256), _contrasted, autocast=_BF16
    )
    yield job(
        "vit mae base bf16 128x224",
        hf("ViTMAEForPreTraining", "ViTMAEConfig"),
        lambda device: tuple(t.to(_BF16) for t in images(128, 224)(device)),
        _restored,
        dtype=_BF16,
        optimizer=fused,
    )
    yield job(
        "eva02 small autocast bf16 64x336",
        timm_model("eva02_small_patch14_336"),
        images(64, 336),
        classified,
        autocast=_BF16,
    )
    yield job(
        "regnety 032 channels-last autocast bf16 128x224",
        timm_model("regnety_032"),
        images(128, 224, channels_last=True),
        classified,
        autocast=_BF16,
        channels_last=True,
        optimizer=sgd,
    )
    yield job(
        "efficientnetv2 s autocast fp16 with scaler 64x300",
        timm_model("tf_efficientnetv2_s"),
        images(64, 300),
        classified,
        autocast=_FP16,
        scaler=True,
        optimizer=sgd,
    )
    yield job("coatnet 0 fp32 with TF32 64x224", timm_model("coatnet_0_224"), images(64, 224), classified, tf32=True)
    yield job(
        "wavenet 30 layers autocast bf16 8x16000",
        lambda: _WaveNet(128, 30),
        _sound(8, 16000),
        lambda model, waves, labels: F.cross_entropy(model(waves), labels),
        autocast=_BF16,
        optimizer=adamw,
    )


JOBS: tuple[Job, ...] = (*_language(), *_vision_and_sound())
