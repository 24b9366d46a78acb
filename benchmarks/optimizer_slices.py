"""What optimizers that work in slices give: peaks with everything recomputed, and what the slices cost.

    python -m benchmarks.optimizer_slices

Each job is captured with PyTorch's functions for lists ("foreach") on all parameters, in slices, and with the fused optimizer,
whose numbers are others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosac.api import EagerCaptures
from autosac.capture.process.server import CaptureServer
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import captures_of
from autosac.jobs.titan import TitanJob
from autosac.simulation import Simulation, Target

GPU = "h100-sxm-80gb"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def encoder(device: torch.device, *, fused: bool) -> tuple[nn.Module, Callable[[], None]]:
    """24 layers of a Transformer encoder, 4.8 billion parameters in bfloat16, and AdamW."""
    with torch.device(device):
        layers = (
            nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True, dtype=torch.bfloat16) for _ in range(24)
        )
        model = nn.Sequential(*layers)
        batch = torch.randn(2, 1024, 4096, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)

    def step() -> None:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def eager() -> Iterator[Simulation]:
    """The encoder with lists, in slices and fused."""
    captures = EagerCaptures(partial(encoder, fused=False), Target.of(GPU, 1))
    yield captures.baselines()["full"]
    yield captures.sliced().baselines()["full"]
    yield EagerCaptures(partial(encoder, fused=True), Target.of(GPU, 1)).baselines()["full"]


def titan(server: CaptureServer, folder: Path) -> Iterator[Simulation]:
    """Llama-3 8B on 4 GPUs with lists, in slices and fused."""

    def captured(implementation: str) -> Any:
        words = ("--optimizer.implementation", implementation, "--training.local_batch_size", "1")
        overrides = (*words, "--training.seq_len", "2048")
        job = TitanJob.of(str(EXAMPLES / "llama3_8b.toml"), gpu=GPU, world_size=4, overrides=overrides)
        (captures,) = captures_of(job, server, folder, ("full",), beside=("full",))
        return captures

    lists = captured("foreach")
    yield lists.baseline("full")
    yield lists.sliced().baseline("full")
    yield captured("fused").baseline("full")


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print("| job, everything recomputed | optimizer | peak active | peak reserved | step |")
    print("|---|---|--:|--:|--:|")
    with CaptureServer() as server, temporary_folder() as folder:
        jobs = {"Transformer encoder, 4.8 billion bfloat16": eager(), "Llama-3 8B on 4 GPUs": titan(server, folder)}
        for job, steps in jobs.items():
            for name, step in zip(("lists", "lists in slices", "fused"), steps, strict=True):
                active, reserved = (
                    f"{peak / 2**30:.2f} GiB" for peak in (step.peak_active_bytes, step.peak_reserved_bytes)
                )
                print(f"| {job} | {name} | {active} | {reserved} | {step.step_ms:,.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
