"""Captures of small TorchTitan jobs, one of every distinct rank or of all, through one capture process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.trace import Trace

LLAMA = ("--model.name", "llama3", "--model.flavor", "debugmodel", "--training.seq_len", "256")
Ranks = Callable[..., list[Trace]]


def _option(name: str, value: int | str) -> tuple[str, str]:
    section = "training" if name.endswith("batch_size") else "parallelism"
    return f"--{section}.{name}", str(value)


@pytest.fixture(scope="session")
def ranks(capture_server: CaptureServer) -> Ranks:
    """Captures a job without checkpointing: the first rank of every pipeline stage, or all ranks."""
    known: dict[TitanRequest, Trace] = {}

    def capture(request: TitanRequest) -> Trace:
        if request not in known:
            known[request] = capture_server.capture(request)
        return known[request]

    def run(
        world_size: int, *, model: tuple[str, ...] = LLAMA, every: bool = False, **options: int | str
    ) -> list[Trace]:
        overrides = [word for name, value in options.items() for word in _option(name, value)]
        request = TitanRequest(
            config_file=None,
            overrides=(*model, *overrides),
            world_size=world_size,
            checkpointing="none",
            layers=3,
        )
        first = capture(request)
        stages = first.info.parallelism.pp
        inputs = first.info.stage_outputs
        others = range(1, world_size) if every else range(world_size // stages, world_size, world_size // stages)
        later = {rank: inputs if rank >= world_size // stages else None for rank in others}
        return [first, *(capture(replace(request, rank=rank, stage_inputs=s)) for rank, s in later.items())]

    return run
