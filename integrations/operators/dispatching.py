"""What makes dispatch modes cheap where every operator goes through them."""

from __future__ import annotations


def skipped_by_dynamo(cls: type) -> None:
    """Mark a mode's __torch_dispatch__, and all it calls, as nothing to compile: it runs between the graphs of compiled code,
    too.

    TorchDispatchMode wraps it in torch._disable_dynamo, which does the same and costs 8 us a call.
    """
    from torch._C._dynamo import eval_frame

    function = cls.__dict__["__torch_dispatch__"]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    cls.__torch_dispatch__ = function  # type: ignore[attr-defined]
