"""What `autosac calibrate --from-trace` prints: coverage, how far prices were off, collectives, and what was not read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from autosac.display.tables import Table, fact_grid
from autosac.quantities import format_bytes, format_ms

if TYPE_CHECKING:
    from autosac.estimator.calibration.traces.evidence import TraceEvidence
    from autosac.estimator.calibration.traces.learn import Learned

_MOST_ROWS = 15


def trace_report(learned: Learned, output: Path) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [
        Text(f"profile written to {output}: {learned.hardware.name}, corrected by {len(learned.traces)} trace(s)"),
        _coverage(learned.traces),
        _errors(learned),
        _facts(learned),
    ]
    if learned.transfers:
        parts.append(_transfers(learned))
    left = _left(learned)
    if left is not None:
        parts.append(left)
    return Group(*parts)


def _coverage(traces: tuple[TraceEvidence, ...]) -> Table:
    """One row for each file."""
    table = Table(title="Device time in the traces", title_justify="left")
    table.add_column("trace")
    for heading in ("rank", "device time", "priced operators", "collectives", "not identified", "waited for the host"):
        table.add_column(heading, justify="right")
    for trace in traces:
        priced, collectives = trace.covered_us / trace.total_us, trace.collectives_us / trace.total_us
        shares = (priced, collectives, max(0.0, 1 - priced - collectives))
        table.add_row(
            Text(Path(trace.path).name),
            str(trace.rank),
            format_ms(trace.total_us / 1e3),
            *(f"{share:.1%}" for share in shares),
            f"{trace.host_gap_us / trace.span_us:.1%}" if trace.span_us else "-",
        )
    return table


def _errors(learned: Learned) -> Table:
    """One row for each family."""
    table = Table(title="Median error of an operator", title_justify="left")
    table.add_column("family")
    for heading in ("kinds of calls", "device time", "as shipped", "held out", "fitted"):
        table.add_column(heading, justify="right")
    for error in learned.errors:
        table.add_row(
            Text(error.family, style="bold" if error.family == "all" else ""),
            f"{error.kinds:,}",
            _time(error.ms * 1e3),
            *(f"{value:.1%}" for value in (error.shipped, error.held_out, error.fitted)),
        )
    table.caption = "held out: corrected by the other four fifths of the calls; fitted: by all"
    return table


def _facts(learned: Learned) -> RenderableType:
    grid = fact_grid()
    clock = learned.clock
    if clock is not None:
        grid.add_row(
            "fastest long product",
            f"{clock.tflops:,.0f} TFLOP/s, {clock.share:.0%} of the peak: the clock was at least {clock.least_mhz:,.0f} MHz",
        )
    for trace in learned.traces:
        facts = [f"{phase} {us:.1f} us" for phase, us in trace.host_us.items()]
        if math.isfinite(trace.launch_us):
            facts.append(f"launch to start {trace.launch_us:.1f} us")
        if math.isfinite(trace.queue_gap_us):
            facts.append(f"gap in a full queue {trace.queue_gap_us:.1f} us")
        if math.isfinite(trace.overlap[0]):
            facts.append(f"{trace.overlap[0]:.2f} times as long beside collectives ({trace.overlap[1]} kinds of calls)")
        stack = " (with stacks, which cost much more)" if trace.with_stack else ""
        grid.add_row(Text(Path(trace.path).name), f"host and profiler for an operator{stack}: {', '.join(facts)}")
    return grid


def _transfers(learned: Learned) -> Table:
    table = Table(title="Collectives", title_justify="left")
    table.add_column("kind")
    for heading in ("size", "ranks", "calls", "transfer", "waited", "ranks traced"):
        table.add_column(heading, justify="right")
    rows = sorted(learned.transfers, key=lambda t: -(t.transfer_us + t.waited_us) * t.calls)
    for t in rows[:_MOST_ROWS]:
        table.add_row(
            t.kind,
            format_bytes(t.nbytes),
            str(len(t.ranks)),
            str(t.calls),
            ("<= " if t.traced == 1 else "") + _time(t.transfer_us),
            _time(t.waited_us),
            str(t.traced),
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} more"
    return table


def _time(us: float) -> str:
    """Microseconds below a tenth of a millisecond."""
    return format_ms(us / 1e3) if us >= 100 else f"{us:.1f} us"


def _left(learned: Learned) -> Table | None:
    """What has no price, by its reason; None if there is nothing."""
    found: dict[str, float] = {}
    for trace in learned.traces:
        unknown = {f"unknown to this PyTorch: {name}": us for name, us in trace.unknown.items()}
        unreadable = {f"not readable: {name}": us for name, us in trace.unreadable.items()}
        lost = {reason: us for reason, (_, us) in trace.lost.items()}
        for what, us in (unknown | unreadable | lost).items():
            found[what] = found.get(what, 0.0) + us
    count, us = learned.lost_transfers
    if count:
        found[f"{count} collectives that nothing describes"] = us
    if not found:
        return None
    table = Table(title="Not identified", title_justify="left")
    table.add_column("what")
    table.add_column("device time", justify="right")
    for name, value in sorted(found.items(), key=lambda item: -item[1])[:_MOST_ROWS]:
        table.add_row(Text(name), _time(value))
    if len(found) > _MOST_ROWS:
        table.caption = f"and {len(found) - _MOST_ROWS} more"
    return table
