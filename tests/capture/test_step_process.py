"""The process that forks the captures of a step that compiles something."""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosac.capture.jobs.eager import EagerRequest, capture_eager, step_process
from autosac.errors import CaptureError


class Layer(nn.Module):
    """A product and something to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return x + torch.tanh(self.linear(x))


def compiled(device: torch.device) -> tuple[nn.Module, Any]:
    """A step of two layers, each compiled by itself."""
    model = nn.Sequential(Layer(), Layer()).to(device)
    for layer in model:
        layer.compile()
    x = torch.randn(256, 64, device=device)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return model, step


@pytest.mark.slow
def test_captures_are_the_same() -> None:
    """Those of a process that has compiled before, the first and the second, equal the one of a process of its own."""
    process = step_process(compiled, EagerRequest().gpu)
    first, second = (capture_eager(compiled, EagerRequest(), process) for _ in range(2))
    process.close()
    alone = capture_eager(compiled, EagerRequest())
    assert any(signature.name.startswith("triton.") for signature in alone.signatures)
    assert repr(first) == repr(second) == repr(alone)


def test_a_capture_that_dies_is_one_failure(tmp_path: Path) -> None:
    """The process that forks it goes on. If that is killed, captures say so, as they do after its end."""
    todo = tmp_path / "todo"

    def make_step(device: torch.device) -> Any:
        if todo.read_text() == "exit":
            os._exit(3)
        if todo.read_text() == "kill":
            os.kill(os.getppid(), signal.SIGKILL)
        x = torch.ones(4, device=device)
        return lambda: x + 1

    process = step_process(make_step, EagerRequest().gpu)
    for action, why in (
        ("exit", "the capture process ended early with exit code 3"),
        ("exit", "the capture process ended early with exit code 3"),
        ("kill", r"the capture process was ended by signal 9 \(SIGKILL\)"),
        ("nothing", "the capture process has ended"),
    ):
        todo.write_text(action)
        with pytest.raises(CaptureError, match=why):
            capture_eager(make_step, EagerRequest(), process)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all() -> None:
    """The process and the capture that it has forked, wherever that is; the interrupt reaches the caller."""
    read, write = os.pipe()

    def make_step(device: torch.device) -> Any:
        os.write(write, b"x")
        signal.pause()

    def interrupt() -> None:
        os.read(read, 1)  # the capture is at work
        os.kill(os.getpid(), signal.SIGINT)

    process = step_process(make_step, EagerRequest().gpu)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        capture_eager(make_step, EagerRequest(), process)
    thread.join()
    os.close(write)
    assert select.select([read], [], [], 10)[0] and not os.read(read, 1)  # nobody can write any more
    os.close(read)
    with pytest.raises(CaptureError, match="has ended"):
        capture_eager(make_step, EagerRequest(), process)
