"""FlashAttention-3 from Hugging Face's hub, in a compiled script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosac.integrations.hub_kernels import flops, narrow, pairs
from autosac.trace import Trace

SCRIPT = """
import torch
from kernels import get_kernel, has_kernel

assert has_kernel("kernels-community/flash-attn3") and not has_kernel("kernels-community/activation")
attention = get_kernel("varunneal/flash-attention-3", version=1).flash_attn_interface


class Block(torch.nn.Module):
    def __init__(self, window):
        super().__init__()
        self.qkv, self.window = torch.nn.Linear(128, 384), window

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 256, 3, 2, 64).unbind(2)
        return x + attention.flash_attn_func(q, k, v, causal=True, window_size=(self.window, 0)).flatten(2)


model = torch.nn.Sequential(*map(Block, (64, -1, 255))).cuda().bfloat16()
model = torch.compile(model, fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(3):
    model(torch.randn(2, 256, 128, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(-1, 13), st.integers(-1, 13))
def test_pairs_are_counted(queries: int, keys: int, causal: bool, left: int, right: int) -> None:
    """Those of a mask that is written out."""
    at = torch.arange(queries)[:, None] + keys - queries
    other = torch.arange(keys)[None, :]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        mask &= other >= at - left
    if causal or right >= 0:
        mask &= other <= at + (0 if causal else right)
    assert pairs(queries, keys, causal, (left, right)) == int(mask.sum())


def test_flops_of_a_window() -> None:
    """Two products for each pair: 4 queries see 1, 2, 2 and 2 keys."""
    q = torch.empty(3, 4, 2, 8)
    assert flops(q, q, q, causal=True, window_size=(1, 0)) == 3 * 2 * 7 * 2 * (8 + 8)


def test_float32_is_refused() -> None:
    """The kernels refuse it on a GPU. Under autocast PyTorch's norms return it, and PyTorch's attention casts it."""
    half, full = torch.empty(1, 4, 2, 8, dtype=torch.bfloat16), torch.empty(1, 4, 2, 8)
    narrow(half, half, half)
    with pytest.raises(RuntimeError, match=r"^FlashAttention takes tensors of 16 and 8 bits, not float32$"):
        narrow(full, full, half)


@pytest.mark.parametrize("module", ["kernels", "flash_attn"])
def test_float32_ends_a_script(run: Any, module: str) -> None:
    """In one line that says what the kernel takes, eager or compiled."""
    got = "get_kernel('kernels-community/flash-attn3')" if module == "kernels" else "flash_attn"
    names = "from kernels import get_kernel" if module == "kernels" else "import flash_attn"
    call = f"q = torch.ones(1, 8, 2, 64, device='cuda')\n{got}.flash_attn_func(q, q, q, causal=True)"
    ended = run(f"import torch\n{names}\n{call}\n", "--stand-in", module)
    assert ended.returncode != 0
    assert "FlashAttention takes tensors of 16 and 8 bits, not float32" in ended.stderr


def test_flash_attention_3_in_compiled_code(run: Any, tmp_path: Path) -> None:
    """It breaks no graph. A window that leaves nothing out is none: cuDNN's kernel then, else the stand-in's FLOPs."""
    ended = run(SCRIPT, "--stand-in", "kernels", "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    names = [trace.signatures[op.signature].name for _, op in trace.operators()]
    assert names.count("aten._scaled_dot_product_cudnn_attention.default") == 2
    assert names.count("aten._scaled_dot_product_cudnn_attention_backward.default") == 2
    called = [trace.signatures[op.signature] for _, op in trace.operators()]
    forward, backward = (dict(kernel.arguments) for kernel in called if kernel.name.startswith("stand_in."))
    counted = sum(min(query + 1, 65) for query in range(256))
    assert forward["flops"] == 2 * 2 * counted * 2 * (64 + 64)
    assert backward["flops"] == pytest.approx(2.5 * forward["flops"])


def test_a_t4_ends_a_script(run: Any) -> None:
    """FlashAttention has no kernels for GPUs before Ampere; the message is its own."""
    call = "q = torch.ones(1, 8, 2, 64, device='cuda', dtype=torch.float16)\nflash_attn.flash_attn_func(q, q, q)"
    ended = run(f"import torch\nimport flash_attn\n{call}\n", "--stand-in", "flash_attn", "--gpu", "t4")
    assert ended.returncode != 0 and "FlashAttention only supports Ampere GPUs or newer." in ended.stderr
