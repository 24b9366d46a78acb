"""The memory of a step as a picture: stacked categories over the step, the peak with its operator and module.

`timeline_html` writes an interactive page that needs nothing else (plotly), `timeline_png` a still one
(matplotlib); both are in the extra ``pictures``. Long steps are thinned: of every bucket of events, the one
with the most memory is drawn, so that no peak is lost.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autosac.errors import UsageError
from autosac.files import write_bytes_atomically, write_text_atomically
from autosac.memory_sim.categories import Category
from autosac.memory_sim.replay import AllocatorReport
from autosac.memory_sim.timeline import MemoryTimeline
from autosac.trace import Collective, ModuleEnter, ModuleExit, Op, Phase

GIB = 1 << 30

COLORS: dict[Category, str] = {
    Category.PARAMETER: "#1f4e79",
    Category.OPTIMIZER_STATE: "#2e75b6",
    Category.BUFFER: "#9dc3e6",
    Category.WORKSPACE: "#7f7f7f",
    Category.INPUT: "#bfbfbf",
    Category.GRADIENT: "#548235",
    Category.UNSHARDED_PARAMETER: "#bf9000",
    Category.COMMUNICATION: "#ffd966",
    Category.ACTIVATION: "#c55a11",
    Category.ACTIVATION_GRADIENT: "#a9d18e",
    Category.TEMPORARY: "#8064a2",
}
"""From the bottom of the stack to its top."""

LIMIT = "device memory for PyTorch"

SHADES = {
    Phase.FORWARD: "#dbeaf7",
    Phase.BACKWARD: "#fbe9dd",
    Phase.RECOMPUTE: "#fff4cc",
    Phase.OPTIMIZER: "#e4efdc",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSeries:
    """What is drawn: at `event[k]` (x value `x[k]`) so many GiB of each category, the total, and reserved
    memory if known.

    `phases`: (phase, first x, last x) of stretches of the step.
    """

    event: npt.NDArray[np.int64]
    x: npt.NDArray[np.float64]
    gib: dict[Category, npt.NDArray[np.float64]]
    total_gib: npt.NDArray[np.float64]
    reserved_gib: npt.NDArray[np.float64] | None
    phases: tuple[tuple[Phase, float, float], ...]

    @property
    def peak_x(self) -> float:
        """Where the peak is."""
        return float(self.x[int(np.argmax(self.total_gib))])


def timeline_series(
    timeline: MemoryTimeline,
    *,
    report: AllocatorReport | None = None,
    event_ms: Sequence[float] | npt.NDArray[np.float64] | None = None,
    points: int = 2000,
) -> TimelineSeries:
    """At most `points` events of a timeline, peaks kept; x is `event_ms` (one an event) or its number."""
    high = timeline.high_bytes
    edges = np.unique(np.linspace(0, len(high), min(points, len(high)) + 1).astype(np.int64))
    event = np.array([a + int(np.argmax(high[a:b])) for a, b in pairwise(edges)])
    x = np.arange(len(high), dtype=np.float64) if event_ms is None else np.asarray(event_ms, dtype=np.float64)
    if len(x) != len(high):
        raise UsageError(f"{len(x)} times for {len(high)} events")
    series = {category: timeline.category_bytes(category)[event] / GIB for category in COLORS}
    reserved = None
    if report is not None:
        reserved = report.in_last_step(report.reserved_bytes, len(high))[event] / GIB
    return TimelineSeries(
        event=event,
        x=x[event],
        gib={category: values for category, values in series.items() if values.any()},
        total_gib=high[event] / GIB,
        reserved_gib=reserved,
        phases=_phases(timeline, x),
    )


def timeline_html(
    path: str | Path,
    timeline: MemoryTimeline,
    *,
    title: str = "Memory over one training step",
    report: AllocatorReport | None = None,
    event_ms: Sequence[float] | npt.NDArray[np.float64] | None = None,
) -> None:
    """Write the interactive picture. UsageError without plotly, OSError if the file cannot be written."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise UsageError("HTML pictures need plotly: pip install 'autosac[pictures]'") from None
    series = timeline_series(timeline, report=report, event_ms=event_ms)
    figure = go.Figure()
    for category, values in series.gib.items():
        figure.add_scatter(
            x=series.x,
            y=values,
            name=label(category),
            stackgroup="memory",
            mode="lines",
            line={"width": 0, "shape": "hv"},
            fillcolor=COLORS[category],
            hovertemplate="%{y:.3f} GiB",
        )
    if series.reserved_gib is not None:
        line = {"color": "black", "dash": "dot", "width": 1, "shape": "hv"}
        figure.add_scatter(x=series.x, y=series.reserved_gib, name="reserved", mode="lines", line=line)
    for phase, first, last in series.phases:
        figure.add_vrect(x0=first, x1=last, fillcolor=SHADES[phase], layer="below", line_width=0)
    figure.add_annotation(
        x=series.peak_x,
        y=timeline.peak_bytes / GIB,
        text=peak_text(timeline).replace("\n", "<br>"),
        ay=-45,
        arrowhead=2,
        bgcolor="rgba(255,255,255,0.8)",
    )
    usable = _usable_gib(report)
    if usable is not None:
        figure.add_hline(
            y=usable,
            line_color="red",
            line_dash="dash",
            annotation_text=LIMIT,
            annotation_position="top left",
        )
    figure.update_layout(
        title=title,
        hovermode="x unified",
        template="plotly_white",
        xaxis_title=_x_title(event_ms),
        yaxis_title="GiB on the device",
        yaxis_rangemode="tozero",
        legend_traceorder="reversed",
    )
    write_text_atomically(Path(path), figure.to_html(include_plotlyjs=True))


def timeline_png(
    path: str | Path,
    timeline: MemoryTimeline,
    *,
    title: str = "Memory over one training step",
    report: AllocatorReport | None = None,
    event_ms: Sequence[float] | npt.NDArray[np.float64] | None = None,
) -> None:
    """Write the still picture. UsageError without matplotlib, OSError if the file cannot be written."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UsageError("PNG pictures need matplotlib: pip install 'autosac[pictures]'") from None
    series = timeline_series(timeline, report=report, event_ms=event_ms)
    figure = Figure(figsize=(12, 6.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for phase, first, last in series.phases:
        axes.axvspan(first, last, color=SHADES[phase], linewidth=0, zorder=0)
    colors = [COLORS[category] for category in series.gib]
    axes.stackplot(series.x, *series.gib.values(), colors=colors, step="post", linewidth=0)
    handles: list[Any] = [Patch(color=COLORS[category], label=label(category)) for category in reversed(series.gib)]
    if series.reserved_gib is not None:
        handles += axes.step(series.x, series.reserved_gib, "k:", where="post", linewidth=1, label="reserved")
    usable = _usable_gib(report)
    if usable is not None:
        handles.append(axes.axhline(usable, color="red", linestyle="--", linewidth=1, label=LIMIT))
    tops = [series.total_gib.max(), usable or 0.0]
    if series.reserved_gib is not None:
        tops.append(series.reserved_gib.max())
    axes.set_ylim(0, max(*tops, 1e-9) * 1.18)
    axes.set_xlim(series.x[0], max(series.x[-1], series.x[0] + 1e-9))
    right = series.peak_x > (series.x[0] + series.x[-1]) / 2
    axes.annotate(
        peak_text(timeline),
        (series.peak_x, timeline.peak_bytes / GIB),
        xytext=(-14 if right else 14, 18),
        textcoords="offset points",
        ha="right" if right else "left",
        arrowprops={"arrowstyle": "->"},
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
        fontsize=9,
    )
    axes.set(title=title, xlabel=_x_title(event_ms), ylabel="GiB on the device")
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes_atomically(Path(path), buffer.getvalue())


def label(category: Category) -> str:
    """The category's name for people."""
    return category.name.lower().replace("_", " ")


def peak_text(timeline: MemoryTimeline) -> str:
    """Three lines: how much, at which operator, in which module."""
    peak = timeline.peak(largest=1)
    where = f"{peak.module or 'outside of all modules'} ({peak.phase.name.lower()})"
    return f"peak {peak.nbytes / GIB:.2f} GiB\n{peak.op}\n{where}"


def _usable_gib(report: AllocatorReport | None) -> float | None:
    """What the device has for PyTorch, if its size is known."""
    if report is None or report.capacity_bytes is None:
        return None
    return (report.capacity_bytes - report.context_bytes - report.nccl_bytes) / GIB


def _x_title(event_ms: object) -> str:
    return "event of the step" if event_ms is None else "ms"


def _phases(timeline: MemoryTimeline, x: npt.NDArray[np.float64]) -> tuple[tuple[Phase, float, float], ...]:
    """Stretches of the step, each of one phase and up to the next; phases without a shade are left out."""
    begins: list[tuple[Phase, int]] = []
    for i, event in enumerate(timeline.trace.events):
        if isinstance(event, Op | Collective | ModuleEnter | ModuleExit) and (
            not begins or begins[-1][0] is not event.phase
        ):
            begins.append((event.phase, i))
    ends = [begin for _, begin in begins[1:]] + [len(x) - 1]
    return tuple(
        (phase, float(x[begin]), float(x[end]))
        for (phase, begin), end in zip(begins, ends, strict=False)
        if phase in SHADES
    )
