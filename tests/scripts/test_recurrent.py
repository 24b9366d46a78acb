"""RNNs in scripts: every kind, padded and packed, in every type that cuDNN takes."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([
            nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True, dropout=0.1),
            nn.LSTM(32, 64, 2, proj_size=16),
            nn.LSTM(32, 64, bias=False, proj_size=16, num_layers=2, bidirectional=True),
            nn.GRU(32, 64, 3, bias=False),
            nn.RNN(32, 64, 2, bidirectional=True),
        ])

    def forward(self, x, lengths):
        total = 0
        for part in self.parts:
            total = total + part(x)[0].float().mean()
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=part.batch_first, enforce_sorted=False
            )
            out, _ = nn.utils.rnn.pad_packed_sequence(part(packed)[0], batch_first=part.batch_first)
            total = total + out.float().mean()
        return total


def train(dtype, amp=None):
    model = Net().to("cuda", dtype)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 8, 32, device="cuda", dtype=dtype)
    with torch.autocast("cuda", dtype=amp or torch.float16, enabled=amp is not None):
        loss = model(x, torch.arange(8, 0, -1))
    loss.backward()
    parameters = list(model.parameters())
    print(all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in parameters))
    print(len({p.untyped_storage()._cdata for p in parameters}))
    optimizer.step()


for dtype in (torch.float32, torch.float16, torch.float64):
    train(dtype)
train(torch.bfloat16)
train(torch.float32, torch.bfloat16)
with torch.backends.cudnn.flags(enabled=False):
    print(nn.LSTM(32, 64).cuda()(torch.randn(5, 3, 32, device="cuda"))[0].grad_fn.name())
print(nn.LSTM(32, 64).cuda().eval()(torch.randn(5, 32, device="cuda"))[0].shape)
"""


def test_rnns_of_all_kinds_train(run: Any) -> None:
    """Each module's weights lie in one buffer (in bfloat16 cuDNN's check refuses, and PyTorch warns of it at every call)."""
    ended = run(SCRIPT, "--steps", "0")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[:6] == ["True", "5"] * 3
    assert lines[6:8] == ["True", str(16 + 10 + 12 + 6 + 16)]
    assert lines[8:10] == ["True", "5"]
    assert lines[10:12] == ["CatBackward0", "torch.Size([5, 64])"]
    assert "weights are not part of single contiguous chunk" in ended.stderr
    assert "torch/nn/modules/rnn.py" in ended.stderr
