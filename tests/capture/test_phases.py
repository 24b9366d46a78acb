"""What a backward is told: whether it creates a graph, so that what runs in it with gradients is no recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.capture.record.log import EventLog
from autosac.capture.record.phases import PhaseTracker
from autosac.trace import Op, Phase

X = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("arguments", "named", "phase"),
    [
        (((X,), (None,), False, True), {}, Phase.BACKWARD),
        (((X,), (None,), False, True, ()), {"allow_unreachable": True}, Phase.BACKWARD),
        (((X,), (None,), False, False, (X,)), {"allow_unreachable": True}, Phase.RECOMPUTE),
        (((X,), (None,), False), {"create_graph": True}, Phase.BACKWARD),
        (((X,), (None,), False), {"create_graph": False}, Phase.RECOMPUTE),
        (((X,), (None,), False), {}, Phase.RECOMPUTE),
    ],
)
def test_the_engine_is_told_whether_a_graph_is_created(
    arguments: tuple[Any, ...], named: dict[str, Any], phase: Phase
) -> None:
    """Tensors, gradients, retain_graph, create_graph and inputs come in this order, the last two perhaps by name.

    An operator that runs with gradients enabled inside of a node's backward belongs to the backward only if that creates a
    graph.
    """
    tracker, found = PhaseTracker(EventLog()), []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                found.append(tracker.locate().phase)
            return gradient

    loss = Probe.apply(X).sum()
    tracker.run_backward(lambda *_, **__: loss.backward(), *arguments, **named)
    assert found == [phase]
    assert tracker.phase is Phase.SETUP


class Square(torch.autograd.Function):
    """Whose forward runs without gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Saves what it squares."""
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Of the square."""
        return 2 * gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_custom_functions_of_a_checkpoint_run_again(use_reentrant: bool) -> None:
    """Their forward, and what runs without gradients around it, is recomputation the second time; their backward is not."""

    def make_step(device: torch.device) -> Any:
        x = torch.ones(4, 4, device=device, requires_grad=True)

        def block(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = x.cos()
            return Square.apply(x.tanh()) * scale

        return lambda: checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()

    trace = capture_eager(make_step, EagerRequest())
    found = [(trace.signatures[e.signature].name.split(".")[1], e.phase) for e in trace.events if type(e) is Op]
    for name in ("cos", "tanh"):
        assert [phase for each, phase in found if each == name] == [Phase.OTHER, Phase.RECOMPUTE]
    squares = [phase for name, phase in found if name in ("square", "pow")]
    assert squares == [Phase.OTHER, Phase.RECOMPUTE]
    assert [phase for name, phase in found if name == "tanh_backward"] == [Phase.BACKWARD]
