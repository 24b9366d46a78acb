"""One mixture of experts of DeepSeek-V3 16B, forward and backward, as TorchTitan's pull request 1974 measured it.

    python -m benchmarks.moe_layer

16,384 tokens, 64 experts, six for each token, two shared ones, in bfloat16. "scattered" adds the experts' outputs with
`scatter_add`, as TorchTitan did until November 2025; "ordered" multiplies them by the scores, as 0.2.2 does. The page does not
say which GPU it was. Nothing was fitted to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchtitan.models.moe import MoE, MoEArgs

import autosac
from benchmarks.torchtitan_published.specs import ScatteringMoE

GIB = 2**30
GPUS = ("h200-sxm-141gb", "h100-sxm-80gb")
PUBLISHED = {"scattered": (19.71, 5.926, 7.225), "ordered": (19.03, 5.051, 5.910)}  # ms, active and reserved GiB
TOKENS, WIDTH = (4, 4096), 2048


def make_step_of(kind: type[MoE]) -> Callable[[torch.device], tuple[MoE, Callable[[], Any]]]:
    """A step of one mixture."""

    def make_step(device: torch.device) -> tuple[MoE, Callable[[], Any]]:
        args = MoEArgs(
            num_experts=64,
            num_shared_experts=2,
            top_k=6,
            score_func="softmax",
            route_norm=False,
            score_before_experts=False,
        )
        with torch.device(device):
            model = kind(args, dim=WIDTH, hidden_dim=1408).to(torch.bfloat16)

        def step() -> None:
            x = torch.randn(*TOKENS, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
            model(x).sum().backward()
            model.zero_grad()

        return model, step

    return make_step


def main() -> None:
    """Print both forms on both GPUs, and how much the second saves."""
    print(
        f"{'mixture':11}{'GPU':16}{'ms':>8}{'published':>11}{'error':>8}{'active':>9}{'published':>11}{'reserved':>10}{'published':>11}"
    )
    for gpu in GPUS:
        steps = {}
        for name, kind in (("scattered", ScatteringMoE), ("ordered", MoE)):
            found = autosac.simulate(make_step_of(kind), gpu=gpu)
            ms, active, reserved = PUBLISHED[name]
            steps[name] = found.step_ms
            memory = (found.peak_active_bytes / GIB, active, found.peak_reserved_bytes / GIB, reserved)
            print(
                f"{name:11}{gpu:16}{found.step_ms:8.2f}{ms:11.2f}{100 * (found.step_ms / ms - 1):+7.1f}%"
                f"{memory[0]:9.3f}{memory[1]:11.3f}{memory[2]:10.3f}{memory[3]:11.3f}"
            )
        published = PUBLISHED["ordered"][0] / PUBLISHED["scattered"][0]
        print(f"{'':27}{steps['ordered'] / steps['scattered']:8.3f}{published:11.3f}  ordered over scattered")


if __name__ == "__main__":
    main()
