"""Stand-ins for kernels that cannot run here: of a user, and those that come along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autosac.errors import UsageError
from autosac.estimator import load_hardware
from autosac.estimator.stand_ins import SHARE_OF_BANDWIDTH, SHARE_OF_PEAK
from autosac.integrations import stand_ins
from autosac.scripts.request import ScriptRequest
from autosac.scripts.target import script_target
from autosac.simulation import simulation_of
from autosac.trace import Op, Phase, Trace

STAND_INS = """
from autosac.integrations.stand_ins import stand_in

def products(x, weight):
    return 2 * x.shape[0] * x.shape[1] * weight.shape[1]

@stand_in("my_kernels.fused:linear", flops=products)
def linear(x, weight):
    return x.new_empty(x.shape[0], weight.shape[1])
"""
SCRIPT = """
import torch
from my_kernels.fused import linear
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from apex.optimizers import FusedAdam

w = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
optimizer = FusedAdam(w.parameters())
while True:
    x = w(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16))
    y = linear(x, w.weight)
    q = y.view(2, 2048, 8, 128)
    starts = torch.tensor([0, 2048, 4096], dtype=torch.int32, device="cuda")
    rows = q.flatten(0, 1)
    attended = flash_attn_varlen_func(rows, rows, rows, starts, starts, 2048, 2048, causal=True)
    assert attended.shape == (4096, 8, 128)
    loss = CrossEntropyLoss()(attended.flatten(1), torch.zeros(4096, dtype=torch.long, device="cuda"))
    assert loss.shape == () and loss.dtype == torch.float32
    labels = torch.zeros(4096, dtype=torch.long, device="cuda")
    assert CrossEntropyLoss(reduction="none")(attended.flatten(1), labels).shape == (4096,)
    assert CrossEntropyLoss(reduction="sum")(attended.flatten(1), labels).shape == ()
    (flash_attn_func(q, q, q, causal=True).sum() + loss).backward()
    assert w.weight.grad.shape == (1024, 1024)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_stand_ins_in_a_script(run: Any, tmp_path: Path) -> None:
    """The kernel is in the step, forward and backward, at the price of its formula; attention and Adam are PyTorch's fused."""
    (tmp_path / "kernels.py").write_text(STAND_INS)
    options = [word for name in ("kernels.py", "flash_attn", "apex") for word in ("--stand-in", name)]
    ended = run(SCRIPT, *options, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    simulation = simulation_of(trace, script_target(ScriptRequest(script="")))
    names = [signature.name for signature in trace.signatures]
    ops = [(i, event) for i, event in enumerate(trace.events) if type(event) is Op]
    calls = [(i, event) for i, event in ops if "my_kernels" in names[event.signature]]
    assert [event.phase for _, event in calls] == [Phase.FORWARD, Phase.BACKWARD]
    hardware = load_hardware("h100-sxm-80gb")
    flops, nbytes = 2 * 4096 * 1024 * 1024, 2 * (4096 * 1024 + 1024 * 1024 + 4096 * 1024)
    for times, (index, _) in zip((1, 2), calls, strict=True):
        compute_s = times * flops / (SHARE_OF_PEAK * hardware.peak_flops("bfloat16"))
        memory_s = times * nbytes / (SHARE_OF_BANDWIDTH * hardware.mem_bandwidth_gbps * 1e9)
        expected_ms = hardware.kernel_us / 1e3 + 1e3 * max(compute_s, memory_s)
        assert simulation.pricing.event_ms[index] == pytest.approx(expected_ms, rel=1e-9)
    assert "aten._scaled_dot_product_flash_attention.default" in names and "aten._fused_adamw_.default" in names
    assert "torch_attn._varlen_attn.default" in names
    losses = [event for _, event in ops if "cross_entropy_loss" in names[event.signature]]
    assert [event.phase for event in losses] == [Phase.FORWARD] * 3 + [Phase.BACKWARD]  # one of them is differentiated


TRITON = """
import torch
from flash_attn.flash_attn_triton import flash_attn_func
from torch.utils.checkpoint import checkpoint

class Block(torch.nn.Linear):
    def forward(self, x):
        q = super().forward(x).view(2, 1024, 4, 128)
        return flash_attn_func(q, q, q, None, True)

block = Block(512, 512, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(block.parameters())
while True:
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_kernel_that_is_priced_by_cycles_under_checkpointing(run: Any, tmp_path: Path) -> None:
    """Triton's first FlashAttention, recomputed: 4 FLOPs for each of 128 numbers of 4 heads and 1024 x (1024 + 128) / 2 scores
    of two sequences, more in the backward, at the FLOPs of a multiprocessor and a cycle.
    """
    ended = run(TRITON, "--stand-in", "flash_attn", "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    trace = Trace.load(tmp_path / "step.trace")
    simulation = simulation_of(trace, script_target(ScriptRequest(script="")))
    names = [signature.name for signature in trace.signatures]
    calls = [(i, e) for i, e in enumerate(trace.events) if type(e) is Op and "triton_flash" in names[e.signature]]
    assert [event.phase for _, event in calls] == [Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD]
    hardware = load_hardware("h100-sxm-80gb")
    flops = 4 * 2 * 4 * 128 * 1024 * (1024 + 128) / 2
    forward_ms = flops / (stand_ins.TRITON_PER_CYCLE * hardware.sm_count * hardware.boost_mhz * 1e3)
    for times, (index, _) in zip((1, 1, stand_ins.TRITON_BACKWARD), calls, strict=True):
        expected_ms = hardware.kernel_us / 1e3 + times * forward_ms
        assert simulation.pricing.event_ms[index] == pytest.approx(expected_ms, rel=1e-9)


def test_what_is_missing_is_said(run: Any) -> None:
    """The script's own traceback, and one line that names the stand-in."""
    ended = run("import flash_attn")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "autosac: flash_attn is not installed: --stand-in flash_attn uses" in ended.stderr


def test_wrong_names() -> None:
    """A target without a colon, two stand-ins for one name, and a name that is neither a file nor known."""
    with pytest.raises(UsageError, match="expected package"):
        stand_ins.replace("nothing.here", None)
    stand_ins.replace("autosac_no_such:kernel", None)
    with pytest.raises(UsageError, match="two stand-ins"):
        stand_ins.replace("autosac_no_such:kernel", None)
    with pytest.raises(UsageError, match="none of: flash_attn, apex, kernels"):
        stand_ins.load(["no-such-file.py"])
