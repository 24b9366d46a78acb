"""The GPU benchmark's parts that need no GPU: recordings, replays, what TorchTitan logs, and the comparison."""

from __future__ import annotations

from typing import Any

import pytest

from autosac.memory_sim import AllocatorConfig
from autosac.memory_sim.allocator import CachingAllocator
from benchmarks.gpu.allocator import Request, replay, requests_of, row_of
from benchmarks.gpu.children import why_it_ended
from benchmarks.gpu.compare import lines_of, power_lines, products_lines
from benchmarks.gpu.products import calls, prices_us
from benchmarks.gpu.titan import measured_steps

GIB = 2**30
MIB = 2**20


def entry(action: str, address: int, nbytes: int) -> dict[str, Any]:
    """A line of the allocator's history, as `torch.cuda.memory` gives it."""
    return {"action": action, "addr": address, "size": nbytes, "stream": 0}


def test_requests_of_a_history() -> None:
    """Segments add up to the reserved bytes; an address that is used again is another block; older blocks do not count."""
    history = [
        entry("free_completed", 7, 64),
        entry("segment_alloc", 100, 2 * MIB),
        entry("alloc", 100, 1000),
        entry("free_requested", 100, 1000),
        entry("free_completed", 100, 1000),
        entry("alloc", 100, 500),
        entry("segment_map", 200, 4 * MIB),
        entry("alloc", 200, 3 * MIB),
        entry("segment_unmap", 200, 2 * MIB),
        entry("free_completed", 100, 500),
    ]
    assert list(requests_of(history)) == [
        Request(0, 1000, 2 * MIB),
        Request(0, 0, 2 * MIB),
        Request(1, 500, 2 * MIB),
        Request(2, 3 * MIB, 6 * MIB),
        Request(1, 0, 4 * MIB),
    ]


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_recording_of_the_simulated_allocator_is_replayed_exactly(settings: str) -> None:
    """What the simulated allocator did itself leaves no difference; one wrong number is found where it stands."""
    simulated = CachingAllocator(AllocatorConfig.parse(settings))
    requests, blocks = [], {}
    for number, nbytes in enumerate((1000, 3 * MIB, 30 * MIB)):
        blocks[number] = simulated.malloc(nbytes)
        requests.append(Request(number, nbytes, simulated.reserved_bytes))
    for number in (1, 0):
        simulated.free(blocks[number])
        requests.append(Request(number, 0, simulated.reserved_bytes))
    row = replay(requests, settings)
    assert (row["requests"], row["differing"], row["first_difference"]) == (5, 0, -1)
    assert row["predicted"] == row["measured"]
    requests[3] = requests[3]._replace(reserved_bytes=1)
    assert replay(requests, settings)["first_difference"] == 3


def test_a_cpu_has_no_recording() -> None:
    """The row says so instead of numbers."""
    assert row_of("random", "", "cpu")["error"] == "a CPU has no caching allocator"


def test_steps_after_the_warm_up_count() -> None:
    """Of steps of 9, 9, 1, 3 and 2 s the last three count: their median, and the highest of their peaks."""
    lines = [
        {
            "step": number,
            "time_metrics/end_to_end(s)": seconds,
            "memory/max_active(GiB)": gib,
            "memory/max_reserved(GiB)": gib + 1,
            "throughput(tps)": 10.0,
        }
        for number, seconds, gib in ((1, 9, 8), (2, 9, 9), (3, 1, 2), (4, 3, 4), (5, 2, 3))
    ]
    found = measured_steps(lines)
    assert (found["step_ms"], found["peak_active_bytes"], found["peak_reserved_bytes"]) == (2000, 4 * GIB, 5 * GIB)
    assert "before its first measured step" in measured_steps(lines[:2])["error"]


def test_why_a_run_ended() -> None:
    """Running out of memory is called so; else the last line with an error, or the last line, or the exit code."""
    assert why_it_ended("x\ntorch.OutOfMemoryError: CUDA out of memory.\nValueError: y\n", 1) == "out of memory"
    assert why_it_ended("ValueError: y\nbye\n", 1) == "ValueError: y"
    assert why_it_ended("bye\n\n", 1) == "bye"
    assert why_it_ended("", -9) == "the run ended early with exit code -9"


def test_the_comparison_of_rows() -> None:
    """Predicted stands beside measured with its error, for both kinds of rows; failures stand in the note."""
    rows = [
        {
            "model": "a",
            "policy": "none",
            "step_ms": 90.0,
            "peak_active_bytes": GIB,
            "peak_reserved_bytes": None,
            "budget_bytes": GIB,
            "error": "",
            "measured": {"step_ms": 100.0, "peak_active_bytes": 2 * GIB, "error": ""},
        },
        {"model": "a", "policy": "knapsack", "budget_bytes": 3 * GIB, "error": "no plan", "measured": None},
        {"model": "b", "policy": "full", "predicted": {"step_ms": 10.5}, "measured": {"step_ms": 10.0}},
        {"model": "c", "error": "the time ran out"},
    ]
    about = {"device": "cpu", "date": "2026-01-02T00:00:00", "versions": {"torch": "2"}}
    lines = lines_of({"about": about, "rows": rows})
    assert lines[0] == "cpu, 2026-01-02, torch 2"
    assert lines[4] == "| a | none | 100.0 | 90.0 | -10.0% | 2.000 | 1.000 | -50.0% |  |  |  |  |"
    assert lines[5] == "| a | plan for 3 GiB |  |  |  |  |  |  |  |  |  | no plan |"
    assert lines[6] == "| b | full | 10.0 | 10.5 | +5.0% |  |  |  |  |  |  |  |"
    assert lines[7] == "| c |  |  |  |  |  |  |  |  |  |  | the time ran out |"
    assert "- step_ms: mean error 7.5%, worst -10.0% (2 runs)" in lines
    assert len({line.count("|") for line in lines[2:8]}) == 1


def test_a_table_of_mixes() -> None:
    """How much longer a round takes when it lasts; a mix that failed has no line."""
    rows = [
        {"mix": "limits", "watts": 700.0},
        {"mix": "copy", "short_ms": 0.5, "sustained_ms": 0.6, "watts": 563.2, "mhz": 1980},
        {"mix": "failed", "error": "out of memory"},
    ]
    assert power_lines({"rows": rows})[2:] == ["| copy | 0.500 | 0.600 | 1.20 | 563 | 1980 |"]


def test_products_are_judged_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind's first, third, ... call is in one half, the others in the other one; errors are medians."""
    monkeypatch.setattr(
        "benchmarks.gpu.products.prices_us", lambda gpu: [11.0, 10.0, 9.0, 5.0] if "h200" in gpu else []
    )
    rows = [{"kind": kind, "us": 10.0, "price_before_us": 20.0} for kind in ("a", "a", "a", "b")]
    about = {"gpu": {"name": "NVIDIA H200", "capability": [9, 0], "sm_count": 132, "total_bytes": 150109880320}}
    assert products_lines({"about": about, "rows": rows})[2:] == [
        "| a, even | 2 | 100.0% | 10.0% | 2.00 | 1.00 |",
        "| a, odd | 1 | 100.0% | 0.0% | 2.00 | 1.00 |",
        "| b, even | 1 | 100.0% | 50.0% | 2.00 | 0.50 |",
    ]


def test_the_products_of_the_benchmark_have_prices() -> None:
    """A price for each call, in order: four times the rows cost three times as much, a backward more than its forward."""
    named = list(calls())
    prices = dict(zip(((call.kind, call.name) for call in named), prices_us("h200-sxm-141gb"), strict=True))
    assert len(prices) == len(named)
    for kind in ("bf16", "float8 by row"):
        assert prices[kind, "8192 x 4096 x 6144"] > 3 * prices[kind, "2048 x 4096 x 6144"]
    shape = "1 x 32 x 8 x 8192 x 128, causal"
    assert prices["cuDNN attention, backward", shape] > 2 * prices["cuDNN attention", shape]
