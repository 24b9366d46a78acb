"""Inductor for the simulated GPU: all of its decisions, none of its compilation.

Its joint-graph and post-grad passes, decompositions, lowering, scheduler (fusion and order) and buffer planning run as they
are; what it generates runs on the simulated device (`launches`). AOTAutograd's graphs are on the simulated device; Inductor
asks for ``cuda`` by name, so a graph is moved there before its post-grad passes.

With a GPU Inductor times kernels, to decide whether to pad misaligned products and which templates to take. Here a rule pads
(`pads`), and the only templates are those that no operator stands in for: flexible attention's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autosac.capture.compiler import launches
from autosac.capture.compiler.gpu import CUDA, answers
from autosac.capture.compiler.programs import GraphProgram, Programs, key_of
from autosac.capture.device import device as simulated
from autosac.capture.device.device import device_type
from autosac.capture.device.precision import matmul_allows_tf32
from autosac.target import TargetGPU

TUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
"""Settings with which Inductor measures kernels, to choose among them."""
SETTINGS: dict[str, Any] = {
    "compile_threads": 1,
    "fx_graph_cache": False,
    "triton.cudagraphs": False,
    **dict.fromkeys(TUNING, False),
}
"""Inductor's configuration in a capture: in this process, without its caches and CUDA graphs, with the kernels that it takes
where it measures none."""


programs: list[Programs] = [Programs()]
"""What has been compiled already. A list of one."""


_TEMPLATES = ("flex_attention", "flex_attention_backward")

# Half of the 16-bit products' FLOPs to a byte of memory, of data-sheet rates, as Inductor has it; by compute capability.
_BALANCE = {8: 77, 9: 148, 10: 141}


class OneKernelError(Exception):
    """A graph is nothing but flexible attention, which is one kernel: there is nothing to generate."""


def _is_attention_alone(graph: torch.fx.GraphModule) -> bool:
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return any(str(target) in _TEMPLATES for target in called) and not any(
        isinstance(op, torch._ops.OpOverload) and not _is_metadata(op) for op in called
    )


def _is_metadata(operator: torch._ops.OpOverload) -> bool:
    """Views, and what takes a gradient apart."""
    return operator.is_view or operator.namespace == "prims" or operator == torch.ops.aten.detach.default


def is_here() -> bool:
    """Inductor generates Triton code only where Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Any, gpu: TargetGPU, **options: Any
) -> Callable[[list[Any]], Any]:
    """The program that Inductor makes of a forward or backward graph: a callable that empties its list of inputs.

    `options` are those of ``compile_fx_inner``. OneKernelError, and any exception of Inductor's.
    """
    import torch._inductor.compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.utils import set_tracing_context_output_strides
    from torch._inductor.virtualized import V

    compile_fx: Any = torch._inductor.compile_fx
    if _is_attention_alone(graph):
        raise OneKernelError
    options = {"static_input_idxs": (), **options, "cudagraphs": compile_fx.BoxedBool(False)}
    on_cuda = _on_cuda(graph)
    moved = [_moved(x) for x in inputs]
    with (
        _disable_current_modes(),
        V.set_debug_handler(DebugContext()),
        answers(gpu),
        launches.recorded() as modules,
    ):
        key = key_of(on_cuda, moved, options)
        known = programs[0].get(key) if key is not None else None
        if known is not None:
            strides: Any = known  # all that is asked of a compiled graph
            set_tracing_context_output_strides(moved, strides)
            return modules.run(known.text)
        compiled: Any = compile_fx._InProcessFxCompile().codegen_and_compile(on_cuda, moved, [], options)
        set_tracing_context_output_strides(moved, compiled)
        text = modules.only_text()
        if key is not None and text is not None:
            programs[0].put(key, GraphProgram(text, compiled.output_strides))
    program: Callable[[list[Any]], Any] = compiled.current_callable
    return program


def make_ready(gpu: TargetGPU) -> None:
    """`warm_up`, where Inductor is. Captures say why they cannot compile."""
    if is_here():
        with contextlib.suppress(Exception):
            warm_up(gpu)


def warm_up(gpu: TargetGPU) -> None:
    """Compile a small graph, for a process that forks captures: patterns, imports and caches of Inductor's then are there.

    Without gradients: they would start autograd's threads, which a fork does not survive. Any exception of Inductor's.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    def small(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.nn.functional.rms_norm(x.float(), (64,)).to(x.dtype) @ weight
        gated = torch.nn.functional.silu(product) * product
        return (gated @ weight.t() + x).view(4, 16, 64).transpose(0, 1).contiguous(), gated.float().sum(0)

    def compile_inner(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        return compile_graph(graph, inputs, gpu, **options)

    with FakeTensorMode(), torch.no_grad():
        inputs = [torch.empty(64, 64, dtype=torch.bfloat16, device=device_type()) for _ in range(2)]
        graph = torch.fx.symbolic_trace(small)
        with functorch_config.patch(enable_autograd_cache=False), constants_on_host():
            compile_fx.compile_fx(graph, inputs, inner_compile=compile_inner, config_patches=SETTINGS)


def pads(
    _match: Any, mat1: torch.Tensor, mat2: torch.Tensor, _operator: Any, _input: torch.Tensor | None = None
) -> bool:
    """Whether Inductor pads a product whose sizes are not aligned. With a GPU it measures both.

    It does so where computing takes longer than memory; what it then finds is that tensor cores want the dimension aligned
    that lies in a row, of each operand and of the result. Other kernels do not care.
    """
    from torch._inductor.fx_passes.pad_mm import get_alignment_size

    m, k, n = mat1.shape[-2], mat1.shape[-1], mat2.shape[-1]
    if mat1.dtype == torch.float32 and not matmul_allows_tf32():
        return False
    rows = (k if mat1.stride(-1) == 1 else m, n if mat2.stride(-1) == 1 else k, n)
    bound = _BALANCE.get(simulated.stood_for.compute_capability[0], _BALANCE[9])
    is_compute_bound = m * k * n > bound * (m * k + k * n + m * n)
    return is_compute_bound and any(row % get_alignment_size(mat1) for row in rows)


@contextlib.contextmanager
def features_of_cuda() -> Iterator[None]:
    """Decompositions, which run before a graph is moved to ``cuda``, ask what the simulated device's code generation can do
    (`masked_scatter`): what CUDA's can.
    """
    from torch._inductor.codegen import common

    original = common.get_scheduling_for_device

    def scheduling(device: str) -> Any:
        return original(CUDA.type if device == device_type() else device)

    with mock.patch.object(common, "get_scheduling_for_device", scheduling):
        yield


@contextlib.contextmanager
def without_measuring() -> Iterator[None]:
    """Inductor's passes, before it generates code, measure nothing."""
    from torch._inductor.fx_passes import pad_mm

    def on_device(*tensors: torch.Tensor) -> bool:
        return all(tensor.device.type == device_type() for tensor in tensors)

    with mock.patch.multiple(pad_mm, _should_pad=pads, check_device=on_device, has_triton=lambda: True):
        yield


def _moved(value: Any) -> Any:
    """The same on ``cuda``, if it is on the simulated device: a device or a fake tensor."""
    if isinstance(value, torch.device) and value.type == device_type():
        return CUDA
    if isinstance(value, FakeTensor) and value.device.type == device_type():
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, CUDA)
    return value


def _on_cuda(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of the graph and of those inside it. (Modes would take the copies of its constants for fake ones.)"""
    with _disable_current_modes():
        graph = copy.deepcopy(graph)
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args = torch.fx.node.map_aggregate(node.args, _moved)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _moved)
                if "val" in node.meta:
                    node.meta["val"] = pytree.tree_map(_moved, node.meta["val"])
            module.recompile()
    return graph


class _OnHost(TorchDispatchMode):
    """Computes constants on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = torch.fx.node.map_aggregate((args, kwargs or {}), moved)
        return func(*args, **kwargs)


@contextlib.contextmanager
def constants_on_host() -> Iterator[None]:
    """While this is entered, constants of graphs are on the host, those that tracing follows (``torch.tensor(0.5,
    device="cuda")``) and those that Inductor folds: the simulated device computes nothing.
    """
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
    from torch.fx.experimental import proxy_tensor

    @contextlib.contextmanager
    def real() -> Iterator[Any]:
        with unset_fake_temporarily() as mode, _OnHost():  # type: ignore[no-untyped-call]
            yield mode

    def on_host(original: Any) -> Any:
        @functools.wraps(original)
        def call(self: Any, *args: Any) -> Any:
            with _OnHost():  # type: ignore[no-untyped-call]
                return original(self, *args)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(proxy_tensor, "unset_fake_temporarily", real))
        for name in ("_deduce_value", "_add_peephole_patterns"):
            stack.enter_context(mock.patch.object(Folder, name, on_host(getattr(Folder, name))))
        yield
