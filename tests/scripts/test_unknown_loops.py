"""Loops of scripts that go on while something unknown holds."""

from __future__ import annotations

from typing import Any

SOURCE = """
import torch
from torch import nn

class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.halt = nn.GRUCell(32, 32), nn.Linear(32, 1)

    def forward(self, x):
        state, halted, depth = torch.zeros_like(x), torch.zeros(len(x), 1, device=x.device), 0
        while (halted < 0.95).any().item() and depth < 12:
            state = self.cell(x, state)
            halted = halted + torch.sigmoid(self.halt(state))
            depth += 1
        return state, halted, depth

def rounds(x):
    found = 0
    while not bool((x > 0.5).any()):
        found += 1
    while (x > 0.5).any():
        found += 10
        while (x < 0.5).any():
            found += 100
    while (x > 0.5).any():
        found += 1000
        break
    if (x > 2).any():
        raise ValueError("too large")
    return found

model = Adaptive().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(4096, 32, device="cuda")
    state, halted, depth = model(x)
    (state.sum() + halted.sum()).backward()
    norms = [p.grad.norm().item() for p in model.parameters()]
    optimizer.step()
    print(depth, len(norms), rounds(state.detach()), flush=True)
"""


def test_a_loop_runs_once_for_an_unknown_condition(run: Any) -> None:
    """Also for its opposite, inside another loop, and in each step anew. Elsewhere such a condition does not hold, nor in a
    loop with a break.
    """
    ended = run(SOURCE)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:3] == ["1 6 111"] * 3
