"""Evaluation in inference mode, where PyTorch leaves out autograd and operators reach the simulated GPU whole."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import time
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.batch = nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.BatchNorm2d(32)
        self.lstm, self.out = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 5)

    def forward(self, x):
        x = F.interpolate(F.gelu(self.batch(self.norm(self.conv(x)))), scale_factor=0.5, mode="bilinear")
        x = self.lstm(x.flatten(2).transpose(1, 2).contiguous())[0]
        return self.out(torch.einsum("bnd,de->bne", x, x.new_ones(64, 64)).mean(1))


model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = torch.randn(8, 3, 64, 64).cuda(), torch.randint(5, (8,)).cuda()


def evaluated(mode):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    with mode:
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    found = logits.softmax(-1).max(-1)  # of an inference tensor, outside of inference mode
    hits = (found.indices == labels).float().mean().item()
    torch.cuda.synchronize()
    milliseconds, used = 1e3 * (time.perf_counter() - began), torch.cuda.max_memory_allocated() - before
    with mode:
        changed = logits.softmax(-1)
        mean = changed.max(-1).values.mean().item()
        view = changed[:2]
        view.zero_()
        forgotten = changed.mean().item() != mean
    return f"{loss.item():.3f} {hits:.1f} {mean:.1f} {forgotten} {milliseconds:.3f} ms {used} bytes"


for step in range(5):
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    print(evaluated(torch.no_grad()))
    print(evaluated(torch.inference_mode()))
    model.train()
"""


def test_evaluation_in_inference_mode_is_that_without_gradients(run: Any) -> None:
    """Losses, hits, time and memory are those of `torch.no_grad`; what is known of a tensor ends when a view of it changes."""
    ended = run(SCRIPT, "--quiet", "--steps", "0")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[6] == lines[7] and lines[8] == lines[9]  # after the reported step, which is the third: each evaluates
    assert " 0.2 0.2 True " in lines[6] and 1 < float(lines[6].split()[0]) < 1.609
