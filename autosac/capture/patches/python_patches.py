"""Python-level patches for what has no dispatcher hook. Each says why it is needed and for which versions.

They are installed in the capture process only, never in a user's training process. tests/capture has a canary for each.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from autosac.capture.compiler import partition as compiled
from autosac.capture.device import kernels
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.patches import speedups, without_triton
from autosac.capture.record.recorder import Recorder
from autosac.target import TargetGPU


def import_patched() -> None:
    """Import what `install` will patch: a process that forks captures pays for it once (1.2 of a small capture's 1.6 s)."""
    names = ["torch._dynamo", "torch._dynamo.config", "torch.nn.attention.flex_attention"]
    if dist.is_available():
        names += ["torch.distributed.pipelining._backward", "torch.distributed.tensor", "torch.nn.parallel.distributed"]
    if importlib.util.find_spec("triton") is not None:
        names += ["triton.runtime.autotuner", "triton.runtime.jit"]
    for name in names:
        importlib.import_module(name)


def install(mode: SimulatedDeviceMode, recorder: Recorder) -> None:
    """Patches that every capture needs."""
    _module_calls(recorder)
    _autograd_engine(recorder)
    _optimizer_steps(recorder)
    _storage_resize(recorder)
    _optimizer_foreach(mode.target)
    _module_conversions()
    _deep_copies()
    _autocast_exit()
    _convolution_layout(mode)
    _storage_pointers()
    _sharding_propagation(mode)
    speedups.install(recorder)
    if dist.is_available():
        _work_wait(recorder)
        _ddp(recorder)
    _triton_launches(recorder)
    _flex_attention_device()
    if mode.target != "cpu":
        compiled.install()


def _module_calls(recorder: Recorder) -> None:
    """Module entry and exit; `always_call`, because early-stopped recomputation leaves by an exception."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    # Dynamo traces global hooks into its graphs; there they shall do nothing.
    def enter(module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            recorder.enter_module(module, args)

    def leave(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            recorder.exit_module()

    register_module_forward_pre_hook(enter)
    register_module_forward_hook(leave, always_call=True)


def _autograd_engine(recorder: Recorder) -> None:
    """The one place where Tensor.backward and autograd.grad enter the engine (torch 2.11 to 2.13)."""
    import torch.autograd as autograd
    import torch.autograd.graph as graph

    engine = graph._engine_run_backward
    run = functools.partial(recorder.run_backward, engine)
    graph._engine_run_backward = run
    autograd._engine_run_backward = run
    import torch.distributed.pipelining._backward as pipelining_backward

    if hasattr(pipelining_backward, "_engine_run_backward"):
        pipelining_backward._engine_run_backward = run


def _optimizer_steps(recorder: Recorder) -> None:
    """Public global hooks; no patch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.enter_optimizer(optimizer))
    register_optimizer_step_post_hook(lambda *_: recorder.exit_optimizer())


def _storage_resize(recorder: Recorder) -> None:
    """FSDP2 frees and re-allocates unsharded parameters by resizing their storage, below every dispatch mode."""
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        recorder.resized(self, size)
        return result

    torch.UntypedStorage.resize_ = resize_


def _optimizer_foreach(target: str) -> None:
    """FakeTensor is not among the tensor types for which optimizers and gradient clipping take their foreach form.

    CUDA runs that form, and its temporaries are as large as all gradients; the CPU runs the for-loop form.
    """
    if target == "cpu":
        return
    import torch.utils._foreach_utils as foreach_utils
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer

    optimizer._foreach_supported_types.append(FakeTensor)
    foreach_utils._foreach_supported_types.append(FakeTensor)


def _storage_pointers() -> None:
    """Jobs compare storages by their pointers (torchao's parameters under FSDP2). Those of fake tensors have none."""
    original = torch.UntypedStorage.data_ptr

    def data_ptr(self: torch.UntypedStorage) -> int:
        try:
            return original(self)
        except RuntimeError:
            return self._cdata

    torch.UntypedStorage.data_ptr = data_ptr


def _convolution_layout(mode: SimulatedDeviceMode) -> None:
    """On CUDA, cuDNN returns channels-last for channels-last (`cudnn_conv_suggest_memory_format`); here is no cuDNN.

    FakeTensorMode asks for the layout of a convolution's outputs and gradients here.
    """
    if mode.target == "cpu" or not hasattr(torch._C, "_conv_determine_backend_memory_format"):
        return
    from torch._prims_common import suggest_memory_format

    def determine(input: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.memory_format:
        wide = torch.float64 in (input.dtype, weight.dtype)
        for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if weight.dim() == dimensions and not wide:
                suggested = suggest_memory_format(input), suggest_memory_format(weight)
                return layout if layout in suggested else torch.contiguous_format
        return torch.contiguous_format

    torch._C._conv_determine_backend_memory_format = determine


def _module_conversions() -> None:
    """`Module.to` swaps fake parameters (torch 2.13), which weak references to them forbid; real ones get new data.

    For real tensors of one type `.to(device)` and `.to(dtype)` set the data and leave the parameter's identity alone. On
    the simulated GPU a module comes from the CPU as another type of tensor and gets new parameters, as it does on CUDA.
    """
    import torch.utils as utils
    from torch._subclasses.fake_tensor import FakeTensor

    original = utils.swap_tensors

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if isinstance(t1, FakeTensor) and isinstance(t2, FakeTensor) and t1.device == t2.device:
            t1.data = t2.data
        else:
            original(t1, t2)

    utils.swap_tensors = swap_tensors


def _deep_copies() -> None:
    """Copies of modules (`nn.Transformer` makes its layers so): a simulated tensor is copied by an operator, as a real one is.

    Python would copy its mode as well, which cannot be copied. torch 2.11 to 2.13.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    def deep_copy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only tensors that the user made can be copied deeply (leaves of the graph)")
            with torch.no_grad():
                copied = self.detach().clone(memory_format=torch.preserve_format)
            if isinstance(self, torch.nn.Parameter):
                made: torch.Tensor = torch.nn.Parameter(copied, self.requires_grad)
            else:
                made = copied.requires_grad_(self.requires_grad)
            if self.grad is not None:
                made.grad = deep_copy(self.grad, memo)
            memo[id(self)] = made
        found: torch.Tensor = memo[id(self)]
        return found

    FakeTensor.__deepcopy__ = deep_copy


def _autocast_exit() -> None:
    """Leaving autocast clears C++'s cache of cast weights; the simulated device's cache has to follow."""
    original = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        original()
        kernels.clear_autocast_weights()

    torch.clear_autocast_cache = clear_autocast_cache


def _sharding_propagation(mode: SimulatedDeviceMode) -> None:
    """DTensor infers global output shapes by running operators on fake tensors under the active fake mode, ours.

    They are no work of the device (120 GiB of phantom tensors on Llama-3 8B).
    """
    if not dist.is_available():
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, op_schema: Any) -> Any:
        with mode.unrecorded():
            return original(self, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate


def _work_wait(recorder: Recorder) -> None:
    """Work.wait() and the grouping of batched transfers are invisible to the dispatcher: link a Work to its collective."""
    works: dict[int, tuple[Any, int]] = {}  # holds the Work, so that its id stays its own

    def link(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = recorder.last_work
            work = method(self, *args, **kwargs)
            if work is not None and recorder.last_work >= before:
                works[id(work)] = (work, recorder.last_work)
            return work

        return call

    for name in (
        "send",
        "recv",
        "allreduce",
        "broadcast",
        "_allgather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "alltoall_base",
        "alltoall",
        "allgather",
        "reduce_scatter",
        "barrier",
    ):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, link(getattr(dist.ProcessGroup, name)))
    fake_work = torch._C._distributed_c10d.FakeWork
    original_wait = fake_work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = works.pop(id(self), None)
        if known is not None:
            recorder.work_wait(known[1])
        return original_wait(self, *args, **kwargs)

    fake_work.wait = wait
    original_batch = distributed_c10d.batch_isend_irecv

    def batch_isend_irecv(operations: Any) -> Any:
        recorder.begin_batch()
        try:
            return original_batch(operations)
        finally:
            recorder.end_batch()

    distributed_c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv


def _ddp(recorder: Recorder) -> None:
    """DDP compares parameter shapes by reading data in C++, and its reducer wants tensors in the all-reduce's future.

    The fake process group's future is empty: a communication hook in Python issues the same collective.
    """
    import torch.nn.parallel.distributed as ddp

    ddp._verify_param_shape_across_processes = lambda *_, **__: None
    original = ddp.DistributedDataParallel.__init__

    def hook(group, bucket):  # type: ignore[no-untyped-def] # DDP checks the annotations of its hooks
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer, group=group, async_op=True)
        # At the backward's end, before the reducer's own callback copies the results into the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder.uses_ddp = True
        self.register_comm_hook(self.process_group, hook)

    ddp.DistributedDataParallel.__init__ = init


def _triton_launches(recorder: Recorder) -> None:
    """User-written Triton kernels are launched below the dispatcher: record them, do not compile them."""

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        recorder.triton_kernel(getattr(self.fn, "__name__", "kernel"), [*args, *kwargs.values()])

    def run_first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = self.configs[0].all_kwargs() if self.configs else {}
        return self.fn.run(*args, **kwargs, **chosen)

    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:
        without_triton.JITFunction.run = run  # type: ignore[method-assign]
        return
    JITFunction.run = run
    Autotuner.run = run_first_config


def _flex_attention_device() -> None:
    """flex_attention() refuses device types that it does not know."""
    import torch.nn.attention.flex_attention as flex

    if hasattr(flex, "_validate_device"):
        flex._validate_device = lambda *_, **__: None


def install_torchtitan(gpu: TargetGPU) -> None:
    """TorchTitan asks torch.cuda directly for the capability (float8, grouped mm); models import the function by name.

    So the function's code is replaced, not its name. torchtitan 0.2.2.
    """
    import torchtitan.tools.utils as utils

    utils._autosac_capability = gpu.compute_capability

    def has_cuda_capability(major: int, minor: int) -> bool:
        return _autosac_capability >= (major, minor)  # type: ignore[name-defined] # noqa: F821

    utils.has_cuda_capability.__code__ = has_cuda_capability.__code__


def install_torchao(gpu: TargetGPU) -> None:
    """Upon its import torchao (0.15) declares its MXFP8 kernels where it finds a Blackwell GPU.

    Its modules import the functions that they ask by name: before they are imported these answer for the simulated GPU.
    """
    with contextlib.suppress(ImportError):  # the job says so itself
        utils = importlib.import_module("torchao.utils")
        for name, capability in (("89", (8, 9)), ("90", (9, 0)), ("100", (10, 0))):
            answer = gpu.compute_capability >= capability
            setattr(utils, f"is_sm_at_least_{name}", functools.partial(bool, answer))
        setattr(utils, "is_cuda_version_at_least", lambda *_: True)  # noqa: B010 # a module of any kind
