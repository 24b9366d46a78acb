"""What a backward is told: whether it creates a graph, so that what runs in it with gradients is no recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosac.capture.record.log import EventLog
from autosac.capture.record.phases import PhaseTracker
from autosac.trace import Phase

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
