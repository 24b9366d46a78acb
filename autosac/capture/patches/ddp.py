"""DistributedDataParallel and its communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autosac.capture.patches.registry import Patched, patch


class _Hook(NamedTuple):
    """What a program has registered."""

    state: Any
    call: Callable[[Any, Any], Any]


@patch(
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    "torch.nn.parallel.distributed:DistributedDataParallel.register_comm_hook",
    "torch.nn.parallel.distributed:DistributedDataParallel._register_builtin_comm_hook",
    distributed=True,
)
def ddp(capture: Patched) -> None:
    """DDP compares parameter shapes by reading data in C++, and its reducer wants tensors in the all-reduce's future.

    The fake process group's future is empty: a communication hook in Python issues the same collective, or calls the hook
    that the program has registered.
    """
    import torch.nn.parallel.distributed as ddp

    module: Any = ddp
    module._verify_param_shape_across_processes = lambda *_, **__: None
    wrapper: Any = ddp.DistributedDataParallel
    original, register = wrapper.__init__, wrapper.register_comm_hook

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        capture.recorder.uses_ddp = True
        self._autosac_hook = None
        register(self, self, _reduce)
        self._comm_hooks.clear()
        self.logger = _Logger(self.logger)

    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        self._check_comm_hook(hook)
        if self._autosac_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._autosac_hook = _Hook(state, hook)
        self._comm_hooks.append((hook, state))

    distributed: Any = dist

    def register_builtin(self: Any, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        halves = comm_hook_type == distributed.BuiltinCommHookType.FP16_COMPRESS
        call = default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook
        register_comm_hook(self, self.process_group, call)

    wrapper.__init__, wrapper.register_comm_hook = init, register_comm_hook
    wrapper._register_builtin_comm_hook = register_builtin


def _reduce(wrapped, bucket):  # type: ignore[no-untyped-def] # DDP checks the annotations of its hooks
    """What DDP calls for each bucket."""
    hook: _Hook | None = wrapped._autosac_hook
    if hook is None:
        result = bucket.buffer()
        wait = dist.all_reduce(result, group=wrapped.process_group, async_op=True).wait
    else:
        future = hook.call(hook.state, bucket)
        result, wait = future.value(), future.wait
    # At the backward's end, before the reducer's own callback copies the results into the gradients.
    torch.autograd.Variable._execution_engine.queue_callback(wait)
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(result)
    return done


class _Logger:
    """DDP's logger without its statistics: it would take the times of CUDA events in C++."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)
