"""Options that change how a script runs: fast forward, a step marker, made-up data, checkpoints of zeros."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.patches.synthetic import columns_of
from autosac.errors import UsageError

SCRIPT = """
import time
import datasets
import torch
from torch import nn

rows = datasets.load_dataset("nobody/has-this", split="train")
model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)).cuda()
first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

@torch.no_grad()
def update():  # no optimizer of torch.optim
    for p in model.parameters():
        p -= 0.1 * p.grad
        p.grad = None

begin = time.time()
for step in range(200):
    first.record()
    x, y = torch.randn(16384, 4096, device="cuda"), torch.tensor(rows[:10]["label"], device="cuda").repeat(1639)[:16384]
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    update()
    last.record()
    torch.cuda.synchronize()
    now = time.time()
    print(f"step {step}: {1e3 * (now - begin):.3f} ms, {first.elapsed_time(last):.3f} ms, {loss.item():.4f}", flush=True)
    begin = now
torch.save(model.state_dict(), "model.pt")
"""


def test_all_steps_at_once(run: Any, tmp_path: Path) -> None:
    """The script runs to its end; every step after the second takes what the report says, on the clock and between events."""
    options = ("--fast-forward", "--step-marker", "update", "--synthetic-data", "text,label:1000", "--checkpoints")
    ended = run(SCRIPT, *options)
    assert ended.returncode == 0, ended.stderr
    printed = [tuple(map(float, found)) for found in re.findall(r"step \d+: ([\d.]+) ms, ([\d.]+) ms", ended.stdout)]
    assert len(printed) == 200
    assert "step 2 of the 200 that the script ran" in ended.stdout
    step_ms = float(ended.stdout.split("step time")[1].split()[0])
    for clock_ms, events_ms in printed[2:]:
        assert abs(clock_ms - step_ms) < 0.1 and 0 < events_ms <= clock_ms + 0.01
    assert "the data set nobody/has-this is made up" in ended.stdout
    assert (tmp_path / "model.pt").stat().st_size > 4096 * (4096 + 1000) * 4


BY_HAND = """
import time
import torch
model = torch.nn.Linear(4096, 4096).cuda()
begin = time.time()
for step in range(8):
    loss = model(torch.randn(4096, 4096, device="cuda")).sum()
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
    loss.item()
    now = time.time()
    print(f"step {step}: {1e3 * (now - begin):.3f} ms")
    begin = now
"""


def test_updates_by_hand(run: Any) -> None:
    """Without an optimizer of torch.optim steps go on, too: each takes what the report says."""
    ended = run(BY_HAND, "--fast-forward")
    assert ended.returncode == 0, ended.stderr
    assert "step 2 of the 8 that the script ran" in ended.stdout
    step_ms = float(ended.stdout.split("step time")[1].split()[0])
    printed_ms = [float(found) for found in re.findall(r"step \d+: ([\d.]+) ms", ended.stdout)]
    assert len(printed_ms) == 8
    assert all(abs(found - step_ms) < 0.1 for found in printed_ms[2:]), printed_ms


AFTER_THE_UPDATE = """
import time
import torch
model = torch.nn.Linear(8192, 8192).cuda()
optimizer = torch.optim.AdamW(model.parameters())
first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for step in range(6):
    begin = time.time()
    first.record()
    loss = model(torch.randn(8192, 8192, device="cuda")).sum()
    loss.backward()
    loss.item()
    optimizer.step()
    optimizer.zero_grad()
    torch.ones(1024, device="cuda")
    last.record()
    torch.cuda.synchronize()
    print(f"step {step}: {1e3 * (time.time() - begin):.3f} ms, {first.elapsed_time(last):.3f} ms")
"""


def test_a_step_that_seems_to_begin_before_the_update_is_done(run: Any) -> None:
    """A tensor is made after the update, while the device works on: the update is part of what the script times."""
    ended = run(AFTER_THE_UPDATE, "--fast-forward")
    assert ended.returncode == 0, ended.stderr
    printed = [tuple(map(float, found)) for found in re.findall(r"step \d+: ([\d.]+) ms, ([\d.]+) ms", ended.stdout)]
    step_ms = float(ended.stdout.split("step time")[1].split()[0])
    assert len(printed) == 6
    assert all(abs(found - step_ms) < 0.2 for both in printed[1:] for found in both), printed


def test_a_marker_that_is_not_there(run: Any) -> None:
    """One line, before anything is simulated."""
    ended = run(SCRIPT, "--step-marker", "trainer.update", "--synthetic-data", "label:2", "--json")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.strip().splitlines()[-1].startswith("autosac: --step-marker trainer.update: neither the script")


def test_columns() -> None:
    """Texts, classes and images; anything else is an error."""
    assert columns_of("text,label:2,image:32x48") == {"text": "", "label": "2", "image": "32x48"}
    for wrong in ("", "a:b", "a:1x2x3", "a:0"):
        with pytest.raises(UsageError, match="is not a column"):
            columns_of(wrong)
