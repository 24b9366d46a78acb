"""The scripts that `python -m benchmarks.scripts` runs, with their arguments and GPUs.

`EXAMPLES` are those of Phantora (NSDI 2026; github.com/QDelta/Phantora, its tables of presets and of validated configurations)
and of Maya (its evaluation), with what each reports of them. Figures of single runs are not published in text form.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script with its arguments, on how many GPUs, and the packages that it imports.

    `theirs`: what another system reports of it.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    gpu: str = "h100-sxm-80gb"
    nproc: int | None = None
    nodes: int = 1
    packages: tuple[str, ...] = ()
    theirs: str = ""


_DEEPSPEED, _DIFFUSERS = ("deepspeed",), ("diffusers", "accelerate")
CASES: tuple[Case, ...] = (
    Case(name="nanoGPT 124M", script="nanogpt.py", gpu="a100-sxm-80gb", arguments=("--no-compile",)),
    Case(name="nanoGPT 124M, compiled", script="nanogpt.py", gpu="a100-sxm-80gb"),
    Case(name="nanoGPT 124M, float16 and GradScaler", script="nanogpt.py", arguments=("--dtype", "float16")),
    Case(name="nanoGPT 124M, DDP", script="nanogpt.py", nproc=8, arguments=("--accumulation", "40", "--no-compile")),
    Case(name="8B transformer, FSDP2", script="fsdp2.py", nproc=8),
    Case(name="1.3B transformer, FSDP1", script="fsdp1.py", nproc=8),
    Case(
        name="Llama-3 8B, HF Trainer, FSDP2",
        script="hf_trainer.py",
        nproc=8,
        arguments=("--fsdp", "--checkpointing"),
        packages=("transformers", "accelerate"),
    ),
    Case(name="accelerate loop", script="accelerate_loop.py", nproc=8, packages=("accelerate",)),
    Case(
        name="Qwen2.5 7B, accelerate, FSDP2",
        script="accelerate_fsdp2.py",
        nproc=8,
        arguments=("--checkpointing",),
        packages=("transformers", "accelerate"),
    ),
    Case(name="Lightning", script="lightning_module.py", packages=("lightning",)),
    Case(name="ViT-H/14, Fabric, DDP", script="fabric.py", nproc=8, packages=("lightning",)),
    *(
        Case(
            name=f"1.3B, DeepSpeed ZeRO-{stage}",
            script="deepspeed_zero.py",
            nproc=8,
            arguments=("--stage", str(stage)),
            packages=_DEEPSPEED,
        )
        for stage in (1, 2, 3)
    ),
    Case(name="Stable Diffusion's UNet", script="diffusers_loop.py", packages=_DIFFUSERS),
    Case(name="DiT-XL/2", script="diffusers_loop.py", arguments=("--model", "dit"), packages=_DIFFUSERS),
    Case(name="Megatron-Core GPT, TP2", script="megatron_gpt.py", nproc=8, packages=("megatron",)),
    Case(
        name="Megatron-Core GPT, 8 experts, EP8",
        script="megatron_gpt.py",
        nproc=8,
        arguments=("--tensor", "1", "--experts", "8", "--expert-parallel", "8", "--layers", "12"),
        packages=("megatron",),
    ),
    Case(
        name="Megatron-Core GPT 70B, TP8 PP4",
        script="megatron_gpt.py",
        nproc=8,
        nodes=4,
        arguments=(
            *(
                "--tensor",
                "8",
                "--pipeline",
                "4",
                "--layers",
                "80",
                "--width",
                "8192",
                "--heads",
                "64",
                "--groups",
                "8",
            ),
            *("--inner", "28672", "--batch", "1", "--microbatches", "8", "--length", "4096", "--recompute"),
        ),
        packages=("megatron",),
    ),
)


def _megatron(
    name: str, arguments: str, nproc: int, nodes: int = 1, gpu: str = "h100-sxm-80gb", theirs: str = ""
) -> Case:
    return Case(
        name=f"{name}, Megatron-Core",
        script="megatron_gpt.py",
        arguments=tuple(arguments.split()),
        gpu=gpu,
        nproc=nproc,
        nodes=nodes,
        packages=("megatron",),
        theirs=theirs,
    )


def _deepspeed(
    name: str, arguments: str, nproc: int, nodes: int = 1, gpu: str = "h100-sxm-80gb", theirs: str = ""
) -> Case:
    return Case(
        name=f"{name}, DeepSpeed",
        script="deepspeed_models.py",
        arguments=tuple(arguments.split()),
        gpu=gpu,
        nproc=nproc,
        nodes=nodes,
        packages=("deepspeed", "transformers"),
        theirs=theirs,
    )


_7B = "--llama --layers 32 --width 4096 --heads 32 --inner 11008 --vocabulary 32000 --length 4096 --microbatches 1"
_13B = "--llama --layers 40 --width 5120 --heads 40 --inner 13824 --vocabulary 32000 --length 4096 --microbatches 1"
_70B = "--llama --layers 80 --width 8192 --heads 64 --groups 8 --inner 28672 --length 4096 --recompute --batch 1"
_8B = "--llama --layers 32 --width 4096 --heads 32 --groups 8 --inner 14336 --vocabulary 128256 --length 4096"
_MIXTRAL = (
    "--llama --layers 32 --width 4096 --heads 32 --groups 8 --inner 14336 --vocabulary 32000 --length 4096 --experts 8"
)
_GPT_2_7B = "--layers 32 --width 2560 --heads 32 --vocabulary 51200 --length 2048"
_GPT_18_4B = "--layers 40 --width 6144 --heads 48 --vocabulary 51200 --length 2048 --recompute"
_MEASURED = "Phantora: 3.7 % off on average, at most 5.3 %"
_RUNS = "Phantora: a preset, no figures"
_VISION = "Phantora: 6.6 % off on average, at most 8.1 %"
_MAYA = "Maya: most of 100 settings within 5 %"
_GPT2 = (  # one optimisation after the other, and the tokens a second that were published
    ("float32", "", "16,000"),
    ("TF32", "tf32", "49,000"),
    ("bfloat16", "tf32 bf16", "54,500"),
    ("compiled", "tf32 bf16 compile", "126,000"),
    ("FlashAttention", "tf32 bf16 compile flash", "170,000"),
    ("vocabulary of 50,304", "tf32 bf16 compile flash vocabulary", "175,000"),
)
GPT2: tuple[Case, ...] = tuple(
    Case(
        name=f"GPT-2 124M, {name}",
        script="gpt2.py",
        arguments=tuple(arguments.split()),
        gpu="a100-sxm-80gb",
        theirs=f"{16 * 1024e3 / float(tokens.replace(',', '')):,.1f} ms ({tokens} tokens/s)",
    )
    for name, arguments, tokens in _GPT2
)
"""Those of "Let's reproduce GPT-2 (124M)" (A. Karpathy, June 2024), as tianlong312.github.io/blog lists them."""
EXAMPLES: tuple[Case, ...] = (
    _megatron("Llama-2 7B, TP4", f"{_7B} --tensor 4 --batch 1", 4, gpu="h200-sxm-141gb", theirs=_MEASURED),
    _megatron("Llama-2 7B, TP4, batch 2", f"{_7B} --tensor 4 --batch 2", 4, gpu="h200-sxm-141gb", theirs=_MEASURED),
    _megatron("Llama-2 7B, DP2 TP2", f"{_7B} --tensor 2 --batch 1", 4, gpu="h200-sxm-141gb", theirs=_MEASURED),
    _megatron("Llama-2 13B, TP4", f"{_13B} --tensor 4 --batch 1", 8, theirs=_RUNS),
    _megatron("Llama-2 70B, TP8 PP4", f"{_70B} --vocabulary 32000 --tensor 8 --pipeline 4", 8, 4, theirs=_RUNS),
    _megatron("Llama-3 8B, TP4", f"{_8B} --tensor 4 --batch 1", 8, theirs=_RUNS),
    _megatron("Llama-3 70B, TP8 PP4", f"{_70B} --vocabulary 128256 --tensor 8 --pipeline 4", 8, 4, theirs=_RUNS),
    _megatron(
        "Mixtral 8x7B, EP8", f"{_MIXTRAL} --tensor 1 --expert-parallel 8 --recompute --batch 1", 8, 4, theirs=_RUNS
    ),
    _deepspeed("Llama-2 7B, ZeRO-3", "--model llama2-7b --stage 3 --length 4096", 8, theirs=_RUNS),
    _deepspeed("Llama-2 13B, ZeRO-3", "--model llama2-13b --stage 3 --length 4096 --checkpointing", 8, theirs=_RUNS),
    _deepspeed("Llama-3 8B, ZeRO-2", "--model llama3-8b --stage 2 --length 4096 --checkpointing", 8, theirs=_RUNS),
    _deepspeed("Llama-2 70B, ZeRO-3", "--model llama2-70b --stage 3 --checkpointing", 8, 4, theirs=_RUNS),
    _deepspeed("gpt-oss 20B, ZeRO-3", "--model gpt-oss-20b --stage 3", 8, theirs=_RUNS),
    *(
        _deepspeed(f"{name}, DP{2 * nodes}", arguments, 2, nodes, gpu="rtx-3090", theirs=_VISION)
        for name, arguments in (
            ("ResNet-50", "--model resnet-50 --batch 32"),
            ("Stable Diffusion's UNet", "--model unet --batch 1"),
            ("graph attention network", "--model gat --batch 1"),
        )
        for nodes in (1, 2, 4)
    ),
    _megatron("GPT-3 2.7B, DP8", f"{_GPT_2_7B} --tensor 1 --batch 1 --recompute --microbatches 8", 8, theirs=_MAYA),
    _megatron(
        "GPT-3 2.7B, TP2 PP2", f"{_GPT_2_7B} --tensor 2 --pipeline 2 --batch 1 --microbatches 8", 8, theirs=_MAYA
    ),
    _megatron(
        "GPT-3 18.4B, TP4 PP2", f"{_GPT_18_4B} --tensor 4 --pipeline 2 --batch 1 --microbatches 16", 8, 8, theirs=_MAYA
    ),
    _megatron(
        "GPT-3 18.4B, TP8 PP8, 16,384 GPUs",
        f"{_GPT_18_4B} --tensor 8 --pipeline 8 --batch 1 --microbatches 64",
        8,
        2048,
        theirs="Maya: runs such a job in 25 minutes",
    ),
)
