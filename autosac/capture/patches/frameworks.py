"""Kernels that frameworks bring along or expect: PyTorch's take their place. Installed for scripts only.

DeepSpeed compiles its own when a script first needs them; one that has no counterpart is an error that names it, in place of
a compiler's. Megatron-Core asks for a product of Transformer Engine without having looked for it. Checked with DeepSpeed 0.19
and Megatron-Core 0.16.

A traced stage of `torch.distributed.pipelining` is moved to its device although its parameters are simulated on the host: it
leaves modules with fake parameters where they are, as those on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from autosac.capture.patches.after_import import after_import

_BUILDERS = "deepspeed.ops.op_builder.builder"
_EXPERTS = "megatron.core.transformer.moe.moe_utils"
_STAGES = "torch.distributed.pipelining.stage"


def install(note: Callable[[str], None]) -> None:
    """As soon as they are imported. `note` receives what is not simulated."""
    after_import(_BUILDERS, lambda module: _deepspeed(module.OpBuilder, note))
    after_import(_EXPERTS, _without_transformer_engine)
    after_import(_STAGES, lambda module: setattr(module, "FakeTensor", ()))  # nothing is an instance of it


def _without_transformer_engine(module: Any) -> None:
    """Megatron-Core 0.16 has a way for a router without Transformer Engine, and forgets to say that there is none."""
    vars(module).setdefault("te_general_gemm", None)


def _deepspeed(builder: Any, note: Callable[[str], None]) -> None:
    def refuse(self: Any, verbose: bool = True) -> Any:
        raise ImportError(
            f"DeepSpeed's {self.name} is a kernel that it compiles for the GPU, which is not possible here, and it has no "
            'stand-in: choose another one in the configuration (with "torch_adam": true its Adam is PyTorch\'s)'
        )

    builder._loaded_ops.update(
        fused_adam=SimpleNamespace(multi_tensor_adam=_adam_of_lists),
        cpu_adam=_adam_on_host(note),
        utils=SimpleNamespace(flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors),
    )
    builder.jit_load = refuse


def _adam_of_lists(
    chunk: int,
    overflow: torch.Tensor,
    lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """``multi_tensor_adam``: one launch over gradients, parameters and both moments, as PyTorch's fused Adam."""
    gradients, parameters, averages, squares = lists
    steps = [_step_of(parameters[0].device)] * len(parameters)
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        *(list(parameters), list(gradients), list(averages), list(squares), [], steps),
        amsgrad=False,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


_steps: dict[torch.device, torch.Tensor] = {}


def _step_of(device: torch.device) -> torch.Tensor:
    """PyTorch's kernel has the number of the step in a tensor, DeepSpeed's as a number."""
    if device not in _steps:
        _steps[device] = torch.zeros((), device=device)
    return _steps[device]


def _adam_on_host(note: Callable[[str], None]) -> SimpleNamespace:
    """``cpu_adam``: what it computes nobody reads, since simulated gradients have no values."""

    def nothing(*_: Any) -> None:
        pass

    def update(*_: Any) -> None:
        note("the time of DeepSpeed's Adam on the host is not simulated")

    return SimpleNamespace(create_adam=nothing, destroy_adam=nothing, adam_update=update, adam_rollback=nothing)
