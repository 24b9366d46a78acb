"""CUDA graphs of scripts: whole steps, parts of a step, and what CUDA forbids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autosac.trace import GRAPH_POOL, Alloc, GraphLaunch, Op, Trace

WHOLE = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x = torch.randn(64, 1024, device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    optimizer.step()


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(4):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    print("capturing", torch.cuda.is_current_stream_capturing())
    step()
for _ in range(10):
    x.copy_(torch.randn(64, 1024))
    graph.replay()
    print("allocated", torch.cuda.memory_allocated(), "reserved", torch.cuda.memory_reserved() >> 20)
"""
PART = """
import torch
from torch import nn

graphed, plain = nn.Linear(256, 256).cuda(), nn.Linear(256, 16).cuda()
optimizer = torch.optim.SGD([*graphed.parameters(), *plain.parameters()], lr=0.1)
graphed = torch.cuda.make_graphed_callables(graphed, (torch.randn(32, 256, device="cuda", requires_grad=True),))
for _ in range(4):
    optimizer.zero_grad()
    loss = plain(graphed(torch.randn(32, 256, device="cuda"))).square().mean()
    loss.backward()
    optimizer.step()
    print(all(parameter.grad is not None for parameter in graphed.parameters()))
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    loss.item()
"""
EMPTIED = """
import torch

weight = torch.nn.Parameter(torch.zeros(2**20, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
print("reserved", torch.cuda.memory_reserved() >> 20)
large = torch.zeros(2**28, device="cuda")
del large
torch.cuda.empty_cache()
print("reserved", torch.cuda.memory_reserved() >> 20)
for _ in range(3):
    (weight * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_step_in_a_graph(run: Any, tmp_path: Path) -> None:
    """Warm-up and capture are no steps; a replay launches at once what was captured, and allocates nothing.

    Four matrices with biases are 16,793,600 bytes: parameters, two moments and gradients; and four workspaces, of the
    warm-up's and of the graph's forward and backward.
    """
    ended = run(WHOLE, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "capturing True"
    steps = [line for line in lines if line.startswith("allocated")]
    assert len(set(steps)) == 1 and len(steps) == 3
    allocated, reserved = int(steps[0].split()[1]), int(steps[0].split()[3])
    fixed = 4 * 16_793_600 + 4 * 32 * 2**20 + 64 * 1024 * 4
    assert fixed <= allocated < fixed + 2**20
    assert "step 6 of the 7 that the script ran" in ended.stdout
    assert f"{reserved}.0 MiB" in next(line for line in lines if "peak reserved" in line)
    trace = Trace.load(tmp_path / "step.trace")
    (launch,) = [event for event in trace.events if type(event) is GraphLaunch]
    position = trace.events.index(launch)
    inside = trace.events[position + 1 : position + 1 + launch.events]
    assert sum(type(event) is Op and event.stream == 0 for event in inside) > 30
    assert not any(type(event) is Alloc for event in trace.events[position:])
    assert any(name.startswith(GRAPH_POOL) for name in trace.streams)


def test_a_part_of_a_model_in_graphs(run: Any) -> None:
    """`make_graphed_callables` trains as usual; the host may not wait inside of a capture."""
    ended = run(PART, "--steps", "0")
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[:4] == ["True"] * 4
    assert "CUDA error: operation not permitted when stream is capturing" in ended.stderr


def test_no_plan_with_graphs(run: Any) -> None:
    """Recomputation cannot be planned inside of a graph, which one line says."""
    ended = run(WHOLE, "--plan", "1GiB")
    assert ended.returncode == 2
    assert "no plan can be made for a script that captures CUDA graphs" in ended.stderr


def test_an_emptied_cache(run: Any) -> None:
    """What `empty_cache` returns to the device counts for the peak, and is not there later: 1 GiB beside the weight."""
    ended = run(EMPTIED, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:2] == ["reserved 20", "reserved 20"]
    assert "1.02 GiB" in next(line for line in ended.stdout.splitlines() if "peak reserved" in line)
