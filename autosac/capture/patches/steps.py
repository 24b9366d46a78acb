"""Where a training step's modules, backward, optimizer and autocast begin and end."""

from __future__ import annotations

import functools
from typing import Any

import torch

from autosac.capture.device import kernels
from autosac.capture.patches import module_calls
from autosac.capture.patches.registry import Patched, patch
from autosac.capture.patches.untraced import untraced


@patch(
    "torch.nn.modules.module:register_module_forward_hook",
    "torch.nn.modules.module:register_module_forward_pre_hook",
    "torch.nn:Module.compile",
)
def calls_of_modules(capture: Patched) -> None:
    """Where modules are entered and left, early-stopped recomputation included."""
    module_calls.follow(capture.recorder.enter_module, lambda *_: capture.recorder.exit_module())


@patch(
    "torch.autograd.graph:_engine_run_backward",
    "torch.autograd:_engine_run_backward",
)
def autograd_engine(capture: Patched) -> None:
    """The one place where Tensor.backward and autograd.grad enter the engine."""
    import torch.autograd as autograd
    import torch.autograd.graph as graph

    engine = graph._engine_run_backward
    run = functools.partial(capture.recorder.run_backward, engine)
    graph._engine_run_backward = run
    vars(autograd)["_engine_run_backward"] = run
    import torch.distributed.pipelining._backward as pipelining_backward

    if hasattr(pipelining_backward, "_engine_run_backward"):
        pipelining_backward._engine_run_backward = run


@patch("torch.utils.checkpoint:_CheckpointFrame.__init__", "torch.utils.checkpoint:CheckpointFunction.forward")
def checkpointed_functions(capture: Patched) -> None:
    """Functions that the job checkpoints, where they are kept to be run again: without and with re-entrant backwards."""
    from torch.utils import checkpoint

    frame: Any = checkpoint._CheckpointFrame
    reentrant: Any = checkpoint.CheckpointFunction
    make, forward = frame.__init__, reentrant.forward

    @functools.wraps(make)
    def init(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        make(self, capture.recorder.phases.again(recompute_fn), *args, **kwargs)

    @functools.wraps(forward)
    def run(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, capture.recorder.phases.again(run_function), *args)

    frame.__init__ = init
    reentrant.forward = staticmethod(run)


@patch(
    "torch.optim.optimizer:register_optimizer_step_pre_hook",
    "torch.optim.optimizer:register_optimizer_step_post_hook",
    "torch._C._dynamo.eval_frame:set_code_exec_strategy",
)
def optimizer_steps(capture: Patched) -> None:
    """Public global hooks, which are no part of what is compiled."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(untraced(lambda optimizer, *_: capture.recorder.enter_optimizer(optimizer)))
    register_optimizer_step_post_hook(untraced(lambda *_: capture.recorder.exit_optimizer()))


@patch(
    "torch.optim.optimizer:_foreach_supported_types.append",
    "torch.utils._foreach_utils:_foreach_supported_types.append",
)
def optimizer_foreach(capture: Patched) -> None:
    """FakeTensor is not among the tensor types for which optimizers and gradient clipping take their foreach form.

    CUDA runs that form, and its temporaries are as large as all gradients; the CPU runs the for-loop form.
    """
    if capture.mode.target == "cpu":
        return
    import torch.utils._foreach_utils as foreach_utils
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer

    optimizer._foreach_supported_types.append(FakeTensor)
    foreach_utils._foreach_supported_types.append(FakeTensor)


@patch(
    "torch:clear_autocast_cache",
)
def autocast_exit(capture: Patched) -> None:
    """Leaving autocast clears C++'s cache of cast weights; the simulated device's cache has to follow.

    C++ lets go of them in the order of their addresses, which is another one each time; they are logged in that of their
    allocations.
    """
    original = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        with capture.recorder.clearing():
            original()
            kernels.clear_autocast_weights()

    torch.clear_autocast_cache = clear_autocast_cache


# What the installed torch stops at in the real job and a capture goes on with; for the notes of the job.
stopped_by_torch: dict[str, None] = {}


@patch("torch.utils.checkpoint:_CachedTorchDispatchMode.__torch_dispatch__", "torch.autograd.profiler:record_function")
def profiler_marks_in_selective_checkpoints(_: Patched) -> None:
    """Since 2.13 selective checkpointing stops at a mark of the profiler that a recomputation makes and the forward did not.

    FSDP makes such marks: the first recomputed unit of a backward is its root, and moves its inputs to the GPU. With modules
    that are sharded inside of a checkpointed one, over one rank each (experts, where expert parallelism takes all ranks), no
    other mark of the forward makes up for them. Releases before, and those that do not count marks, train the job.
    """
    from torch.utils import checkpoint

    cached: Any = checkpoint._CachedTorchDispatchMode
    dispatch = cached.__torch_dispatch__
    profiler = torch.ops.profiler
    marks = (profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction)

    @functools.wraps(dispatch)
    def dispatch_and_go_on(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return dispatch(self, func, types, args, kwargs)
        except RuntimeError:
            if func not in marks:
                raise
            stopped_by_torch[
                "selective checkpointing counts the profiler's marks, of which FSDP makes more in the recomputation of units "
                "that it shards inside of checkpointed ones"
            ] = None
            return func(*args, **(kwargs or {}))

    cached.__torch_dispatch__ = dispatch_and_go_on


@patch("torch.random:fork_rng")
def forked_generators(_: Patched) -> None:
    """In PyTorch 2.12 a pipeline's first step saves the generators of its stages' devices as if they were CUDA's, whatever
    they are. Devices that say what they are decide.
    """
    fork = torch.random.fork_rng

    @functools.wraps(fork)
    def fork_rng(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        devices = devices if devices is None else list(devices)
        kinds = {device.type for device in devices or () if isinstance(device, torch.device)}
        if len(kinds) == 1 and "device_type" not in kwargs:
            kwargs["device_type"] = kinds.pop()
        return fork(devices, *args, **kwargs)

    vars(torch.random)["fork_rng"] = fork_rng
