"""A step on the CPU: ``python profiled_step.py FILE`` profiles it, in a process that captures nothing afterwards."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def make_step(device: torch.device) -> Any:
    """Products, a norm, a convolution, attention, a loss, concatenation, casts and a foreach optimizer."""
    with device:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
        conv = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *conv.parameters()], lr=0.1, foreach=True)
    x, image = torch.ones(8, 16, device=device), torch.ones(2, 3, 8, 8, device=device)
    labels = torch.zeros(8, dtype=torch.int64, device=device)

    def step() -> None:
        query = x.view(1, 2, 8, 8)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        joined = torch.cat([x[:, :3], x[:, 4:]], 1).std() + mixed.to(torch.bfloat16).float().sum()
        loss = torch.nn.functional.cross_entropy(model(x), labels) + conv(image).relu().mean(dim=(2, 3)).sum() + joined
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def main(path: str) -> None:
    """Profile the second step."""
    _, step = make_step(torch.device("cpu"))
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(path)


if __name__ == "__main__":
    main(sys.argv[1])
