"""Runs the scripts of this folder under `autosac run` and writes a table of their figures.

    python -m benchmarks.scripts [--only NAME] [--out TABLE.md]

A script whose package is not installed has a row that says so. The wall time is that of the whole command.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script with its arguments, on how many GPUs, and the packages that it imports."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    gpu: str = "h100-sxm-80gb"
    nproc: int | None = None
    nodes: int = 1
    packages: tuple[str, ...] = ()


_DEEPSPEED, _DIFFUSERS = ("deepspeed",), ("diffusers", "accelerate")
CASES = (
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
    Case(
        name="1.3B, DeepSpeed ZeRO-1",
        script="deepspeed_zero.py",
        nproc=8,
        arguments=("--stage", "1"),
        packages=_DEEPSPEED,
    ),
    Case(
        name="1.3B, DeepSpeed ZeRO-2",
        script="deepspeed_zero.py",
        nproc=8,
        arguments=("--stage", "2"),
        packages=_DEEPSPEED,
    ),
    Case(
        name="1.3B, DeepSpeed ZeRO-3",
        script="deepspeed_zero.py",
        nproc=8,
        arguments=("--stage", "3"),
        packages=_DEEPSPEED,
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


def row(case: Case) -> str:
    """The case's line of the table."""
    missing = [name for name in case.packages if importlib.util.find_spec(name) is None]
    gpus = f"{case.nodes * (case.nproc or 1)} x {case.gpu}"
    if missing:
        return f"| {case.name} | {gpus} | {', '.join(missing)} not installed | | | |"
    command = [
        sys.executable,
        "-m",
        "autosac",
        "run",
        str(FOLDER / case.script),
        "--gpu",
        case.gpu,
        "--json",
        "--unlimited",
    ]
    command += [] if case.nproc is None else ["--nproc", str(case.nproc), "--nodes", str(case.nodes)]
    begin = time.monotonic()
    ended = subprocess.run([*command, "--", *case.arguments], capture_output=True, text=True, check=False)
    wall_s = time.monotonic() - begin
    if ended.returncode:
        return f"| {case.name} | {gpus} | {ended.stderr.strip().splitlines()[-1]} | | | |"
    found = json.loads(ended.stdout)
    return (
        f"| {case.name} | {gpus} | {found['step']['step_ms']:,.1f} | {found['peak_active_bytes'] / 2**30:.2f} | "
        f"{found['peak_reserved_bytes'] / 2**30:.2f} | {wall_s:.0f} |"
    )


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="cases with this in their names")
    parser.add_argument("--out", type=Path, metavar="TABLE.md")
    options = parser.parse_args()
    lines = [
        "| script | GPUs | step (ms) | peak active (GiB) | peak reserved (GiB) | wall time (s) |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for case in CASES:
        if options.only in case.name:
            lines.append(row(case))
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
