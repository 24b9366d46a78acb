"""`autosac calibrate --from-trace` from end to end, and the benchmark of traces."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosac.cli.parser import main
from autosac.estimator import load_hardware
from autosac.estimator.calibration.traces.evidence import gather, occupied
from autosac.estimator.calibration.traces.learn import learn, measured_operators, price_rows
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.kineto import read_profile
from autosac.trace import Signature, TensorMeta

Make = Callable[..., Any]
SLOWER = 1.6


def _signature(m: int, k: int = 1024, n: int = 1024) -> Signature:
    def meta(*shape: int) -> TensorMeta:
        return TensorMeta(shape, (shape[1], 1), "bfloat16")

    return Signature("aten.mm.default", (meta(m, k), meta(k, n)), (meta(m, n),))


def _shipped_us(signature: Signature) -> float:
    return first_estimates(default_models(load_hardware("h100-sxm-80gb")).operators, [signature])[0].ms * 1e3


def _trace(trace: Any, sizes: tuple[int, ...], slower: float = SLOWER) -> Any:
    """Products that take `slower` times what the shipped models say, each of them twice in a full queue."""
    when = 0.0
    for i, m in enumerate(size for size in sizes for _ in range(2)):
        tensors = [((m, 1024), "c10::BFloat16"), ((1024, 1024), "c10::BFloat16")]
        strides = {"Input Strides": [[1024, 1], [1024, 1]], "Concrete Inputs": ["", ""]}
        trace.op("aten::matmul", 10 * i, 9, tensors, **strides)
        trace.op("aten::mm", 10 * i + 1, 7, tensors, **strides)
        us = slower * _shipped_us(_signature(m))
        trace.kernel("nvjet_tst", 10 * i + 2, 10_000 + when, us - 1.0)
        when += us
    return trace


SIZES = (128, 256, 512, 1024, 2048, 4096, 3000, 5000, 6000, 640, 896, 7000)


def test_a_profile_is_learned_and_priced_with(
    tmp_path: Path, trace_file: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile prices what was seen as measured, what lies between nearly so, and other operators as shipped."""
    path = _trace(trace_file(), SIZES).save(tmp_path / "h100.json.gz")
    output = tmp_path / "mine.toml"
    assert main(["calibrate", "--from-trace", str(path), "-o", str(output), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gpu"] == "h100-sxm-80gb"
    (trace,) = document["traces"]
    assert trace["priced_share"] == pytest.approx(1.0)
    assert trace["queue_gap_us"] == pytest.approx(1.0, abs=1e-3)
    error = document["errors"][0]
    assert (error["family"], error["kinds"]) == ("matmul", len(SIZES))
    assert error["shipped"] == pytest.approx(1 - 1 / SLOWER, abs=1e-3)
    assert error["fitted"] < 0.02
    assert error["held_out"] < 0.1

    models = default_models(load_hardware(str(output))).operators
    meta = TensorMeta((1000,), (1,), "bfloat16")
    relu = Signature("aten.relu.default", (meta,), (meta,))
    seen, between, other = first_estimates(models, [_signature(1024), _signature(1500), relu])
    assert (seen.source, seen.ms * 1e3) == ("profiled", pytest.approx(SLOWER * _shipped_us(_signature(1024)), rel=1e-3))
    assert between.source.startswith("corrected:learned:matmul")
    assert between.ms * 1e3 == pytest.approx(SLOWER * _shipped_us(_signature(1500)), rel=0.1)
    assert other.ms * 1e3 == pytest.approx(_shipped_us(relu))


def test_the_report_says_what_was_covered_and_what_not(
    tmp_path: Path, trace_file: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coverage, errors by family, collectives and what has no price, in tables."""
    monkeypatch.setenv("COLUMNS", "140")
    trace = _trace(trace_file(rank=0, world_size=8), (512, 1024))
    trace.op("vllm::no_such_operator", 5000, 50, [((4,), "float")])
    trace.kernel("custom", 5010, 50_000, 16)
    trace.op("nccl:all_reduce", 6000, 20, [((1000,), "float")], category="user_annotation")
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 6010, 60_000, 40)
    trace.op("aten::cat", 7000, 20, [None, None], **{"Input type": ["TensorList", "Scalar"]})
    trace.kernel("cat", 7005, 70_000, 3)
    path = trace.save(tmp_path / "t.json")
    assert main(["calibrate", "--from-trace", str(path), "-o", str(tmp_path / "p.toml")]) == 0
    out = capsys.readouterr().out
    for text in (
        "unknown to this PyTorch: vllm::no_such_operator",
        "not readable: aten::cat: the trace does not hold the tensors of its list",
        "all_reduce",
        "matmul",
        "forward",
    ):
        assert text in out


def test_the_figures_of_a_trace(tmp_path: Path, trace_file: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels of 100, 100, 100, 16, 3 and 40 us: of the GPU's time, of what has a price, and of the time that it waited."""
    trace = trace_file(rank=0, world_size=8)
    tensors = [((512, 1024), "c10::BFloat16"), ((1024, 1024), "c10::BFloat16")]
    strides = {"Input Strides": [[1024, 1], [1024, 1]], "Concrete Inputs": ["", ""]}
    for i, when in enumerate((0, 101, 700)):
        trace.op("aten::mm", 10 * i, 7, tensors, **strides)
        trace.kernel("nvjet_tst", 10 * i + 2, 10_000 + when, 100)
    trace.op("vllm::no_such_operator", 5000, 50, [((4,), "float")])
    trace.kernel("custom", 5010, 50_000, 16)
    trace.op("aten::cat", 7000, 20, [None, None], **{"Input type": ["TensorList", "Scalar"]})
    trace.kernel("cat", 7005, 70_000, 3)
    trace.op("nccl:all_reduce", 60_000, 20, [((1000,), "float")], category="user_annotation")
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 60_010, 60_000, 40)
    path = trace.save(tmp_path / "t.json")
    assert main(["calibrate", "--from-trace", str(path), "-o", str(tmp_path / "p.toml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["traces"] == [
        {
            "file": str(path),
            "rank": 0,
            "gpu_ms": pytest.approx(0.359),
            "span_ms": pytest.approx(60.003),
            "priced_share": pytest.approx(300 / 359),
            "collectives_share": pytest.approx(40 / 359),
            "waited_for_host_ms": pytest.approx(9.984),
            "host_us": {"forward": pytest.approx(7.0)},
            "launch_us": pytest.approx(9998.0),
            "queue_gap_us": None,
            "overlap_slowdown": None,
            "unknown_operators_ms": {"vllm::no_such_operator": pytest.approx(0.016)},
            "unreadable_operators_ms": {
                "aten::cat: the trace does not hold the tensors of its list": pytest.approx(0.003)
            },
            "without_operator_ms": {},
            "damaged_events": 0,
        }
    ]
    assert [(error["family"], error["kinds"], error["ms"]) for error in document["errors"]] == [
        ("matmul", 1, pytest.approx(0.303)),
        ("all", 1, pytest.approx(0.303)),
    ]
    (found,) = document["collectives"]
    assert (found["nbytes"], found["calls"], found["transfer_us"]) == (4000, 1, pytest.approx(40.0))
    assert document["clock"]["tflops"] == pytest.approx(2 * 512 * 1024 * 1024 / 101e-6 / 1e12, rel=1e-3)


def test_several_ranks_are_one_job(tmp_path: Path, trace_file: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Transfers are matched between the files, and the slowest start begins the transfer."""
    paths = []
    noted = {"Collective name": "allreduce", "In msg nelems": 2**22, "Out msg nelems": 2**22, "dtype": "Float"}
    for rank, start in ((0, 0.0), (1, 300.0)):
        trace = _trace(trace_file(rank=rank, world_size=2), (512,))
        trace.kernel("ncclDevKernel_AllReduce", 9000, 90_000 + start, 400 - start, **noted, **{"Group size": 2})
        paths.append(str(trace.save(tmp_path / f"{rank}.json")))
    assert main(["calibrate", "--from-trace", *paths, "-o", str(tmp_path / "p.toml"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["collectives"]
    assert (found["nbytes"], found["ranks"], found["traced"]) == (2**24, [0, 1], 2)
    assert (found["transfer_us"], found["waited_us"]) == (pytest.approx(100.0), pytest.approx(150.0))


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda trace: trace.header["deviceProperties"][0].update({name: value})


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda t: [e["args"].pop("Input Dims", None) for e in t.events], [], "record_shapes=True"),
        (lambda t: t.header.pop("deviceProperties"), [], "give it with --gpu"),
        (lambda t: None, ["--gpu", "nonsense"], "unknown GPU"),
        (lambda t: None, ["--sweep"], "cannot be combined with --sweep"),
        (lambda t: None, ["--device", "cpu"], "cannot be combined with --device cpu"),
        (lambda t: None, ["--threads", "2"], "cannot be combined with --threads"),
        (lambda t: t.events.clear(), [], "no traceEvents"),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    trace_file: Make,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Any], Any],
    arguments: list[str],
    message: str,
) -> None:
    """Wrong usage and traces that do not suffice end with one line, and nothing is written."""
    trace = _trace(trace_file(), (512,))
    trace.header = json.loads(json.dumps(trace.header))
    change(trace)
    path, output = trace.save(tmp_path / "t.json"), tmp_path / "p.toml"
    assert main(["calibrate", "--from-trace", str(path), "-o", str(output), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_gpu_without_traces_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--gpu is about traces."""
    assert main(["calibrate", "--gpu", "h100-sxm-80gb", "-o", str(tmp_path / "p.toml")]) == 2
    assert "--from-trace" in capsys.readouterr().err


def test_traces_of_several_gpus_are_refused(
    tmp_path: Path, trace_file: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile is of one GPU."""
    first, second = _trace(trace_file(), (512,)), _trace(trace_file(), (512,))
    second.header = json.loads(json.dumps(second.header))
    b200 = {"name": "NVIDIA B200", "totalGlobalMem": 191503138816, "computeMajor": 10, "numSms": 148}
    second.header["deviceProperties"][0].update(b200)
    paths = [str(t.save(tmp_path / name)) for t, name in ((first, "a.json"), (second, "b.json"))]
    assert main(["calibrate", "--from-trace", *paths, "-o", str(tmp_path / "p.toml")]) == 2
    assert "several GPUs" in capsys.readouterr().err


def test_calls_beside_collectives_are_left_out(tmp_path: Path, trace_file: Make) -> None:
    """An operator's time is that of its calls without a collective beside them; the ratio is the overlap slowdown."""
    trace = trace_file(rank=0, world_size=2)
    for i, m in enumerate((64, 128, 256, 512, 1024)):
        for j, (begin, us) in enumerate(((0.0, 10.0), (50_000.0, 15.0))):
            when = 1000 * i + 100 * j
            trace.op("aten::mm", when, 50, [((m, 8), "c10::Half"), ((8, 8), "c10::Half")])
            trace.kernel("gemm", when + 1, 100_000 + begin + 20 * i, us)
    trace.kernel("ncclDevKernel_AllReduce", 9000, 150_000, 10_000, stream=9)
    evidence = gather(read_profile(trace.save(tmp_path / "t.json")))
    assert [row.us for row in evidence.rows] == [10.0] * 5
    assert evidence.overlap == (pytest.approx(1.5), 5)


def test_what_only_ran_beside_collectives_is_taken_for_slowed_down(tmp_path: Path, trace_file: Make) -> None:
    """119 us beside a collective are 100 us alone, and the gap; such an operator is no measured one."""
    trace = trace_file()
    trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 0, 5.0, 200.0, stream=20)
    trace.op("aten::relu", 10.0, 5.0, [((1024,), "c10::BFloat16")])
    trace.kernel("relu", 12.0, 20.0, 119.0)
    evidence = gather(read_profile(trace.save(tmp_path / "t.json")))
    assert [row.beside for row in evidence.rows] == [True]
    (alone,) = occupied([evidence])
    assert alone.rows[0].us == pytest.approx(101.0)
    assert measured_operators(price_rows(load_hardware("h100-sxm-80gb"), [alone])) == {}


def test_products_on_tensor_cores_are_known_by_their_kernels(tmp_path: Path, trace_file: Make) -> None:
    """Of float32 by the kernel's name; other operators and other types never count."""
    trace = trace_file()
    float32, half = [((64, 8), "float"), ((8, 8), "float")], [((32, 8), "c10::Half"), ((8, 8), "c10::Half")]
    calls = (
        ("mm", float32, "sm80_xmma_gemm_f32f32_tf32f32"),
        ("mm", half, "ampere_s1688gemm"),
        ("relu", float32[:1], "tf32"),
    )
    for i, (name, tensors, kernel) in enumerate(calls):
        trace.op(f"aten::{name}", 100.0 * i, 5.0, tensors)
        trace.kernel(kernel, 100.0 * i + 2, 100.0 * i + 9, 7.0)
    rows = gather(read_profile(trace.save(tmp_path / "t.json"))).rows
    assert {(row.signature.name, row.signature.inputs[0].dtype): row.tf32 for row in rows} == {
        ("aten.mm.default", "float32"): True,
        ("aten.mm.default", "float16"): False,
        ("aten.relu.default", "float32"): False,
    }


def test_a_layout_that_is_not_held_is_not_guessed(tmp_path: Path, trace_file: Make) -> None:
    """A copy by the kernel for any layout, in a trace without strides: its input was not contiguous."""
    trace = trace_file()
    for i, kernel in enumerate(("vectorized_elementwise_kernel<4", "elementwise_kernel<128, 2")):
        trace.op("aten::clone", 100.0 * i, 5.0, [((64, 32 + i), "float"), None])
        trace.kernel(f"void at::native::{kernel}, ...", 100.0 * i + 2, 100.0 * i + 9, 7.0)
    evidence = gather(read_profile(trace.save(tmp_path / "t.json")))
    assert [row.signature.inputs[0].shape for row in evidence.rows] == [(64, 32)]
    assert evidence.unreadable == {"aten::clone: the trace does not hold its strides": 7.0}


def test_a_gap_that_is_not_seen_is_that_of_the_other_traces(tmp_path: Path, trace_file: Make) -> None:
    """Each kernel of an operator gets the gap that a full queue leaves."""
    full = gather(read_profile(_trace(trace_file(), SIZES).save(tmp_path / "full.json")))
    idle = trace_file()
    idle.op("aten::relu", 0, 50, [((4,), "float")])
    idle.kernel("a", 5, 100, 3)
    idle.kernel("b", 6, 200, 4)
    short = gather(read_profile(idle.save(tmp_path / "idle.json")))
    assert math.isnan(short.queue_gap_us)
    _, corrected = occupied([full, short])
    assert corrected.rows[0].us == pytest.approx(7.0 + 2 * full.queue_gap_us)


def test_the_benchmark_leaves_the_judged_trace_out(
    tmp_path: Path, trace_file: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two traces with the same slowdown correct each other; the page names the GPU and both files."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    from benchmarks import traces

    _trace(trace_file(), SIZES[::2]).save(tmp_path / "h100_a.json")
    _trace(trace_file(), SIZES[1::2]).save(tmp_path / "h100_b.json.gz")
    found = [gather(read_profile(path)) for path in sorted(tmp_path.iterdir())]
    judged = traces.judge("h100-sxm-80gb", found)
    assert len(judged) == len(SIZES)
    assert all(j.shipped == pytest.approx(1 / SLOWER - 1, abs=1e-3) for j in judged)
    errors = sorted(abs(j.other) for j in judged)
    assert errors[len(errors) // 2] < 0.1
    page = traces.report({"h100-sxm-80gb": found})
    assert "h100_a.json" in page
    assert "h100_b.json.gz" in page


@pytest.mark.parametrize(("size", "us", "counts"), [(2, 10.0, 1), (8, 10.0, 1), (8, 1e5, 0), (16, 10.0, 0)])
def test_transfers_inside_of_a_node_are_learned_from(
    tmp_path: Path, trace_file: Make, size: int, us: float, counts: int
) -> None:
    """64 MiB in 10 us are faster than the shipped model has it, among up to eight ranks of one node. A slower one may have
    waited for the other ranks, and says nothing.
    """
    noted = {"Collective name": "allreduce", "In msg nelems": 2**24, "Out msg nelems": 2**24, "dtype": "Float"}
    trace = _trace(trace_file(rank=0, world_size=size), (512,))
    trace.kernel("ncclDevKernel_AllReduce", 9000, 90_000, us, **noted, **{"Group size": size})
    learned = learn([trace.save(tmp_path / "t.json")])
    assert len(learned.transfers) == 1
    points = [row.point for row in learned.correction.observed if row.point.family != "matmul"]
    assert len(points) == counts
