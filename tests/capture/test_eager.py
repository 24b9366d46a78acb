"""The child process of an eager capture: its errors, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_upper_left

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.errors import AutosacError, CaptureError, UsageError
from autosac.trace import Op


def children() -> set[int]:
    """Of this process, zombies included."""
    me = os.getpid()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == me:
                found.add(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test ends without new children and without files in the folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = children()
    yield
    assert children() <= before
    assert list(tmp_path.glob("autosac*")) == []  # Inductor keeps its cache there, too


def complaint(make_step: Any, kind: type[AutosacError] = CaptureError, **request: Any) -> str:
    """The one line that a capture ends with."""
    with pytest.raises(kind) as caught:
        capture_eager(make_step, EagerRequest(**request))
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    return str(caught.value)


def line_of(text: str) -> str:
    """``folder/file.py:line`` of the first line of this file with a text."""
    here = Path(__file__)
    lines = here.read_text().splitlines()
    return f"{here.parts[-2]}/{here.name}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def test_masks_that_are_made_from_sizes() -> None:
    """PyTorch's masks for attention are a subclass of Tensor, which PyTorch cannot make from sizes under dispatch modes."""

    def make_step(device: torch.device) -> Any:
        q = torch.randn(1, 2, 8, 16, device=device)
        return lambda: nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=causal_upper_left(8, 8))

    trace = capture_eager(make_step, EagerRequest())
    operators = [trace.signatures[event.signature].name for event in trace.events if type(event) is Op]
    assert operators == ["aten._scaled_dot_product_efficient_attention.default"]


def test_capture_leaves_the_caller_alone() -> None:
    """The caller's process gets no simulated device, and no random numbers are drawn in it."""
    state = torch.get_rng_state()

    def make_step(device: torch.device) -> Any:
        x = torch.randn(4, device=device)
        return lambda: torch.randn(4) + x.sum().item()

    trace = capture_eager(make_step, EagerRequest())
    assert trace.info.gpu == EagerRequest().gpu.name and trace.info.world_size == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert "autosac" not in torch._C._get_privateuse1_backend_name() and not hasattr(torch, "simcuda")


def test_output_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    """What waits in the caller's buffer and what the job prints come out once, in order."""

    def make_step(device: torch.device) -> Any:
        print("inside")
        batch = torch.ones(1, device=device)
        return lambda: batch + 1

    sys.stdout.write("before ")
    capture_eager(make_step, EagerRequest())
    assert capfd.readouterr().out == "before inside\n"


def test_errors_of_the_job_name_their_place(capfd: pytest.CaptureFixture[str]) -> None:
    """An error in building or in a step is one line: what was done, what failed, where; no traceback."""

    def bad_build(device: torch.device) -> Any:
        raise KeyError("first\nsecond")

    def bad_step(device: torch.device) -> Any:
        x, weight = torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device)
        return lambda: x @ weight

    message = complaint(bad_build)
    assert message.startswith("building the training step: KeyError: ") and line_of('KeyError("first') in message
    message = complaint(bad_step)
    assert message.startswith("training step 1: RuntimeError: ") and line_of("lambda: x @ weight") in message
    assert "Traceback" not in "".join(capfd.readouterr())


def test_debugging_shows_the_traceback(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTOSAC_DEBUG=1 shows where an error came from."""
    monkeypatch.setenv("AUTOSAC_DEBUG", "1")

    def bad_build(device: torch.device) -> Any:
        return 1 / 0

    complaint(bad_build)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_job_that_exits() -> None:
    """sys.exit in a job is an error like any other; an abrupt end is told with its cause."""

    def leave(device: torch.device) -> Any:
        sys.exit("no data")

    def vanish(device: torch.device) -> Any:
        os._exit(3)

    def die(device: torch.device) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    assert "no data" in complaint(leave)
    assert complaint(vanish) == "the capture process ended early with exit code 3"
    assert complaint(die).startswith("the capture process was ended by signal 9 (SIGKILL)")


def test_wrong_requests() -> None:
    """Requests check themselves; a plan needs the model to be applied to."""
    for wrong in ({"target": "tpu"}, {"steps": 1}):
        with pytest.raises(UsageError):
            EagerRequest(**wrong)  # type: ignore[arg-type]
    message = complaint(lambda device: lambda: None, UsageError, observe=True)
    assert "make_step(device) has to return (model, step)" in message


@pytest.mark.usefixtures("interruptible")
def test_interrupt() -> None:
    """An interrupt ends the child, wherever it is, and reaches the caller."""
    read, write = os.pipe()

    def make_step(device: torch.device) -> Any:
        os.write(write, b"x")
        signal.pause()

    def interrupt() -> None:
        os.read(read, 1)  # the child is at work
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        capture_eager(make_step, EagerRequest())
    thread.join()
    os.close(read)
    os.close(write)


def test_capture_is_reproducible() -> None:
    """Two captures of a job give the same trace."""

    def make_step(device: torch.device) -> Any:
        with device:
            model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.zeros(2, 8)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    first, second = (capture_eager(make_step, EagerRequest(steps=3)) for _ in range(2))
    assert repr(first) == repr(second)
