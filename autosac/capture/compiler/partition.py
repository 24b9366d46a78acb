"""torch.compile: Dynamo, AOTAutograd and the min-cut partitioner run as they are; only Inductor's code generation is replaced.

The compiled callable interprets the partitioned graph on the simulated device, with Inductor's kernels in place of the
operators that it would fuse (fusion.py).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from autosac.capture.device.device import key_of


def install(target: str) -> None:
    """Replace Inductor in this process, for graphs on the device type `target`."""
    from torch._higher_order_ops.wrap import inductor_compiled_code

    with contextlib.suppress(RuntimeError, AssertionError):  # registered already, in some versions
        inductor_compiled_code.fallthrough(getattr(torch._C.DispatchKey, f"Autograd{key_of(target)}"))

    def compile_graph(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
        return _backend(model, inputs, getattr(self, "config", None) or {})

    wrapper: Any = torch._TorchCompileInductorWrapper
    wrapper.__call__ = compile_graph
    _compile_without_modes()
    import torch._dynamo.config as dynamo_config

    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 64)


def _compile_without_modes() -> None:
    """Dynamo leaves all dispatch modes while it compiles, but not where DDP splits the graph."""
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch.utils._python_dispatch import _disable_current_modes

    converter: Any = ConvertFrameAssert
    original = converter.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    converter.__call__ = call


def _backend(graph: Any, inputs: Any, options: dict[str, Any]) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    compiler = functools.partial(_interpret, as_region=bool(options.get("wrap_inductor_compiled_regions")))
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        keep_inference_input_mutations=True,
    )(graph, inputs)


def _interpret(graph: Any, _: Any, *, as_region: bool) -> Any:
    """A boxed callable that runs the graph, and lets go of each value with its last use."""
    from autosac.capture.compiler.fusion import fuse

    graph = fuse(graph)

    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(graph).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    if not as_region:
        return run
    from torch._higher_order_ops import wrap

    callable_type = getattr(wrap, "InductorCompiledCallable", None)
    region = callable_type(run, graph) if callable_type is not None else run

    def run_region(args: list[Any]) -> Any:
        return wrap.inductor_compiled_code(region, list(args))

    run_region._boxed_call = True  # type: ignore[attr-defined]
    return run_region
