"""Training steps that no model of this project was fitted to: what `benchmarks.gpu.steps` trains for real and predicts.

They were written down before any of them was measured, to differ from each other and from TorchTitan's models: encoders,
mixtures of experts, state-space models, convolutions in both memory formats, recurrent nets, recommenders, graphs, diffusion,
losses with a scaler, compiled models. Every job is a function of a device that returns the model and the function that runs
one step. Models of libraries come from `transformers`, `timm` and `torchvision` and are built from their configurations;
nothing is downloaded. A job whose library is missing is left out and said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import unseen_models as own

Step = Callable[[], Tensor]
MakeStep = Callable[[torch.device], tuple[nn.Module, Step]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. `compiled` says that it uses torch.compile, which takes a minute to begin."""

    name: str
    make_step: MakeStep
    compiled: bool = False


@contextmanager
def _built(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _trained(
    build: Callable[[], nn.Module],
    batch: Callable[[torch.device], tuple[Tensor, ...]],
    loss: Callable[..., Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    scaler: bool = False,
    clip: float | None = None,
    channels_last: bool = False,
    compile_mode: str | None = None,
) -> MakeStep:
    """A step: forward and loss (under autocast), backward (scaled), clipping, optimizer, gradients set to None."""

    def make_step(device: torch.device) -> tuple[nn.Module, Step]:
        with _built(dtype, device):
            model = build()
        model.train()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        called: Any = model
        if compile_mode is not None:
            called = torch.compile(model, mode=None if compile_mode == "default" else compile_mode)
        chosen = (optimizer or _adamw)(model.parameters())
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


def _adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _fused(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


# ---- batches and losses -----------------------------------------------------------------------------------------------


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """Random ids and labels."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        ids = torch.randint(0, vocabulary, (batch, length), device=device)
        return ids, torch.randint(0, vocabulary, (batch, length), device=device)

    return make


def images(batch: int, size: int, *, channels_last: bool = False) -> Callable[[torch.device], tuple[Tensor, ...]]:
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


def labelled(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The loss of a transformers model."""
    loss: Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def next_token(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits in their own type."""
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


# ---- models of libraries ------------------------------------------------------------------------------------------------


def _hf(class_name: str, config_name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        attention = sizes.get("attn_implementation", "sdpa")
        config = getattr(transformers, config_name)(**{k: v for k, v in sizes.items() if k != "attn_implementation"})
        model: nn.Module = getattr(transformers, class_name)._from_config(config, attn_implementation=attention)
        return model

    return build


def _checkpointed(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        model = build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        checkpointed: nn.Module = model
        return checkpointed

    return built


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, **options)
        return model

    return build


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        return model

    return build


def _segmentation(batch: int, size: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        pixels = torch.randn(batch, 3, size, size, device=device)
        return pixels, torch.randint(0, 21, (batch, size, size), device=device)

    return make


def _segmented(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixels)["out"], labels)


def _speech(batch: int, length: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        heard = torch.randn(batch, 80, 3000, device=device)
        return heard, torch.randint(0, 51865, (batch, length), device=device)

    return make


def _transcribed(model: nn.Module, heard: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_features=heard, labels=labels).loss
    return loss


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


_qwen = _hf("Qwen3ForCausalLM", "Qwen3Config", **_QWEN)
_small = _hf("Qwen3ForCausalLM", "Qwen3Config", **_QWEN_SMALL)
_bert = _hf("BertForMaskedLM", "BertConfig", **_BERT)
_words = tokens(4, 2048, 151936)


def _language_jobs() -> Iterator[Job]:
    gemma = _hf("Gemma3ForCausalLM", "Gemma3TextConfig", **_GEMMA3)
    whisper = _hf("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER)
    mixtral = _hf("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL)
    mamba = _hf("MambaForCausalLM", "MambaConfig", **_MAMBA)
    yield Job(
        name="qwen3 1.7b bf16 4x2048, fused AdamW",
        make_step=_trained(_qwen, _words, labelled, dtype=_BF16, optimizer=_fused),
    )
    yield Job(
        name="qwen3 1.7b bf16 8x2048, checkpointed, clipped",
        make_step=_trained(_checkpointed(_qwen), tokens(8, 2048, 151936), labelled, dtype=_BF16, clip=1.0),
    )
    yield Job(
        name="qwen3 0.6b bf16 1x16384, checkpointed",
        make_step=_trained(_checkpointed(_small), tokens(1, 16384, 151936), labelled, dtype=_BF16, optimizer=_fused),
    )
    yield Job(
        name="gemma3 1b autocast bf16 2x2048",
        make_step=_trained(gemma, tokens(2, 2048, 262144), labelled, autocast=_BF16),
    )
    yield Job(
        name="bert large autocast bf16 32x512",
        make_step=_trained(_bert, tokens(32, 512, 30522), labelled, autocast=_BF16, optimizer=_fused),
    )
    yield Job(
        name="whisper small autocast fp16 with scaler 16x448",
        make_step=_trained(whisper, _speech(16, 448), _transcribed, autocast=_FP16, scaler=True, clip=1.0),
    )
    yield Job(
        name="mixtral 12 layers bf16 4x1024",
        make_step=_trained(mixtral, tokens(4, 1024, 32000), labelled, dtype=_BF16, optimizer=_fused),
    )
    yield Job(
        name="mamba 12 layers bf16 4x128", make_step=_trained(mamba, tokens(4, 128, 50280), labelled, dtype=_BF16)
    )


def _vision_jobs() -> Iterator[Job]:
    yield Job(
        name="swin base autocast bf16 64x224",
        make_step=_trained(_timm("swin_base_patch4_window7_224"), images(64, 224), classified, autocast=_BF16),
    )
    yield Job(
        name="convnext base channels-last autocast fp16 with scaler 64x224",
        make_step=_trained(
            _timm("convnext_base"),
            images(64, 224, channels_last=True),
            classified,
            autocast=_FP16,
            scaler=True,
            channels_last=True,
        ),
    )
    yield Job(
        name="efficientnet b3 autocast bf16 64x300",
        make_step=_trained(_timm("efficientnet_b3"), images(64, 300), classified, autocast=_BF16, optimizer=_sgd),
    )
    yield Job(
        name="resnet50 channels-last autocast fp16 with scaler 256x224",
        make_step=_trained(
            _vision("resnet50"),
            images(256, 224, channels_last=True),
            classified,
            autocast=_FP16,
            scaler=True,
            channels_last=True,
            optimizer=_sgd,
        ),
    )
    yield Job(
        name="resnet50 fp32 64x224",
        make_step=_trained(_vision("resnet50"), images(64, 224), classified, optimizer=_sgd),
    )
    yield Job(
        name="densenet121 fp32 64x224",
        make_step=_trained(_vision("densenet121"), images(64, 224), classified, optimizer=_sgd),
    )
    yield Job(
        name="deeplabv3 resnet50 autocast bf16 8x512",
        make_step=_trained(
            _vision("deeplabv3_resnet50", weights_backbone=None),
            _segmentation(8, 512),
            _segmented,
            autocast=_BF16,
            optimizer=_sgd,
        ),
    )


def _compiled_jobs() -> Iterator[Job]:
    yield Job(
        name="qwen3 1.7b bf16 4x2048, compiled",
        make_step=_trained(_qwen, _words, labelled, dtype=_BF16, optimizer=_fused, compile_mode="default"),
        compiled=True,
    )
    yield Job(
        name="bert large autocast bf16 32x512, compiled",
        make_step=_trained(
            _bert, tokens(32, 512, 30522), labelled, autocast=_BF16, optimizer=_fused, compile_mode="default"
        ),
        compiled=True,
    )
    yield Job(
        name="vit large bf16 64x224, compiled",
        make_step=_trained(
            _timm("vit_large_patch16_224"),
            images(64, 224),
            lambda model, pixels, labels: classified(model, pixels.to(_BF16), labels),
            dtype=_BF16,
            optimizer=_fused,
            compile_mode="default",
        ),
        compiled=True,
    )
    yield Job(
        name="resnet50 channels-last autocast bf16 256x224, compiled",
        make_step=_trained(
            _vision("resnet50"),
            images(256, 224, channels_last=True),
            classified,
            autocast=_BF16,
            channels_last=True,
            optimizer=_sgd,
            compile_mode="default",
        ),
        compiled=True,
    )


# ---- models written out -------------------------------------------------------------------------------------------------


def _own_jobs() -> Iterator[Job]:
    gpt = lambda: own.GPT(vocabulary=50304, layers=12, width=768, heads=12, length=1024)  # noqa: E731
    words = tokens(16, 1024, 50304)
    yield Job(
        name="gpt2 124m autocast bf16 16x1024",
        make_step=_trained(gpt, words, next_token, autocast=_BF16, optimizer=_fused, clip=1.0),
    )
    for mode in ("default", "reduce-overhead"):
        yield Job(
            name=f"gpt2 124m autocast bf16 16x1024, compiled{', reduce-overhead' if mode != 'default' else ''}",
            make_step=_trained(gpt, words, next_token, autocast=_BF16, optimizer=_fused, clip=1.0, compile_mode=mode),
            compiled=True,
        )
    yield Job(
        name="dit xl bf16 32x256",
        make_step=_trained(
            lambda: own.DiT(layers=28, width=1152, heads=16), own.latents(32, 4, 32), own.denoised, dtype=_BF16
        ),
    )
    yield Job(
        name="dit xl bf16 32x256, compiled",
        make_step=_trained(
            lambda: own.DiT(layers=28, width=1152, heads=16),
            own.latents(32, 4, 32),
            own.denoised,
            dtype=_BF16,
            compile_mode="default",
        ),
        compiled=True,
    )
    yield Job(
        name="u-net with attention autocast fp16 with scaler 8x64",
        make_step=_trained(
            lambda: own.UNet(width=320), own.latents(8, 4, 64), own.denoised, autocast=_FP16, scaler=True
        ),
    )
    yield Job(
        name="3d u-net autocast bf16 2x96",
        make_step=_trained(
            lambda: own.UNet3d(width=32), own.volumes(2, 96), own.voxels, autocast=_BF16, optimizer=_sgd
        ),
    )


def _other_jobs() -> Iterator[Job]:
    yield Job(
        name="lstm language model fp32 64x128",
        make_step=_trained(
            lambda: own.LSTM(vocabulary=33278, width=1024, layers=2),
            tokens(64, 128, 33278),
            next_token,
            clip=0.25,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        ),
    )
    yield Job(
        name="recommender, 26 tables, fp32 8192",
        make_step=_trained(
            lambda: own.Recommender(tables=26, rows=200_000, width=64),
            own.clicks(8192, 26, 200_000),
            own.clicked,
            optimizer=_sgd,
        ),
    )
    yield Job(
        name="graph convolutions fp32 200k nodes",
        make_step=_trained(
            lambda: own.GraphNet(width=256, layers=4), own.graph(200_000, 2_000_000, 256), own.noded, optimizer=_adamw
        ),
    )
    yield Job(
        name="transformer encoder-decoder fp32 with TF32 32x256",
        make_step=_with_tf32(
            _trained(
                lambda: own.Translator(vocabulary=32000, width=1024, heads=16, layers=6),
                tokens(32, 256, 32000),
                own.translated,
            )
        ),
    )
    yield Job(
        name="wave encoder with ctc autocast bf16 8x160000",
        make_step=_trained(
            lambda: own.WaveEncoder(width=768, layers=12), own.waves(8, 160_000, 60), own.aligned, autocast=_BF16
        ),
    )


def _with_tf32(make_step: MakeStep) -> MakeStep:
    def with_tf32(device: torch.device) -> tuple[nn.Module, Step]:
        torch.backends.cuda.matmul.allow_tf32 = True
        return make_step(device)

    return with_tf32


JOBS = (*_own_jobs(), *_other_jobs(), *_language_jobs(), *_vision_jobs(), *_compiled_jobs())
