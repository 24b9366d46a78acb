"""``autosac calibrate --from-trace``: reads profiler traces, writes the profile, and reports."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autosac.estimator.calibration.traces.learn import Learned


def calibrate_from_traces(
    arguments: argparse.Namespace, report: Callable[[int, int, str], None]
) -> dict[str, Any] | RenderableType:
    """Learn from the traces, write the profile, and return what is to be printed: JSON's document or tables."""
    from autosac.estimator.calibration.traces.learn import learn, write_learned

    gpu = arguments.gpu or ""
    learned = learn(arguments.from_trace, gpu, report)
    write_learned(learned, arguments.output, gpu)
    if arguments.json:
        return _document(learned, arguments.output)
    from autosac.report.trace_tables import trace_report

    return trace_report(learned, arguments.output)


def _document(learned: Learned, output: Path) -> dict[str, Any]:
    clock = learned.clock
    return {
        "profile": str(output),
        "gpu": learned.hardware.name,
        "traces": [
            {
                "file": t.path,
                "rank": t.rank,
                "gpu_ms": t.total_us / 1e3,
                "span_ms": t.span_us / 1e3,
                "priced_share": t.covered_us / t.total_us if t.total_us else 0.0,
                "collectives_share": t.collectives_us / t.total_us if t.total_us else 0.0,
                "waited_for_host_ms": t.host_gap_us / 1e3,
                "host_us": t.host_us,
                "launch_us": _finite(t.launch_us),
                "queue_gap_us": _finite(t.queue_gap_us),
                "overlap_slowdown": _finite(t.overlap[0]),
                "unknown_operators_ms": {name: us / 1e3 for name, us in t.unknown.items()},
                "unreadable_operators_ms": {name: us / 1e3 for name, us in t.unreadable.items()},
                "without_operator_ms": {reason: us / 1e3 for reason, (_, us) in t.lost.items()},
                "damaged_events": t.damaged,
            }
            for t in learned.traces
        ],
        "errors": [e._asdict() for e in learned.errors],
        "collectives": [t._asdict() for t in learned.transfers],
        "collectives_not_read": learned.lost_transfers[0],
        "clock": clock._asdict() if clock is not None else None,
        "levels": dict(learned.correction.levels),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
