"""Scripts whose first optimizer is not their last: layers thaw, a search for a learning rate is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCRIPT = """
import sys, torch
from torch import nn

body, head = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda(), nn.Linear(256, 8).cuda()
body.requires_grad_(False)
kept = []


def train(optimizer, steps, batch):
    if "keep" in sys.argv:
        kept.append(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        head(body(torch.randn(batch, 256).cuda())).sum().backward()
        optimizer.step()
        print("peak", torch.cuda.max_memory_allocated() >> 10, flush=True)


train(torch.optim.AdamW(head.parameters()), 2, 64)
print("between", torch.cuda.memory_allocated(), flush=True)
body.requires_grad_(True)
train(torch.optim.AdamW([*body.parameters(), *head.parameters()]), int(sys.argv[1]), 4096)
"""
ADVERSARIES = """
import torch
from torch import nn

writer, critic = nn.Linear(64, 64).cuda(), nn.Linear(64, 1).cuda()
of_writer, of_critic = (torch.optim.Adam(model.parameters()) for model in (writer, critic))
for step in range(4):
    of_writer.zero_grad()
    critic(writer(torch.randn(8, 64).cuda())).sum().backward()
    of_writer.step()
    for _ in range(5):
        of_critic.zero_grad()
        critic(torch.randn(8, 64).cuda()).sum().backward()
        of_critic.step()
print(torch.cuda.max_memory_allocated(), file=open("peak", "w"))
"""
CRITIC_FIRST = """
import torch
from torch import nn

writer, critic = (nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).cuda() for _ in range(2))
of_writer, of_critic = (torch.optim.SGD(model.parameters()) for model in (writer, critic))
for step in range(4):
    of_critic.zero_grad()
    critic(torch.randn(8192, 2048).cuda()).sum().backward()
    of_critic.step()
    of_writer.zero_grad()
    critic(writer(torch.randn(64, 2048).cuda())).sum().backward()
    of_writer.step()
print(torch.cuda.max_memory_allocated(), file=open("peak", "w"))
"""
TAKEN_OVER = "another optimizer trains from step 3 on: a step of that is reported"


def _peaks(printed: str) -> list[int]:
    return [int(line.split()[1]) for line in printed.splitlines() if line.startswith("peak")]


def _between(printed: str) -> int:
    return next(int(line.split()[1]) for line in printed.splitlines() if line.startswith("between"))


def test_the_second_optimizers_step_is_reported(run: Any) -> None:
    """Two steps train the head; of five that train all, of a batch 64 times as large, the second is reported: step 4."""
    ended = run(SCRIPT, "--steps", "0", "--quiet", arguments=("5",))
    assert ended.returncode == 0, ended.stderr
    assert "step 4 of the 7 that the script ran" in ended.stdout and TAKEN_OVER in ended.stdout
    first, _, third, *later = _peaks(ended.stdout)
    assert third > first and len(later) == 4 and len(set(later)) == 1


def test_one_that_is_still_there_is_replaced_after_32_steps(run: Any) -> None:
    """They are one step, the third, and the eight after them are eight. What the first one holds stays: two moments of the
    head's parameters, 8,192 and 512 bytes each.
    """
    ended = run(SCRIPT, "--steps", "0", "--quiet", arguments=("40", "keep"))
    assert ended.returncode == 0, ended.stderr
    assert "step 4 of the 11 that the script ran" in ended.stdout and TAKEN_OVER in ended.stdout
    gone = run(SCRIPT, "--steps", "0", "--quiet", arguments=("1",))
    assert _between(ended.stdout) - _between(gone.stdout) == 2 * (8192 + 512)


def test_a_plan_is_made_for_the_second_optimizers_step(run: Any) -> None:
    """100 MiB are enough for the first one's steps, and too little for that: 4,096 rows of 256 numbers are 4 MiB a layer."""
    ended = run(SCRIPT, "--plan", "100MiB", "--quiet", arguments=("5",))
    assert ended.returncode == 1
    assert max(_peaks(ended.stdout)[:2]) < 80 << 10
    assert "no plan meets 100.0 MiB reserved" in ended.stderr


def test_optimizers_that_alternate_go_on_to(run: Any, tmp_path: Path) -> None:
    """Each of the generator's steps is followed by five of the critic's, of which none begins a step. The critic makes its
    gradients and its states for the first time in the second step (the first ended with the generator's): the third one's
    peak, which the script is told, is reported.
    """
    ended = run(ADVERSARIES, "--steps", "0", "--quiet", "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["peak_active_bytes"] == int((tmp_path / "peak").read_text())
    assert report["script"] == {"steps": 4, "kept": 3, "notes": [], "ran": [0]}


def test_the_peak_is_what_the_script_is_told(run: Any, tmp_path: Path) -> None:
    """Sums to biases of one size take 128 MiB in the critic's first layer, none in its second (whose gradient is one number),
    and little for the writer's 64 rows: those of the steps before the reported one are told apart by their order.
    """
    ended = run(CRITIC_FIRST, "--steps", "0", "--quiet", "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["peak_active_bytes"] == int((tmp_path / "peak").read_text())
    assert report["script"]["kept"] == 3
