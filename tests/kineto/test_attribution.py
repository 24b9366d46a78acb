"""Which operator a kernel belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.kineto import Attribution, attribute, read_profile

A, B, C = ((8, 16), "float"), ((16, 4), "float"), ((4,), "float")
Make = Callable[..., Any]


def _attributed(trace: Any, path: Path) -> Attribution:
    return attribute(read_profile(trace.save(path / "t.json")))


def test_kernels_go_to_the_operator_that_a_capture_would_show(tmp_path: Path, trace_file: Make) -> None:
    """Linear is a composite of addmm; both kernels of addmm, one of them launched by its inner copy, are addmm's."""
    trace = trace_file()
    trace.op("aten::linear", 0, 100, [A, ((4, 16), "float"), C])
    trace.op("aten::t", 5, 10, [((4, 16), "float")])
    trace.op("aten::addmm", 20, 70, [C, A, B, None, None])
    trace.op("aten::copy_", 30, 10, [A, A, None])
    trace.kernel("copy", 35, 200, 3)
    trace.kernel("gemm", 60, 204, 9)
    found = _attributed(trace, tmp_path)
    assert [(m.op.name, [k.name for k in m.kernels], m.us) for m in found.measured] == [
        ("aten::addmm", ["copy", "gemm"], 12.0)
    ]
    assert not found.lost
    assert not found.unknown


def test_threads_are_kept_apart(tmp_path: Path, trace_file: Make) -> None:
    """Operators that run at the same time on two threads get the kernels that their own thread launched."""
    trace = trace_file()
    trace.op("aten::relu", 0, 100, [A], thread=1)
    trace.op("aten::neg", 0, 100, [A], thread=2)
    trace.kernel("n", 50, 200, 2, thread=2)
    trace.kernel("r", 50, 210, 3, thread=1)
    found = _attributed(trace, tmp_path)
    assert {(m.op.name, m.us) for m in found.measured} == {("aten::relu", 3.0), ("aten::neg", 2.0)}


def test_phases_and_nodes(tmp_path: Path, trace_file: Make) -> None:
    """The autograd engine's events make the backward, the optimizer's annotation the optimizer."""
    trace = trace_file()
    trace.op("aten::relu", 0, 10, [A])
    trace.kernel("f", 5, 100, 1)
    trace.op("autograd::engine::evaluate_function: ReluBackward0", 20, 50, thread=2)
    trace.op("ReluBackward0", 22, 40, thread=2)
    trace.op("aten::threshold_backward", 25, 20, [A, A, None], thread=2)
    trace.kernel("b", 30, 110, 1, thread=2)
    trace.op("Optimizer.step#SGD.step", 80, 50, category="user_annotation")
    trace.op("aten::add_", 85, 20, [A, A, None])
    trace.kernel("o", 90, 120, 1)
    found = _attributed(trace, tmp_path)
    assert [(m.op.name, m.phase, m.node) for m in found.measured] == [
        ("aten::relu", "forward", ""),
        ("aten::threshold_backward", "backward", "ReluBackward0"),
        ("aten::add_", "optimizer", ""),
    ]


def test_what_has_no_operator_is_counted_by_its_reason(tmp_path: Path, trace_file: Make) -> None:
    """Launched before the trace, from a CUDA graph, outside of operators, by compiled code, by an unknown operator."""
    trace = trace_file()
    trace.kernel("early", 0, 1, 1, launch="")
    trace.kernel("graph", 5, 10, 2, launch="cudaGraphLaunch")
    trace.kernel("bare", 6, 20, 4)
    trace.op("Torch-Compiled Region: 0/0", 100, 50)
    trace.op("triton_poi_fused_add_0", 110, 20, [A])
    trace.kernel("triton", 115, 200, 8)
    trace.op("vllm::no_such_operator", 300, 50, [A])
    trace.kernel("custom", 310, 400, 16)
    found = _attributed(trace, tmp_path)
    assert found.lost == {
        "launched before the trace began, or without a launch event": (1, 1.0),
        "replayed from a CUDA graph": (1, 2.0),
        "launched outside of any operator": (1, 4.0),
        "fused by torch.compile": (1, 8.0),
    }
    assert found.unknown == {"vllm::no_such_operator": 16.0}


def test_a_custom_backward_names_its_forward(tmp_path: Path, trace_file: Make) -> None:
    """The node's kernels are told apart by the operator that carries the node's sequence number in the forward."""
    trace = trace_file()
    trace.op("mine::forward", 0, 20, [A], **{"Sequence number": 41, "Fwd thread id": 0})
    trace.op("aten::relu", 5, 10, [A], **{"Sequence number": 41, "Fwd thread id": 0})
    node = "autograd::engine::evaluate_function: CppNode<Mine>"
    trace.op(node, 50, 30, thread=2, **{"Sequence number": 41, "Fwd thread id": 1})
    trace.op("CppNode<Mine>", 55, 20, thread=2, **{"Sequence number": 41, "Fwd thread id": 1})
    trace.kernel("b", 60, 100, 3, thread=2)
    found = _attributed(trace, tmp_path)
    assert found.unknown == {"CppNode<Mine> (backward of mine::forward)": 3.0}


def test_the_gap_of_a_full_queue(tmp_path: Path, trace_file: Make) -> None:
    """Only gaps before kernels count that had been launched before the kernel in front of them began."""
    trace = trace_file()
    trace.op("aten::relu", 0, 1000, [A])
    for i in range(30):
        trace.kernel("k", i, 2000 + 10 * i, 8.5)
    trace.kernel("late", 900_000, 900_020, 5)
    found = _attributed(trace, tmp_path)
    assert found.queue_gap_us == pytest.approx(1.5)
    assert found.host_gap_us == pytest.approx(900_020 - (2000 + 290 + 8.5))
    assert found.launch_us == (2000.0, 20.0)


def test_a_short_trace_does_not_show_the_gap(tmp_path: Path, trace_file: Make) -> None:
    """Without a queue the gap is not known."""
    trace = trace_file()
    trace.op("aten::relu", 0, 10, [A])
    trace.kernel("k", 5, 10, 1)
    assert math.isnan(_attributed(trace, tmp_path).queue_gap_us)


def test_the_external_id_stands_in_for_a_launch(tmp_path: Path, trace_file: Make) -> None:
    """A kernel without a launch event that names its operator belongs to it."""
    trace = trace_file()
    trace.op("aten::relu", 0, 10, [A], **{"External id": 99})
    trace.kernel("k", 5, 10, 4, launch="", **{"External id": 99})
    assert [(m.op.name, m.us) for m in _attributed(trace, tmp_path).measured] == [("aten::relu", 4.0)]


def test_records_that_join_lack_the_begin_of_a_kernel_that_finds_its_stream_idle(
    tmp_path: Path, trace_file: Make
) -> None:
    """The first and third kernel begin later than the ones before end: ROCm's records lack 2 us then, CUDA's nothing."""
    found = {}
    for launch in ("hipLaunchKernel", "cudaLaunchKernel"):
        trace = trace_file()
        for i, begin in enumerate((100, 104, 120)):
            trace.op("aten::relu", 10 * i, 9, [A])
            trace.kernel("relu", 10 * i + 1, begin, 4, launch=launch)
        found[launch] = _attributed(trace, tmp_path)
    assert [m.begins_us for m in found["hipLaunchKernel"].measured] == [2.0, 0.0, 2.0]
    assert [m.begins_us for m in found["cudaLaunchKernel"].measured] == [0.0, 0.0, 0.0]
    assert found["hipLaunchKernel"].queue_gap_us == 0.0
    assert math.isnan(found["cudaLaunchKernel"].queue_gap_us)
