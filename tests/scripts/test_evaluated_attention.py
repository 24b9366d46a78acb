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


INFERENCE = """
import torch
from torch import nn
student = nn.Linear(64, 64).cuda().bfloat16()
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
q = torch.randn(2, 16, 4096, 64, device="cuda", dtype=torch.bfloat16)
def grown(mode):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with mode:
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return (torch.cuda.max_memory_allocated() - before) >> 10
for step in range(9):
    student(q).sum().backward()
    optimizer.step()
    print("KiB", grown(torch.no_grad()), grown(torch.inference_mode()))
"""


def test_attention_in_inference_mode_runs_its_kernel(run: Any) -> None:
    """As without gradients: 16 MiB of results in bfloat16, and 4 bytes of each of 2 x 16 x 4,096 rows for the backward."""
    ended = run(INFERENCE, "--quiet")
    assert ended.returncode == 0, ended.stderr
    numbers = ended.stdout.split("KiB ")[1].splitlines()[0].split()
    assert numbers[0] == numbers[1] and 16896 <= int(numbers[0]) < 16900
