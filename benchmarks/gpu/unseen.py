"""Training steps that no model of this project was fitted to: what `benchmarks.gpu.steps` trains for real and predicts.

They were written down before any of them was measured, to differ from each other and from TorchTitan's models: encoders,
mixtures of experts, state-space models, convolutions in both memory formats, recurrent nets, recommenders, graphs, diffusion,
losses with a scaler, compiled models. Every job is a function of a device that returns the model and the function that runs
one step. A job whose library is missing is left out and said.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu import unseen_models as own
from benchmarks.gpu.unseen_steps import (
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
    pictures_with_masks,
    segmented,
    sgd,
    speech,
    timm_model,
    tokens,
    torchvision_model,
    transcribed,
)

_BF16, _FP16 = torch.bfloat16, torch.float16
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_QWEN_SMALL = _QWEN | {"hidden_size": 1024, "intermediate_size": 3072}
_GEMMA3 = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
}
_BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_WHISPER = {
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
_MIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
_MAMBA = {"attn_implementation": "eager", "hidden_size": 1024, "num_hidden_layers": 12, "vocab_size": 50280}


_qwen = hf("Qwen3ForCausalLM", "Qwen3Config", **_QWEN)
_small = hf("Qwen3ForCausalLM", "Qwen3Config", **_QWEN_SMALL)
_bert = hf("BertForMaskedLM", "BertConfig", **_BERT)
_words = tokens(4, 2048, 151936)


def _language_jobs() -> Iterator[Job]:
    gemma = hf("Gemma3ForCausalLM", "Gemma3TextConfig", **_GEMMA3)
    whisper = hf("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER)
    mixtral = hf("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL)
    mamba = hf("MambaForCausalLM", "MambaConfig", **_MAMBA)
    yield job("qwen3 1.7b bf16 4x2048, fused AdamW", _qwen, _words, labelled, dtype=_BF16, optimizer=fused)
    yield job(
        "qwen3 1.7b bf16 8x2048, checkpointed, clipped",
        checkpointed(_qwen),
        tokens(8, 2048, 151936),
        labelled,
        dtype=_BF16,
        clip=1.0,
    )
    yield job(
        "qwen3 0.6b bf16 1x16384, checkpointed",
        checkpointed(_small),
        tokens(1, 16384, 151936),
        labelled,
        dtype=_BF16,
        optimizer=fused,
    )
    yield job("gemma3 1b autocast bf16 2x2048", gemma, tokens(2, 2048, 262144), labelled, autocast=_BF16)
    yield job(
        "bert large autocast bf16 32x512", _bert, tokens(32, 512, 30522), labelled, autocast=_BF16, optimizer=fused
    )
    yield job(
        "whisper small autocast fp16 with scaler 16x448",
        whisper,
        speech(16, 448),
        transcribed,
        autocast=_FP16,
        scaler=True,
        clip=1.0,
    )
    yield job("mixtral 12 layers bf16 4x1024", mixtral, tokens(4, 1024, 32000), labelled, dtype=_BF16, optimizer=fused)
    yield job("mamba 12 layers bf16 4x128", mamba, tokens(4, 128, 50280), labelled, dtype=_BF16)


def _vision_jobs() -> Iterator[Job]:
    yield job(
        "swin base autocast bf16 64x224",
        timm_model("swin_base_patch4_window7_224"),
        images(64, 224),
        classified,
        autocast=_BF16,
    )
    yield job(
        "convnext base channels-last autocast fp16 with scaler 64x224",
        timm_model("convnext_base"),
        images(64, 224, channels_last=True),
        classified,
        autocast=_FP16,
        scaler=True,
        channels_last=True,
    )
    yield job(
        "efficientnet b3 autocast bf16 64x300",
        timm_model("efficientnet_b3"),
        images(64, 300),
        classified,
        autocast=_BF16,
        optimizer=sgd,
    )
    yield job(
        "resnet50 channels-last autocast fp16 with scaler 256x224",
        torchvision_model("resnet50"),
        images(256, 224, channels_last=True),
        classified,
        autocast=_FP16,
        scaler=True,
        channels_last=True,
        optimizer=sgd,
    )
    yield job("resnet50 fp32 64x224", torchvision_model("resnet50"), images(64, 224), classified, optimizer=sgd)
    yield job("densenet121 fp32 64x224", torchvision_model("densenet121"), images(64, 224), classified, optimizer=sgd)
    yield job(
        "deeplabv3 resnet50 autocast bf16 8x512",
        torchvision_model("deeplabv3_resnet50", weights_backbone=None),
        pictures_with_masks(8, 512),
        segmented,
        autocast=_BF16,
        optimizer=sgd,
    )


def _compiled_jobs() -> Iterator[Job]:
    yield job(
        "qwen3 1.7b bf16 4x2048, compiled",
        _qwen,
        _words,
        labelled,
        dtype=_BF16,
        optimizer=fused,
        compile_mode="default",
    )
    yield job(
        "bert large autocast bf16 32x512, compiled",
        _bert,
        tokens(32, 512, 30522),
        labelled,
        autocast=_BF16,
        optimizer=fused,
        compile_mode="default",
    )
    yield job(
        "vit large bf16 64x224, compiled",
        timm_model("vit_large_patch16_224"),
        images(64, 224),
        lambda model, pixels, labels: classified(model, pixels.to(_BF16), labels),
        dtype=_BF16,
        optimizer=fused,
        compile_mode="default",
    )
    yield job(
        "resnet50 channels-last autocast bf16 256x224, compiled",
        torchvision_model("resnet50"),
        images(256, 224, channels_last=True),
        classified,
        autocast=_BF16,
        channels_last=True,
        optimizer=sgd,
        compile_mode="default",
    )


# ---- models written out -------------------------------------------------------------------------------------------------


def _own_jobs() -> Iterator[Job]:
    gpt = lambda: own.GPT(vocabulary=50304, layers=12, width=768, heads=12, length=1024)  # noqa: E731
    words = tokens(16, 1024, 50304)
    yield job("gpt2 124m autocast bf16 16x1024", gpt, words, next_token, autocast=_BF16, optimizer=fused, clip=1.0)
    for mode in ("default", "reduce-overhead"):
        yield job(
            f"gpt2 124m autocast bf16 16x1024, compiled{', reduce-overhead' if mode != 'default' else ''}",
            gpt,
            words,
            next_token,
            autocast=_BF16,
            optimizer=fused,
            clip=1.0,
            compile_mode=mode,
        )
    yield job(
        "dit xl bf16 32x256",
        lambda: own.DiT(layers=28, width=1152, heads=16),
        own.latents(32, 4, 32),
        own.denoised,
        dtype=_BF16,
    )
    yield job(
        "dit xl bf16 32x256, compiled",
        lambda: own.DiT(layers=28, width=1152, heads=16),
        own.latents(32, 4, 32),
        own.denoised,
        dtype=_BF16,
        compile_mode="default",
    )
    yield job(
        "u-net with attention autocast fp16 with scaler 8x64",
        lambda: own.UNet(width=320),
        own.latents(8, 4, 64),
        own.denoised,
        autocast=_FP16,
        scaler=True,
    )
    yield job(
        "3d u-net autocast bf16 2x96",
        lambda: own.UNet3d(width=32),
        own.volumes(2, 96),
        own.voxels,
        autocast=_BF16,
        optimizer=sgd,
    )


def _other_jobs() -> Iterator[Job]:
    yield job(
        "lstm language model fp32 64x128",
        lambda: own.LSTM(vocabulary=33278, width=1024, layers=2),
        tokens(64, 128, 33278),
        next_token,
        clip=0.25,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    yield job(
        "recommender, 26 tables, fp32 8192",
        lambda: own.Recommender(tables=26, rows=200_000, width=64),
        own.clicks(8192, 26, 200_000),
        own.clicked,
        optimizer=sgd,
    )
    yield job(
        "graph convolutions fp32 200k nodes",
        lambda: own.GraphNet(width=256, layers=4),
        own.graph(200_000, 2_000_000, 256),
        own.noded,
        optimizer=adamw,
    )
    yield job(
        "transformer encoder-decoder fp32 with TF32 32x256",
        lambda: own.Translator(vocabulary=32000, width=1024, heads=16, layers=6),
        tokens(32, 256, 32000),
        own.translated,
        tf32=True,
    )
    yield job(
        "wave encoder with ctc autocast bf16 8x160000",
        lambda: own.WaveEncoder(width=768, layers=12),
        own.waves(8, 160_000, 60),
        own.aligned,
        autocast=_BF16,
    )


JOBS = (*_own_jobs(), *_other_jobs(), *_language_jobs(), *_vision_jobs(), *_compiled_jobs())
