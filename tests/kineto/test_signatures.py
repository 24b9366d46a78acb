"""Signatures from a profiler's notes are those that a capture records."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.kineto import HostEvent, Unreadable, is_vocabulary, to_signature
from autosac.kineto.reader import Collector
from autosac.kineto.stream import members
from autosac.trace import Op, Signature

STEP = Path(__file__).with_name("profiled_step.py")


def _make_step() -> Any:
    spec = importlib.util.spec_from_file_location("profiled_step", STEP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_step


def _profiled(path: Path) -> set[Signature]:
    """Of the outermost operators of one real step on the CPU."""
    subprocess.run([sys.executable, str(STEP), str(path)], check=True, capture_output=True)
    events = Collector()
    for key, value in members(path, "traceEvents"):
        if key == "traceEvents":
            events.add(value)
    shown = sorted(filter(is_vocabulary, events.operators), key=lambda op: (op.thread, op.begin_us, -op.end_us))
    found, until = set(), {}
    for op in shown:
        if op.begin_us >= until.get(op.thread, -1.0):
            until[op.thread] = op.end_us
            if op.name not in ("aten::_local_scalar_dense", "aten::detach_"):
                found.add(to_signature(op))
    return found


@pytest.mark.capture
def test_a_real_profile_and_a_capture_of_the_same_step_agree(tmp_path: Path) -> None:
    """Every operator that launches work has the same signature in both: shapes, strides, types, scalars, overloads."""
    trace = capture_eager(_make_step(), EagerRequest(target="cpu"))
    captured = {trace.signatures[event.signature] for event in trace.events if type(event) is Op}
    captured = {s for s in captured if not s.is_view and s.name.startswith("aten.")}
    profiled = {s for s in _profiled(tmp_path / "cpu.json") if not s.is_view}
    assert captured <= profiled
    assert {s.name for s in profiled - captured} <= {"aten.fill_.Scalar"}  # optimizers' steps counted on the host


def _op(name: str, types: list[str], dims: list[Any], **args: Any) -> HostEvent:
    return HostEvent(name, 0, 0.0, 1.0, {"Input type": types, "Input Dims": dims} | args)


def test_numbers_stand_for_types_and_formats() -> None:
    """The types, layouts and formats of memory that a profiler notes by their numbers; flags stay flags."""
    noted = {"Concrete Inputs": ["", "[1]", "True", "15"]}
    summed = to_signature(_op("aten::sum", ["float", "ScalarList", "Scalar", "Scalar"], [[4, 8], [], [], []], **noted))
    assert dict(summed.arguments) == {"dim": (1,), "keepdim": True, "dtype": "bfloat16"}
    assert [(meta.shape, meta.dtype) for meta in summed.outputs] == [((4, 1), "bfloat16")]
    noted["Concrete Inputs"][3] = "99"  # of a newer PyTorch: as if none had been asked for
    summed = to_signature(_op("aten::sum", ["float", "ScalarList", "Scalar", "Scalar"], [[4, 8], [], [], []], **noted))
    assert summed.outputs[0].dtype == "float32"


def test_old_traces_imply_what_they_do_not_hold() -> None:
    """Without strides and values: a layer norm's extent is its weight's, a bias's gradient sums rows, numbers are free."""
    norm = to_signature(
        _op("aten::native_layer_norm", ["float", "", "float", "float", "Scalar"], [[8, 32], [], [32], [32], []])
    )
    assert dict(norm.arguments)["normalized_shape"] == (32,)
    assert norm.outputs[1].shape == (8, 1)
    types, dims = ["float", "", "Scalar", ""], [[8, 32], [], [], []]
    assert to_signature(_op("aten::sum", types, dims), node="AddmmBackward0").outputs[0].shape == (1, 32)
    clamp = to_signature(_op("aten::clamp", ["float", "Scalar", "Scalar"], [[4], [], []]))
    assert clamp.outputs[0].shape == (4,)


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (_op("aten::sum", ["float", "", "Scalar", ""], [[8, 32], [], [], []]), "does not hold its argument dim"),
        (_op("aten::cat", ["TensorList", "Scalar"], [[], []]), "tensors of its list"),
        (
            _op("aten::_to_copy", ["int", "Scalar", "", "", "", "Scalar", ""], [[4], *[[]] * 6]),
            "does not hold its result's type",
        ),
        (_op("aten::mm", ["float", "float"], [[2, 3], [4, 5]]), "PyTorch refuses"),
        (_op("aten::mm", ["float", "strange"], [[2, 3], [3, 5]]), "no overload"),
        (_op("aten::relu", ["float"], [["x"]]), "a shape is damaged"),
        (HostEvent("aten::relu", 0, 0.0, 1.0, {}), "record_shapes"),
    ],
)
def test_what_cannot_be_told_says_why(op: HostEvent, why: str) -> None:
    """A call whose notes do not suffice is not guessed at."""
    with pytest.raises(Unreadable, match=why):
        to_signature(op)


def test_attention_backward_is_read_without_the_tensors_that_it_was_not_given() -> None:
    """Autograd passes no mask and no cumulative lengths to cuDNN's backward: seven tensors are left of ten and one number."""
    row, heads = [2, 4, 128, 64], ["c10::BFloat16"] * 5
    types = [*heads, "float", "long int", "long int", "", "", "", "Scalar", "Scalar", "Scalar", "Scalar", ""]
    dims = [row] * 5 + [[2, 4, 128, 1]] + [[]] * 10
    values = ["", "", "", "", "", "", "", "", "", "", "", "128", "128", "0.", "True", ""]
    op = _op("aten::_scaled_dot_product_cudnn_attention_backward", types, dims, **{"Concrete Inputs": values})
    signature = to_signature(op)
    assert [meta.shape for meta in signature.inputs] == [(2, 4, 128, 64)] * 5 + [(2, 4, 128, 1), (), ()]
    assert [meta.shape for meta in signature.outputs] == [(2, 4, 128, 64)] * 3
    assert dict(signature.arguments)["is_causal"] is True


def test_gradients_of_recurrent_layers_have_the_shapes_that_cuda_allocates() -> None:
    """PyTorch has no shapes for cuDNN's: the gradients are as large as the input, the states and each weight."""
    x, state, weights = [8, 5, 16], [1, 8, 16], [[64, 16], [64, 16], [64], [64]]
    types = ["float", "TensorList", "Scalar", "float", "float", "float", "float", "float", "", ""]
    types += ["Scalar"] * 8 + ["ScalarList", "", "unsigned char", "ScalarList"]
    dims = [x, weights, [], [2176], state, state, x, x] + [[]] * 12 + [[64], []]
    numbers = ["2", "16", "0", "1", "True", "0.", "True", "False"]
    values = ["", "", "4", *[""] * 7, *numbers, "[]", "", "", "[True, False, False, True]"]
    signature = to_signature(_op("aten::_cudnn_rnn_backward", types, dims, **{"Concrete Inputs": values}))
    shapes = [(8, 5, 16), (1, 8, 16), (1, 8, 16), (64, 16), (64, 16), (64,), (64,)]
    assert [meta.shape for meta in signature.outputs] == shapes


def test_a_concatenations_kernel_tells_how_wide_its_elements_are() -> None:
    """The type of a list is not noted: two bytes in the kernel's name are 16 bits; without the name float32 is assumed."""
    op = _op("aten::cat", ["TensorList", "Scalar"], [[[4, 8], [4, 8]], []], **{"Concrete Inputs": ["", "1"]})
    kernel = "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<OpaqueType<2u>, unsigned int, 3>"
    assert to_signature(op, kernels=[kernel]).outputs[0].dtype == "bfloat16"
    assert to_signature(op).outputs[0].dtype == "float32"


def test_copies_from_and_to_the_host_have_an_end_there() -> None:
    """The copies' names say which way they went."""
    op = _op("aten::copy_", ["float", "float", "Scalar"], [[4], [4], []])
    up = to_signature(op, ["Memcpy HtoD (Pinned -> Device)"])
    assert [m.place for m in up.inputs] == ["device", "cpu"]
    down = to_signature(op, ["Memcpy DtoH (Device -> Pinned)"])
    assert [m.place for m in down.inputs] == ["cpu", "device"]
    assert [m.place for m in to_signature(op, ["Memcpy DtoD (Device -> Device)"]).inputs] == ["device", "device"]


def test_composites_are_told_by_their_overload() -> None:
    """Std without a correction is a composite, with one it is not."""
    assert not is_vocabulary(_op("aten::linear", ["float", "float", ""], [[2, 3], [4, 3], []]))
    assert is_vocabulary(_op("aten::std", ["float", "", "", "Scalar"], [[4], [], [], []]))
    assert not is_vocabulary(_op("aten::std", ["float", "Scalar"], [[4], []]))
    assert not is_vocabulary(_op("c10d::allreduce_", [], []))
    assert not is_vocabulary(_op("no::such", [], []))


def test_looking_an_operator_up_leaves_it_as_it_is() -> None:
    """Others compare operators by identity: the overload before and after is the same object."""
    before = torch.ops.aten.hardswish.default
    assert is_vocabulary(_op("aten::hardswish", ["float"], [[4]]))
    assert torch.ops.aten.hardswish.default is before
