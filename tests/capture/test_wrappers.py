"""Which operators DTensor took apart: those of a pair of layers under tensor parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.trace import Collective, Op, Phase, Trace


def make_step(device: torch.device) -> Callable[[], None]:
    """Two layers, the first divided by columns and the second by rows over two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh(device.type, (2,))
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False)).to(device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(4, 8, device=device)

    def step() -> None:
        model(x).sum().backward()

    return step


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The second step's trace."""
    return capture_eager(make_step, EagerRequest())


def wrapped(trace: Trace, phase: Phase) -> Counter[str]:
    """Operators of a phase by the times that DTensor took a call apart before them."""
    found: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, (Op, Collective)) and event.phase is phase:
            signature = trace.signatures[event.signature]
            found[signature.name] += signature.wrappers
    return +found


def test_calls_of_the_forward(trace: Trace) -> None:
    """Each layer transposes its weight and multiplies, on DTensors; tanh, between them, has plain tensors."""
    found = wrapped(trace, Phase.FORWARD)
    assert (found["aten.t.default"], found["aten.mm.default"], found["aten.tanh.default"]) == (2, 2, 0)


def test_calls_of_the_backward(trace: Trace) -> None:
    """Three products: the second layer's two gradients, and the first layer's by its weight alone."""
    assert wrapped(trace, Phase.BACKWARD)["aten.mm.default"] == 3


def test_plain_calls(trace: Trace) -> None:
    """What has no DTensor among its tensors is wrapped by nothing: the sum, and the reduction of the second layer's parts."""
    names = {"aten.sum.default", "_c10d_functional.all_reduce.default"}
    found = {s.name: s.wrappers for s in trace.signatures if s.name in names}
    assert found == dict.fromkeys(names, 0)
