"""Attention that is evaluated without gradients (teachers, frozen encoders), and fused optimizers whose rate is a tensor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from autosac.trace import Op, Trace

EVALUATED = """
import torch
from torch import nn
layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, activation="gelu", norm_first=True).cuda().eval()
attention = nn.MultiheadAttention(512, 8, batch_first=True).cuda().eval()
student = nn.Linear(512, 512, bias=False).cuda()
optimizer = torch.optim.AdamW(student.parameters(), lr=torch.tensor(1e-3), fused=True)
other = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, fused=True)
for step in range(9):
    x = torch.randn(4, 128, 512, device="cuda")
    with torch.no_grad():
        padding = torch.zeros(4, 128, dtype=torch.bool, device="cuda")
        target = layer(x)
        found, weights = attention(x, x, x, key_padding_mask=padding)
    (student(x) - target - found).square().sum().backward()
    optimizer.step()
    other.step()
    optimizer.zero_grad()
    print(step, list(target.shape), list(found.shape), list(weights.shape))
"""


def test_evaluated_attention_is_what_cuda_composes(run: Any, tmp_path: Path) -> None:
    """An encoder layer has one kernel for attention, masked attention has its scores; an update is one kernel."""
    ended = run(EVALUATED, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    assert "2 [4, 128, 512] [4, 128, 512] [4, 128, 128]" in ended.stdout
    trace = Trace.load(tmp_path / "step.trace")
    called = [trace.signatures[event.signature] for event in trace.events if type(event) is Op]
    names = Counter(signature.name.removeprefix("aten.") for signature in called)
    assert names["_scaled_dot_product_efficient_attention.default"] == names["_addmm_activation.default"] == 1
    assert names["native_layer_norm.default"] == 2
    assert names["_transform_bias_rescale_qkv.default"] == names["_masked_softmax.default"] == 1
    assert names["_fused_adamw_.tensor_lr"] == names["_fused_sgd_.default"] == 1
    assert not names["_transformer_encoder_layer_fwd.default"] + names["_native_multi_head_attention.default"]
