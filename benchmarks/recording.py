"""What applying a plan costs the host, beside PyTorch's own checkpointing: `python -m benchmarks.recording`.

A block of many small operators is trained on the CPU, where the host's work is all there is to see: without checkpointing,
under `torch.utils.checkpoint`, under PyTorch's selective checkpointing that saves every second product, and under plans that
keep nothing and every second product. The comparison of recomputed tensors, of which accelerators do little, is off.
Times are of this thread alone, so that other work on the machine changes them little; the ways take turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autosac
from autosac.integrations.observe import observe
from autosac.integrations.operators.keys import output_metadata
from autosac.integrations.operators.modules import parameters_of
from autosac.integrations.recompute import witness
from autosac.plans import Decision, MadeFor, Plan, Unit

WIDTH = 16


class Block(nn.Module):
    """Products, activations and norms, small enough to cost the host more than the device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        h = self.norm(x)
        for product in self.products:
            h = torch.sin(product(h)) * h
        return x + h


class _Log:
    """Notes the operators of the block."""

    def __init__(self) -> None:
        self.rows: list[Decision] = []

    def begin(self, *_: Any) -> _Log:
        self.rows = []
        return self

    def op_begin(self) -> None:
        """Nothing to do."""

    def op_end(self, op: str, occurrence: int, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note it, unless it is a view."""
        if occurrence >= 0:
            keep = op.startswith("aten.addmm") and occurrence % 2 == 0
            self.rows.append(
                Decision(
                    op=op,
                    occurrence=occurrence,
                    keep=keep,
                    outputs=output_metadata(out),
                )
            )

    def graph_end(self, *_: Any) -> None:
        """Nothing to do."""

    def end(self, out: Any) -> None:
        """Nothing to do."""


def under_plan(block: Block, x: torch.Tensor, *, keeps: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The block under a plan that keeps every second product, or nothing."""
    model = nn.ModuleDict({"block": copy.deepcopy(block)})
    log = _Log()
    observe(copy.deepcopy(model), ["block"], log).get_submodule("block")(x)
    rows = tuple(replace(row, keep=row.keep and keeps) for row in log.rows)
    made_for = MadeFor(
        job_fingerprint="",
        model="",
        torch_version=torch.__version__,
        torchtitan_version="",
        gpu="cpu",
        world_size=1,
        budget_bytes=0,
        budget_kind="active",
        parameters=parameters_of(model),
    )
    unit = Unit(
        fqn="block",
        discard_fraction=0.5,
        kept_bytes=0,
        recompute_ms=0.0,
        decisions=rows,
        parameters=parameters_of(block),
    )
    planned: nn.Module = autosac.apply(model, Plan(made_for=made_for, units=(unit,)))["block"]  # type: ignore[index]
    return planned


def _contexts() -> Any:
    seen = {"n": 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is torch.ops.aten.addmm.default:
            seen["n"] += 1
            return CheckpointPolicy.MUST_SAVE if seen["n"] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main() -> None:
    """Print milliseconds of a step, its forward and its backward, for every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, WIDTH, requires_grad=True)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "no checkpointing": block,
        "torch, full": lambda x: checkpoint(block, x, use_reentrant=False),
        "torch, selective": lambda x: checkpoint(block, x, use_reentrant=False, context_fn=_contexts),
    }
    witness.of = lambda *_: None
    ways["a plan that keeps nothing"] = under_plan(block, x, keeps=False)
    ways["a plan that keeps products"] = under_plan(block, x, keeps=True)
    print(f"| {'way':26} | forward ms | backward ms | step ms |\n|---|--:|--:|--:|")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.thread_time()
            loss = way(x).sum()
            middle = time.thread_time()
            loss.backward()
            times[name].append((middle - begin, time.thread_time() - middle))
    for name, rows in times.items():
        forward, backward = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name:26} | {forward:10.3f} | {backward:11.3f} | {forward + backward:7.3f} |")


if __name__ == "__main__":
    main()
