"""The statistics of a module as tables: Figure 5.3 of AUTO-SAC, (a) operators and (b) trade-off."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autosac.estimator.sac_stats import SACModStats, SACModTradeoffStats

if TYPE_CHECKING:
    from rich.table import Table

STATS_COLUMNS = (
    "Op Idx",
    "Op Name",
    "Runtime (ms)",
    "Memory (B)",
    "View-like",
    "Random",
    "In-place",
    "Must save",
)
TRADEOFF_COLUMNS = (
    "Op Id(s)",
    "Op Name(s)",
    "Discarded Mem (%)",
    "Discarded Mem (B)",
    "Recomp time (%)",
    "Recomp time (ms)",
    "MSPS",
    "Always Stored",
    "Always Recomputed",
)


def stats_rows(stats: SACModStats) -> list[tuple[str, ...]]:
    """One row of text per operator, under STATS_COLUMNS."""
    return [
        (
            str(i),
            op.name,
            f"{op.runtime_ms:.4f}",
            str(op.memory_bytes),
            str(op.view_like),
            str(op.random),
            str(op.inplace_parent),
            str(op.must_save),
        )
        for i, op in enumerate(stats.operators)
    ]


def tradeoff_rows(stats: SACModStats, tradeoff: SACModTradeoffStats) -> list[tuple[str, ...]]:
    """One row of text per group, under TRADEOFF_COLUMNS: stored, recomputed, then in MSPS order.

    Percentages are of the module's whole memory and runtime, as fractions; the sums run over what is
    recomputed so far.
    """
    rows = [_tradeoff_row(stats, tradeoff, group, 0, 0.0, math.nan) for group in tradeoff.order.stored]
    discarded, spent = 0, 0.0
    for group in tradeoff.order.recomputed:
        members = stats.groups[group].members
        discarded += sum(stats.operators[i].memory_bytes for i in members)
        spent += math.fsum(stats.operators[i].runtime_ms for i in members)
        rows.append(_tradeoff_row(stats, tradeoff, group, discarded, spent, math.nan))
    for point in tradeoff.points[1:]:
        rows.append(_tradeoff_row(stats, tradeoff, point.group, point.discarded_bytes, point.recompute_ms, point.msps))
    return rows


def _tradeoff_row(
    stats: SACModStats,
    tradeoff: SACModTradeoffStats,
    group: int,
    discarded_bytes: int,
    recompute_ms: float,
    msps: float,
) -> tuple[str, ...]:
    members, forced = stats.groups[group]
    memory, runtime = tradeoff.memory_bytes or 1, tradeoff.runtime_ms or 1.0
    return (
        f"({', '.join(map(str, members))})",
        ", ".join(sorted({stats.operators[i].name for i in members})),
        f"{discarded_bytes / memory:.4f}",
        str(discarded_bytes),
        f"{recompute_ms / runtime:.4f}",
        f"{recompute_ms:.4f}",
        f"{msps:.3g}",
        str(forced is True),
        str(forced is False),
    )


def stats_table(stats: SACModStats) -> Table:
    """Figure 5.3 (a) for the terminal."""
    title = f"Module: {stats.module}   total memory: {stats.memory_bytes} B   total runtime: {stats.runtime_ms:.4f} ms"
    return _table(title, STATS_COLUMNS, stats_rows(stats))


def tradeoff_table(stats: SACModStats, tradeoff: SACModTradeoffStats) -> Table:
    """Figure 5.3 (b) for the terminal."""
    title = f"AC trade-off for module: {stats.module}   MSPS = memory / runtime (B/s)"
    return _table(title, TRADEOFF_COLUMNS, tradeoff_rows(stats, tradeoff))


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if "Name" in name else "right")
    for row in rows:
        table.add_row(*row)
    return table
