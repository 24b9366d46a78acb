"""What calibration from traces prints, cell by cell."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from autosac.estimator.calibration.traces.evidence import TraceEvidence
from autosac.estimator.calibration.traces.learn import Clock, FamilyError, Learned
from autosac.estimator.hardware import load_hardware
from autosac.kineto import TransferTimes
from autosac.report.trace_tables import trace_report

FIRST = TraceEvidence(
    path="runs/rank0.json",
    rank=0,
    world_size=2,
    total_us=2000.0,
    covered_us=1500.0,
    collectives_us=300.0,
    rows=(),
    collectives=(),
    unreadable={"aten::a": 50.0},
    unknown={"custom::b": 30.0},
    lost={"no launch": (2, 20.0)},
    host_us={"forward": 4.25},
    launch_us=6.5,
    host_gap_us=250.0,
    queue_gap_us=1.5,
    span_us=2500.0,
    overlap=(1.25, 3),
    with_stack=True,
)
SECOND = replace(FIRST, path="runs/rank1.json", rank=1, unknown={}, lost={}, span_us=0.0, with_stack=False)
ERRORS = (FamilyError("all", 1200, 0.5, 0.25, 0.125, 0.0625), FamilyError("matmul", 7, 0.05, 0.5, 0.25, 0.2))


def learned(**changes: Any) -> Learned:
    """Two ranks' traces of an H100."""
    values: dict[str, Any] = {
        "hardware": load_hardware("h100-sxm-80gb"),
        "traces": (FIRST, SECOND),
        "priced": (),
        "correction": None,  # of which nothing is printed
        "errors": ERRORS,
        "transfers": (),
        "lost_transfers": (0, 0.0),
        "clock": None,
    }
    return Learned(**(values | changes))


def tables(what: RenderableType) -> dict[str, list[list[str]]]:
    """The cells of each table by its title, headings first; other lines under their beginning."""
    out = io.StringIO()
    Console(width=260, file=out).print(what)
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in filter(None, map(str.strip, out.getvalue().splitlines())):
        if line[0] in "│┃":
            found[title].append([cell.strip() for cell in line[1:-1].replace("┃", "│").split("│")])
        elif line[0] not in "┏┡└├":
            title = line
            found[title] = []
    return found


def test_coverage_and_errors() -> None:
    """Shares of the device time, what is left of them, and the waiting's share of the span; errors by family."""
    found = tables(trace_report(learned(), Path("h100.toml")))
    assert next(iter(found)).startswith("profile written to h100.toml: ") and "corrected by 2 trace(s)" in next(
        iter(found)
    )
    assert found["Device time in the traces"] == [
        ["trace", "rank", "device time", "priced operators", "collectives", "not identified", "waited for the host"],
        ["rank0.json", "0", "2.0 ms", "75.0%", "15.0%", "10.0%", "10.0%"],
        ["rank1.json", "1", "2.0 ms", "75.0%", "15.0%", "10.0%", "-"],
    ]
    assert found["Median error of an operator"] == [
        ["family", "kinds of calls", "device time", "as shipped", "held out", "fitted"],
        ["all", "1,200", "0.5 ms", "25.0%", "12.5%", "6.2%"],
        ["matmul", "7", "50.0 us", "50.0%", "25.0%", "20.0%"],
    ]


def test_what_was_not_identified() -> None:
    """Reasons add up over the traces, the longest first, with the collectives that nothing describes."""
    found = tables(trace_report(learned(lost_transfers=(4, 200.0)), Path("h100.toml")))
    assert found["Not identified"] == [
        ["what", "device time"],
        ["4 collectives that nothing describes", "0.2 ms"],
        ["not readable: aten::a", "0.1 ms"],
        ["unknown to this PyTorch: custom::b", "30.0 us"],
        ["no launch", "20.0 us"],
    ]
    everything = (replace(SECOND, unreadable={}),)
    assert "Not identified" not in tables(trace_report(learned(traces=everything), Path("h100.toml")))
    many = (replace(FIRST, unreadable={f"aten::{i}": 1.0 for i in range(20)}, unknown={}, lost={}),)
    assert "and 5 more" in tables(trace_report(learned(traces=many), Path("h100.toml")))


def test_facts_and_collectives() -> None:
    """The host's times of each trace, the clock, and collectives with the longest first; of one rank a bound."""
    transfers = (
        TransferTimes("all_gather", 2**20, (0, 1), 3, 50.0, 0.5, 1),
        TransferTimes("all_reduce", 2**30, (0, 1), 1, 900.0, 100.0, 2),
    )
    found = tables(trace_report(learned(transfers=transfers, clock=Clock(700.0, 0.75, 1500.0)), Path("h100.toml")))
    assert found["Collectives"] == [
        ["kind", "size", "ranks", "calls", "transfer", "waited", "ranks traced"],
        ["all_reduce", "1.00 GiB", "2", "1", "0.9 ms", "0.1 ms", "2"],
        ["all_gather", "1.0 MiB", "2", "3", "<= 50.0 us", "0.5 us", "1"],
    ]
    text = "\n".join(found)
    assert "700 TFLOP/s, 75% of the peak: the clock was at least 1,500 MHz" in text
    facts = "forward 4.2 us, launch to start 6.5 us, gap in a full queue 1.5 us, 1.25 times as long beside collectives"
    assert f"host and profiler for an operator (with stacks, which cost much more): {facts}" in text
    assert f"host and profiler for an operator: {facts}" in text
