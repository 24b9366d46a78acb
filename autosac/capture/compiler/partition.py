"""torch.compile: Dynamo, AOTAutograd, the min-cut partitioner and Inductor run as they are, up to the compilation of kernels.

A graph that Inductor does not take (it would need a GPU, or Triton is missing) is interpreted on the simulated device, with
fused kernels in place of the operators that Inductor would fuse (fusion.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.compiler import inductor
from autosac.capture.compiler.inherited import FirstRun
from autosac.capture.compiler.losses import Losses
from autosac.capture.device import device as simulated
from autosac.capture.device.device import key_of
from autosac.integrations.apply import PlanMismatchWarning

_LONGEST = 200  # characters of an error in a report
# What runs below operators. Dynamo may have to trace other modules: those that stand for functions of ``torch.cuda``.
_KERNELS = (
    *(
        f"device.{name}"
        for name in ("attention", "cache", "kernels", "mode", "recipes", "recurrent", "shadows", "values")
    ),
    "record",
)

# What stands for PyTorch's and CUDA's own functions, and calls no module: by itself, where a graph breaks, it is not compiled.
_BESIDE_GRAPHS = tuple(
    str(Path(__file__).parents[1] / name)
    for name in (
        *("device", "cuda", "jobs/script.py"),
        *(f"patches/{name}.py" for name in ("communication", "futures", "scripts", "tensors")),
    )
)

not_generated: dict[str, None] = {}
"""Why graphs were interpreted in this process: the reasons, in order, each of them once."""
_installed: list[str] = []
_asked_for: dict[str, None] = {}  # what Inductor was to do and does not do here


def left_out() -> tuple[str, ...]:
    """What of compiled code is not simulated as it would run, for the reader of a report."""
    notes = []
    if not_generated:
        reasons = "; ".join(not_generated)
        notes.append(f"Inductor could not compile some graphs, which are priced with approximate fusion: {reasons}")
    return (*notes, *_asked_for)


def forget_notes() -> None:
    """Nothing has been compiled yet."""
    not_generated.clear()
    _asked_for.clear()


def install(target: str) -> None:
    """Replace Inductor's compilation in this process, for graphs on the device type `target`. Once."""
    if target in _installed:
        return
    _installed.append(target)
    from torch._higher_order_ops.wrap import inductor_compiled_code

    # The CPU has one already, and so have some versions.
    with contextlib.suppress(RuntimeError, AssertionError):
        inductor_compiled_code.fallthrough(getattr(torch._C.DispatchKey, f"Autograd{key_of(target)}"))

    def compile_graph(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
        return _backend(model, inputs, getattr(self, "config", None) or {}, target)

    wrapper: Any = torch._TorchCompileInductorWrapper
    wrapper.__call__ = compile_graph
    _compile_without_modes()
    _states_of_compiled_optimizers()
    _leave_out_kernels()
    _log_nothing()
    import torch._dynamo.config as dynamo_config

    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 64)


def _note(error: Exception) -> None:
    if isinstance(error, inductor.OneKernelError):
        return
    said, _, node = str(error).partition("Original traceback")[0].partition("While executing")
    what = _first(said) or type(error).__name__
    operator = node.partition(":")[0].strip(" %")
    not_generated[f"{operator}: {what}" if operator else what] = None


def _first(said: str) -> str:
    """What an error says, without the operator's arguments that Inductor adds to it."""
    text = " ".join(said.split()).partition(" target: ")[0].partition(" Found from")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@contextlib.contextmanager
def _garbage_waits() -> Iterator[None]:
    """Python collects no garbage inside. The compiler makes millions of objects that live on, and each collection looks at
    them again: a tenth of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compile_without_modes() -> None:
    """Dynamo leaves all dispatch modes while it compiles, but not where DDP splits the graph."""
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch.utils._python_dispatch import _disable_current_modes

    converter: Any = ConvertFrameAssert
    original = converter.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), _garbage_waits():
            return original(self, *args, **kwargs)

    converter.__call__ = call


def _leave_out_kernels() -> None:
    """Where a graph breaks, operators run outside of graphs. What stands for their kernels is Python here, and Dynamo would
    try to compile it: each frame of it, in vain.
    """
    from torch._dynamo import trace_rules

    *others, last = (f"autosac.capture.{name}" for name in _KERNELS)
    compiles = hasattr(trace_rules, "_recompile_re")  # one expression of all names, each time one is added
    with mock.patch.object(trace_rules, "_recompile_re", lambda: None) if compiles else contextlib.nullcontext():
        for name in others:
            trace_rules.add(name)
    trace_rules.add(last)
    _trace_no_frames_of(trace_rules)


def _trace_no_frames_of(trace_rules: Any) -> None:
    """Hooks of FSDP, say, make a stream or ask for the data of a tensor, which is no Python outside of here. What user code
    calls is still traced with it.
    """
    original = trace_rules.check

    @functools.wraps(original)
    def check(obj: Any, is_inlined_call: bool = False, *args: Any, **kwargs: Any) -> bool:
        if not is_inlined_call and isinstance(obj, types.CodeType) and obj.co_filename.startswith(_BESIDE_GRAPHS):
            return True
        return bool(original(obj, is_inlined_call, *args, **kwargs))

    trace_rules.check = check


def _log_nothing() -> None:
    """For its logs Dynamo reads the files of all functions that it traces token by token, and times the guards of each graph
    beside 32 MiB that it writes before: a tenth of the time of a small compiled capture.
    """
    from torch._dynamo import guards, symbolic_convert

    for module, name, answer in ((symbolic_convert, "get_funcname", None), (guards, "profile_guard_manager", 0.0)):
        if name in vars(module):
            vars(module)[name] = lambda *_, answer=answer: answer


def _states_of_compiled_optimizers() -> None:
    """Dynamo makes an optimizer's states while it compiles its step, outside of all modes: here in that of its parameters."""
    from torch._dynamo.variables import optimizer as dynamo

    vars(dynamo)["_is_static_for_cudagraphs"] = lambda _: True  # it imports what only a build with CUDA has
    variable: Any = dynamo.OptimizerVariable
    call_method, move_step = variable.call_method, variable.move_step_if_cpu

    def mode_of(optimizer: torch.optim.Optimizer) -> Any:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return next((p.fake_mode for p in parameters if isinstance(p, FakeTensor)), contextlib.nullcontext())

    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        init_group = getattr(self.value, name, None) if name == "_init_group" else None
        if init_group is None:
            return call_method(self, tx, name, args, kwargs)

        def in_mode(*args: Any, **kwargs: Any) -> Any:
            with mode_of(self.value):
                return init_group(*args, **kwargs)

        self.value._init_group = in_mode
        try:
            return call_method(self, tx, name, args, kwargs)
        finally:
            del self.value._init_group

    def move(self: Any) -> None:
        with mode_of(self.value):
            move_step(self)

    variable.call_method, variable.move_step_if_cpu = call, move


def _backend(graph: Any, inputs: Any, options: dict[str, Any], target: str) -> Any:
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    style = _Style(bool(options.get("wrap_inductor_compiled_regions")), bool(options.get("triton.cudagraphs")))
    if options.get("triton.cudagraphs"):
        _asked_for[
            "the CUDA graphs of compiled code are launched from their first call on; their inputs are not copied"
        ] = None
    if any(map(options.get, inductor.TUNING)):
        _asked_for["compiled code has the kernels that Inductor chooses without tuning, which needs a GPU"] = None
    if target == "cpu":
        not_generated["its code for CPUs is not generated"] = None
    elif inductor.is_here():
        try:
            return _generate(graph, inputs, options, style)
        except (RestartAnalysis, PlanMismatchWarning):  # Dynamo traces once more; a step does not follow its plan
            raise
        except SkipFrame as e:  # as with a GPU: what Inductor skips is not compiled
            _asked_for[f"code that Inductor skips runs uncompiled: {e}"] = None
            raise
        except Exception as e:
            _note(e)
    return _partition(graph, inputs, style)


class _Style(NamedTuple):
    """How compiled code runs: as an operator of its own for dispatch modes, as CUDA graphs."""

    as_region: bool
    as_graph: bool


def _generate(graph: Any, inputs: Any, options: dict[str, Any], style: _Style) -> Any:
    """By Inductor. Its exceptions; for those of code generation only the graph that it fails for is interpreted."""
    from torch._dynamo.exc import SkipFrame
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx

    def compile_inner(graph: Any, inputs: Any, **options: Any) -> Any:
        losses = Losses(graph)  # before its operators are fused
        try:
            with _garbage_waits():
                program = inductor.compile_graph(graph, inputs, simulated.stood_for, **options)
            return _boxed(program, graph, style, losses)
        except SkipFrame:
            raise
        except Exception as e:
            _note(e)
            return _interpret(graph, inputs, style=style)

    # On CUDA, a random operator that runs twice has a generator of its own for each of them, which is no tensor of the graph.
    kept = mock.patch(
        "torch._functorch.partitioners.functionalize_rng_ops", lambda _, forward, backward, __: (forward, backward)
    )
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor.constants_on_host(),
        inductor.features_of_cuda(),
        inductor.without_measuring(),
        kept,
    ):
        settings = {**options, **inductor.SETTINGS}
        return compile_fx.compile_fx(graph, inputs, inner_compile=compile_inner, config_patches=settings)


def _partition(graph: Any, inputs: Any, style: _Style) -> Any:
    """By AOTAutograd and the min-cut partitioner."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    compiler = functools.partial(_interpret, style=style)
    compile_graph = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        keep_inference_input_mutations=True,
    )
    with inductor.constants_on_host(), inductor.features_of_cuda():
        return compile_graph(graph, inputs)


def _interpret(graph: Any, _: Any, *, style: _Style) -> Any:
    """Runs the graph, and lets go of each value with its last use."""
    from autosac.capture.compiler.fusion import fuse

    fused = fuse(graph)
    return _boxed(lambda args: torch.fx.Interpreter(fused).boxed_run(args), fused, style)


def _boxed(program: Callable[[list[Any]], Any], graph: Any, style: _Style, losses: Losses | None = None) -> Any:
    """A boxed callable; an operator of its own for dispatch modes, as Inductor makes it if it is asked to."""
    first_run = FirstRun()

    def run(args: list[Any]) -> Any:
        first_run()
        at_once = style.as_graph and all(
            x.device.type == simulated.device_type() for x in args if isinstance(x, torch.Tensor)
        )
        if losses is not None:
            losses.read(args)
        with simulated.log.launched_at_once() if at_once else contextlib.nullcontext():
            results = program(args)
        if losses is not None:
            losses.tell(results)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    if not style.as_region:
        return run
    from torch._higher_order_ops import wrap

    callable_type = getattr(wrap, "InductorCompiledCallable", None)
    region = callable_type(run, graph) if callable_type is not None else run

    def run_region(args: list[Any]) -> Any:
        return wrap.inductor_compiled_code(region, list(args))

    run_region._boxed_call = True  # type: ignore[attr-defined]
    return run_region
