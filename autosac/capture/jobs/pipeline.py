"""Pipeline stages without their neighbours.

On the first step the stages tell each other the shapes of what they exchange, as pickled Python objects over point-to-point
transfers, and vote on whether they have to. The neighbours do not exist here. What a stage receives is taken from
`received`, the shapes that another capture's first stage has sent (uniform over the stages of every supported model); what
it would receive as gradients follows from its own outputs. What this rank sends is kept in `sent`, for the trace's info.

torch 2.11 and 2.12 exchange tuples of meta tensors (`recv_object_list` within `PipelineStage._shape_inference`), torch 2.13
objects of its own (`_recv_meta`, `_send_meta`).

`overlapped_in_order`: TorchTitan's DualPipeV issues one microbatch's backward from a second thread while another's forward
runs. Which operator comes first is then up to the interpreter: two captures would differ, and phases would mix. A capture
issues the backward first, then the forward; all the same work, without the interleaving of the two.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from autosac.errors import FirstStageError
from autosac.trace import TensorLayout

Shapes: TypeAlias = "tuple[TensorLayout, ...]"


class StageMetadata:
    """The exchange of shapes, answered locally."""

    def __init__(self) -> None:
        self.received: Shapes | None = None
        self.sent: Shapes | None = None
        self.on_sent: Callable[[Shapes], None] = lambda _: None  # called for the first
        self.on_inferred: Callable[[], None] = lambda: None  # the shapes have been found by running the stage

    def install(self) -> None:
        """Patch the pipeline stages of this process."""
        from torch.distributed.pipelining import stage

        if hasattr(stage.PipelineStage, "_recv_meta"):
            self._install_objects(stage)
        else:
            self._install_tuples(stage)
        for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
            self._tell_after(stage.PipelineStage, name)

    def _tell_after(self, stage_class: Any, name: str) -> None:
        original = getattr(stage_class, name)

        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.on_inferred()
            return result

        setattr(stage_class, name, prepare)

    def _incoming(self) -> Shapes:
        known = self.received or self.sent
        if known is None:
            raise FirstStageError(
                "a later pipeline stage was captured before the first: capture the rank of stage 0 first"
            )
        return known

    def _install_objects(self, stage: Any) -> None:
        """Torch 2.13."""
        from torch.distributed.pipelining import _utils

        def receive(this: Any, source: int) -> Any:
            if source > this.stage_index:
                gradients = _utils._derive_grad_metas(this._stage_meta.outputs)
                return _utils._StageBackwardMeta(backward_metas=gradients)
            metas: tuple[Any, ...] = tuple(
                _utils._TensorMeta(
                    shape=torch.Size(shape), stride=stride, dtype=getattr(torch, dtype), requires_grad=True
                )
                for shape, stride, dtype in self._incoming()
            )
            return _utils._StageForwardMeta(forward_metas=metas)

        def send(this: Any, meta: Any, destination: int) -> None:
            if destination > this.stage_index:
                self._keep(meta.forward_metas)

        def vote(*_: Any, **__: Any) -> torch.Tensor:
            return torch.zeros(1, dtype=torch.int32)  # 0: infer the shapes by running

        stage.PipelineStage._recv_meta = receive
        stage.PipelineStage._send_meta = send
        stage.PipelineStage._warmup_forward_vote = vote
        stage.PipelineStage._warmup_backward_result = vote

    def _install_tuples(self, stage: Any) -> None:
        """Torch 2.11 and 2.12."""

        def receive(objects: list[Any], *_: Any, **__: Any) -> None:
            objects[0] = tuple(
                torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
                for shape, stride, dtype in self._incoming()
            )

        def send(objects: list[Any], *_: Any, **__: Any) -> None:
            self._keep(objects[0])

        stage.dist.recv_object_list = receive
        stage.dist.send_object_list = send

    def _keep(self, tensors: Any) -> None:
        first = self.sent is None
        self.sent = tuple(
            (
                tuple(map(int, t.shape)),
                tuple(map(int, t.stride if isinstance(t.stride, tuple) else t.stride())),
                str(t.dtype).removeprefix("torch."),
            )
            for t in tensors
        )
        if first:
            self.on_sent(self.sent)


class _InlineThread:
    """A thread that does its work where it is started."""

    def __init__(self, *, target: Callable[[], None], **_: Any) -> None:
        self.start = target

    def join(self) -> None:
        """It has ended."""


def overlapped_in_order() -> None:
    """See the module's docstring. torchtitan 0.2.2."""
    from torchtitan.distributed import dual_pipe_v

    dual_pipe_v.threading = SimpleNamespace(**{**vars(threading), "Thread": _InlineThread})
    # The two threads meet at barriers in each MoE layer; alone, one would wait there for ever.
    dual_pipe_v.HookCoordinator.enable_coordination = lambda *_, **__: None
