"""Compiled graphs: what Inductor would fuse is one kernel, with its inputs and outputs, and nothing inside takes memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autosac.capture.compiler.fusion import fuse
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.trace import Alloc, Op, Phase, Trace

LAYERS, WIDTH, HIDDEN, TOKENS = 2, 256, 768, 2 * 64  # llama3's debug model with two layers, and the batch of `trace`


@pytest.fixture(scope="module")
def trace(capture_server: CaptureServer) -> Trace:
    arguments = (
        *("--model.name", "llama3", "--model.flavor", "debugmodel"),
        *("--training.local_batch_size", "2", "--training.seq_len", "64"),
        *("--compile.enable", "--compile.components", "model"),
    )
    return capture_server.capture(
        TitanRequest(config_file=None, overrides=arguments, world_size=2, checkpointing="none", layers=LAYERS)
    )


def kernels(trace: Trace, phase: Phase) -> Counter[str]:
    return Counter(
        trace.signatures[op.signature].name
        for _, op in trace.operators()
        if op.phase is phase and trace.modules[op.module].startswith("layers.")
    )


def graph_of(function: object, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return fuse(make_fx(function, tracing_mode="fake")(*inputs))  # type: ignore[arg-type]


def kinds(graph: torch.fx.GraphModule) -> list[str]:
    """The calls of a graph in order: "kernel", or the operator's name."""
    nodes = [node for node in graph.graph.nodes if node.op in ("call_module", "call_function")]
    return ["kernel" if n.op == "call_module" else n.target._schema.name.partition("::")[2] for n in nodes]


def test_chains_between_matrix_products_are_one_kernel_each() -> None:
    """Elementwise, product, elementwise with a reduction: kernel, mm, kernel; and the numbers stay the same."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x.sigmoid() * x + 1) @ w
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))).tanh()

    x, w = torch.randn(4, 8), torch.randn(8, 8)
    graph = graph_of(function, x, w)
    assert kinds(graph) == ["kernel", "mm", "kernel"]
    assert torch.equal(graph(x, w), function(x, w))


def test_a_set_that_would_wait_for_itself_is_split() -> None:
    """A = sin(x) feeds both a product and its sum with the product: one kernel for both would need its own result."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        return a + a @ a

    x = torch.randn(8, 8)
    graph = graph_of(function, x)
    assert kinds(graph) == ["kernel", "mm", "kernel"]
    assert torch.equal(graph(x), function(x))


def test_views_of_inputs_are_not_read() -> None:
    """Two chains that only share a partition are two kernels; a weight that is merely transposed is no input of either."""

    def function(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin().cos(), w.t(), y.t().exp()

    graph = graph_of(function, torch.randn(2, 3), torch.randn(4, 5), torch.randn(6, 7))
    kernels = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert [len(node.all_input_nodes) for node in kernels] == [1, 1]
    assert kinds(graph).count("t") == 2


def test_views_and_complex_numbers_are_left_alone() -> None:
    """A transposition launches nothing; Inductor generates no code for complex numbers."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * 2j).transpose(0, 1)

    assert "kernel" not in kinds(graph_of(function, torch.randn(4, 8, 2)))


def test_no_elementwise_operator_is_left_in_compiled_blocks(trace: Trace) -> None:
    """RoPE's two complex products a block are all that is left of the elementwise operators in the forward."""
    forward = kernels(trace, Phase.FORWARD)
    assert forward["aten.mm.default"] == 7 * LAYERS
    assert forward["aten.mul.Tensor"] == 2 * LAYERS
    assert not any(name.startswith(("prims.", "aten.silu", "aten.add", "aten.pow")) for name in forward)
    assert sum(n for name, n in forward.items() if "rms_norm" in name) == 2 * LAYERS
    assert sum(n for name, n in kernels(trace, Phase.BACKWARD).items() if "rms_norm_backward" in name) >= 2 * LAYERS
    assert not kernels(trace, Phase.RECOMPUTE)


def test_kernels_write_what_leaves_them_only(trace: Trace) -> None:
    """SwiGLU reads two tensors of tokens x hidden elements in bf16 and writes one, which is allocated for it."""
    elements = TOKENS * HIDDEN
    gates = [
        op
        for _, op in trace.operators()
        if op.phase is Phase.FORWARD
        and trace.signatures[op.signature].name.startswith("triton.triton_poi_fused")
        and [m.dtype for m in trace.signatures[op.signature].inputs] == ["bfloat16"] * 3
        and all(torch.Size(m.shape).numel() == elements for m in trace.signatures[op.signature].inputs)
    ]
    assert len(gates) == LAYERS
    made = {event.storage for event in trace.events if type(event) is Alloc}
    assert all(gate.inputs[-1] in made for gate in gates)
    assert all(type(gate) is Op and len(set(gate.inputs)) == 3 for gate in gates)


def test_the_largest_magnitude_is_part_of_its_kernel() -> None:
    """Float8's scale: abs and max are one kernel, which writes one number."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).abs().max()

    x, w = torch.randn(4, 8), torch.randn(8, 8)
    graph = graph_of(function, x, w)
    assert kinds(graph) == ["mm", "kernel"]
    assert torch.equal(graph(x, w), function(x, w))
