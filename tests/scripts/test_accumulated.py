"""Steps that accumulate gradients: few microbatches run, and the trace is byte for byte that of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from autosac.plans import Plan
from autosac.trace import Trace

STEPS, MICROBATCHES = 3, 6
ALL = STEPS * MICROBATCHES
FEW = 4 + 4 + 4  # the first step's first is not looked at, and nobody knows which is its last

SCRIPT = """
import torch
from torch import nn
forwards = []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 512)

    def forward(self, tokens, labels=None):
        forwards.append(1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        # more of the forward
        if labels is None:
            return logits
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def batch(length=32):
    return torch.randint(0, 512, (4, length)).pin_memory().to("cuda", non_blocking=True)

model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
x, y, kept = batch(), batch(), []
for step in range(3):
    for microbatch in range(6):
        with torch.autocast("cuda", torch.bfloat16):
            logits, loss = model(x, y)
            loss = loss / 6
        # more of the microbatch
        x, y = batch(), batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), torch.cuda.max_memory_reserved())
print("forwards", len(forwards))
"""
FORWARD, MICROBATCH = "# more of the forward", "# more of the microbatch"
OUTSIDE = SCRIPT.replace(
    "logits, loss = model(x, y)", "loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())"
)
HOOK = "model.head.register_forward_hook(lambda *_: None)\noptimizer ="


LONGER = SCRIPT.replace(
    "x, y = batch(), batch()\n        loss",
    "x, y = (batch(48 if microbatch == 3 else 32) for _ in range(2))\n        loss",
)


class Case(NamedTuple):
    """A script, and how many forwards of it run."""

    script: str
    runs: int


ALIKE = {
    "the loss in the model": Case(SCRIPT, FEW),
    "the loss outside": Case(OUTSIDE, FEW),
    "losses are kept": Case(SCRIPT.replace(MICROBATCH, "kept.append((loss, logits[0, 0].detach()))"), FEW),
    "one batch is longer": Case(LONGER, FEW + STEPS),
    "a counter in the model": Case(SCRIPT.replace(FORWARD, "self.calls = getattr(self, 'calls', 0) + 1"), ALL),
    "numbers are drawn": Case(SCRIPT.replace(FORWARD, "import random; random.random()"), ALL),
    "a hook": Case(SCRIPT.replace("optimizer =", HOOK), ALL),
    "a penalty on weights": Case(SCRIPT.replace(MICROBATCH, "loss = loss + model.head.weight.square().sum()"), ALL),
}
UNLIKE = {
    "the forward": (
        SCRIPT.replace(FORWARD, "logits = logits * 1 if len(forwards) == 8 else logits"),
        "in its forward",
    ),
    "between": (
        SCRIPT.replace(MICROBATCH, "loss = loss * 2 if microbatch == 4 else loss"),
        "with what the model returns",
    ),
    "no backward": (SCRIPT.replace(MICROBATCH, "if microbatch == 4: continue"), "another backward"),
    "a graph that is kept": (
        SCRIPT.replace("backward()", "backward(retain_graph=microbatch == 4)"),
        "differentiates otherwise",
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_trace(name: str, run: Any, tmp_path: Path) -> None:
    """Trace, output and memory are those of all microbatches, of which only as many run as have to."""
    case = ALIKE[name]
    texts, traces = [], []
    for how, options in ("whole", ("--every-microbatch",)), ("copied", ()):
        ended = run(case.script, *options, "--steps", "0", "--save-capture", f"{how}.trace")
        assert ended.returncode == 0, ended.stderr
        text, forwards = ended.stdout.split("forwards ")
        count, report = forwards.split("\n", 1)
        assert int(count) == (ALL if how == "whole" else case.runs)
        texts.append((text, report.replace(f"{how}.trace", "")))
        traces.append(Trace.load(tmp_path / f"{how}.trace"))
    assert traces[0] == traces[1]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", UNLIKE)
def test_microbatches_that_differ(name: str, run: Any) -> None:
    """Where a microbatch proves unlike the copied ones the script runs again, all of it, and a line says why."""
    script, why = UNLIKE[name]
    ended = run(script, "--quiet", "--steps", "0")
    assert ended.returncode == 0, ended.stderr
    assert why in ended.stderr and ended.stderr.rstrip().endswith("the script runs again, with every microbatch")
    assert int(ended.stdout.rpartition("forwards ")[2].split()[0]) == ALL


ROOMS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        room = torch.empty_like(x)
        room.copy_(x)
        return x + self.down(torch.relu(self.up(room)))

model = nn.Sequential(*(Block() for _ in range(3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for microbatch in range(4):
        model(torch.randn(8192, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_unit_may_begin_with_memory(run: Any) -> None:
    """A module that first makes room, which is no operator, is planned for in a step that accumulates gradients."""
    ended = run(ROOMS, "--plan", "124MiB", "-o", "plan.json", "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert Plan.load("plan.json").units
