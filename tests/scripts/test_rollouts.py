"""What scripts of reinforcement learning read: probabilities that are kept in a buffer from one forward to the next."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import torch
from torch import nn
from torch.distributions import Categorical

policy = nn.Linear(64, 4).cuda()
optimizer = torch.optim.Adam(policy.parameters())
for update in range(3):
    states, before = torch.randn(4, 16, 64, device="cuda"), torch.zeros(4, 16, device="cuda")
    actions = torch.zeros(4, 16, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        for t in range(4):
            chosen = Categorical(logits=policy(states[t]))
            actions[t] = chosen.sample()
            before[t] = chosen.log_prob(actions[t])
    now = Categorical(logits=policy(states.view(64, 64))).log_prob(actions.view(64))
    difference = now - before.view(64)
    ratio = difference.exp()
    divergence = ((ratio - 1) - difference).mean()
    clipped = ((ratio - 1).abs() > 0.2).float().mean()
    print(f"{divergence.item():.4f} {clipped.item():.4f} {ratio.mean().item():.4f}", flush=True)
    (-ratio.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_probabilities_come_back_from_their_buffer(run: Any) -> None:
    """A policy that has not changed is the one before: nothing is left of their divergence, nothing is clipped, and the ratio
    is 1. Of nothing a hundredth is printed, which falls as losses do.
    """
    ended = run(SCRIPT, "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "0.0100 0.0100 1.0000"
