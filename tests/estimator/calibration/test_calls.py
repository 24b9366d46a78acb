"""From signatures back to calls that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.estimator.calibration.calls import NotReplayable, build_call
from autosac.estimator.calibration.shapes import distinct
from autosac.estimator.calibration.sweep import Scale, sweep_step
from autosac.trace import Op

CPU = torch.device("cpu")


@pytest.mark.parametrize(("target", "place", "dtype"), [("cpu", "cpu", torch.float32), ("gpu", "meta", torch.bfloat16)])
def test_every_operator_of_the_sweep_can_be_called_again(target: str, place: str, dtype: torch.dtype) -> None:
    """One small round of all layers: each call's results have the shapes and types that were captured, on a CPU by running
    it, and of what CUDA would dispatch by the operators' shape functions.
    """
    scale = Scale(elements=2**12, flops=1e6, dtypes=(dtype,))
    trace = capture_eager(sweep_step(scale, 1), EagerRequest(target=target))
    signatures = distinct([trace.signatures[event.signature] for event in trace.events if type(event) is Op])
    assert len(signatures) > 100
    for signature in signatures:
        result = build_call(signature, torch.device(place)).run()
        found = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, torch.Tensor)]
        wanted = [(m.shape, m.dtype) for m in signature.outputs]
        assert [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in found] == wanted, signature.name


def test_optional_tensors_are_left_out(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """LayerNorm without weight and bias: the second tensor argument is None, not a tensor of another place."""
    call = build_call(
        op(
            "native_layer_norm.default",
            [meta((4, 8))],
            [meta((4, 8)), meta((4, 1)), meta((4, 1))],
            normalized_shape=(8,),
            eps=1e-5,
        ),
        CPU,
    )
    assert call.args[2] is None and call.args[3] is None
    assert call.run()[0].shape == (4, 8)


def test_lists_share_the_tensors(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """A foreach operator of two lists gets the first half and the second half."""
    tensors = [meta((2,)), meta((3,)), meta((2,)), meta((3,))]
    call = build_call(op("_foreach_add.List", tensors, tensors[:2]), CPU)
    assert [[tuple(t.shape) for t in part] for part in call.args[:2]] == [[(2,), (3,)], [(2,), (3,)]]


def test_indices_stay_inside(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """An embedding's indices are below its number of rows."""
    call = build_call(op("embedding.default", [meta((5, 2)), meta((1000,), "int64")], [meta((1000, 2))]), CPU)
    assert int(call.args[1].min()) >= 0 and int(call.args[1].max()) < 5
    call.run()


def test_strides_are_kept(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """A transposed operand is transposed again."""
    call = build_call(op("mm.default", [meta((4, 8), stride=(1, 4)), meta((8, 2))], [meta((4, 2))]), CPU)
    assert call.args[0].stride() == (1, 4)


@pytest.mark.parametrize("name", ["no_such_operator.default", "mm.no_such_overload"])
def test_unknown_operators(op: Callable[..., Any], meta: Callable[..., Any], name: str) -> None:
    """An operator that this PyTorch does not have cannot be replayed, and says so."""
    with pytest.raises(NotReplayable, match="has no operator"):
        build_call(op(name, [meta((2, 2))], [meta((2, 2))]), CPU)


def test_a_missing_tensor(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """A product of one tensor cannot be replayed."""
    with pytest.raises(NotReplayable, match="missing"):
        build_call(op("mm.default", [meta((2, 2))], [meta((2, 2))]), CPU)
