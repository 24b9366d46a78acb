"""The memory of a step as a picture: stacked categories over time, the peak with its operator and module, and the limits.

`timeline_html` writes an interactive page that needs nothing else (plotly), `timeline_png` a still one
(matplotlib); both are in the extra ``pictures``. What is drawn is `autosac.memory_sim.series`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autosac.display.drawing import literal_text
from autosac.display.printable import printable
from autosac.errors import UsageError
from autosac.files.writing import write_bytes_atomically, write_text_atomically
from autosac.memory_sim.categories import Category
from autosac.memory_sim.replay import AllocatorReport
from autosac.memory_sim.series import GIB, Floats, TimelineSeries, timeline_series
from autosac.memory_sim.timeline import MemoryTimeline
from autosac.trace import Phase

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

SHADES = {
    Phase.FORWARD: "#d3e5f5",
    Phase.BACKWARD: "#fbe3d4",
    Phase.RECOMPUTE: "#fdeb9e",
    Phase.OPTIMIZER: "#d5e8c8",
}


_FAR = 8.0  # a limit that is so many times the highest memory is named at the top of the picture, off its scale
_ABOVE = " (above the picture)"


class Limit(NamedTuple):
    """A horizontal line: so many bytes, by this name, in this colour."""

    name: str
    nbytes: int
    color: str

    @property
    def gib(self) -> float:
        """In GiB."""
        return self.nbytes / GIB

    @property
    def label(self) -> str:
        """The name with the amount."""
        return f"{self.name}: {self.gib:.2f} GiB"


def gpu_limit(nbytes: int) -> Limit:
    """What a GPU has for PyTorch."""
    return Limit("GPU memory for PyTorch", nbytes, "#c00000")


def budget_limit(nbytes: int, kind: str) -> Limit:
    """A plan's budget for what is reserved, or for what is active."""
    return Limit(f"budget for {kind} memory", nbytes, "#7030a0")


def timeline_html(
    path: str | Path,
    timeline: MemoryTimeline,
    *,
    title: str = "Memory over one training step",
    report: AllocatorReport | None = None,
    event_ms: Sequence[float] | Floats | None = None,
    limits: Sequence[Limit] = (),
) -> None:
    """Write the interactive picture. UsageError without plotly, OSError if the file cannot be written."""
    series = timeline_series(timeline, report=report, event_ms=event_ms)
    figure = html_figure(series, peak_text(timeline), limits)
    figure.update_layout(title=printable(title))
    write_text_atomically(Path(path), figure.to_html(include_plotlyjs=True))


def html_figure(series: TimelineSeries, peak: str, limits: Sequence[Limit] = ()) -> Any:
    """The interactive picture as a plotly figure. UsageError without plotly."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise UsageError("HTML pictures need plotly: pip install 'autosac[pictures]'") from None
    figure = go.Figure()
    _add_memory(figure, series)
    _add_phases(figure, series)
    top = _top(series, limits)
    for limit in limits:
        far = limit.gib > top
        figure.add_hline(
            y=min(limit.gib, top),
            line_color=limit.color,
            line_dash="dash",
            annotation_text=limit.label + _ABOVE * far,
            annotation_position="bottom left" if far else "top left",
        )
    _add_peak(figure, series, peak)
    figure.update_layout(
        hovermode="x unified",
        template="plotly_white",
        xaxis_title=series.unit,
        yaxis_title="GiB on the device",
        yaxis_range=[0, top],
        legend_traceorder="reversed",
    )
    return figure


def _add_memory(figure: Any, series: TimelineSeries) -> None:
    """Bytes by category, what is reserved, and the sum with what ran."""
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
        figure.add_scatter(
            x=series.x, y=series.reserved_gib, name="reserved", mode="lines", line=line, hovertemplate="%{y:.3f} GiB"
        )
    figure.add_scatter(
        x=series.x,
        y=series.total_gib,
        name="all",
        mode="lines",
        line={"color": "black", "width": 0.7, "shape": "hv"},
        customdata=[list(what) for what in series.what],
        hovertemplate="%{y:.3f} GiB<br>%{customdata[0]}<br>%{customdata[1]} (%{customdata[2]})",
    )


def _add_phases(figure: Any, series: TimelineSeries) -> None:
    """The phases as shades, each once in the legend."""
    named: set[Phase] = set()
    for phase, first, last in series.phases:
        figure.add_vrect(
            x0=first,
            x1=last,
            fillcolor=SHADES[phase],
            layer="below",
            line_width=0,
            name=phase.name.lower(),
            showlegend=phase not in named,
            legendgroup=f"phase {phase.name}",
        )
        named.add(phase)


def _add_peak(figure: Any, series: TimelineSeries, peak: str) -> None:
    """A point and an arrow with its text."""
    at = series.peak
    figure.add_scatter(
        x=[series.x[at]],
        y=[series.total_gib[at]],
        mode="markers",
        marker={"color": "black", "size": 7},
        showlegend=False,
        hoverinfo="skip",
    )
    figure.add_annotation(
        x=series.x[at],
        y=series.total_gib[at],
        text=peak.replace("\n", "<br>"),
        ax=90,
        ay=-45,
        arrowhead=2,
        bgcolor="rgba(255,255,255,0.85)",
        align="left",
    )


def timeline_png(
    path: str | Path,
    timeline: MemoryTimeline,
    *,
    title: str = "Memory over one training step",
    report: AllocatorReport | None = None,
    event_ms: Sequence[float] | Floats | None = None,
    limits: Sequence[Limit] = (),
) -> None:
    """Write the still picture. UsageError without matplotlib, OSError if the file cannot be written."""
    series = timeline_series(timeline, report=report, event_ms=event_ms)
    buffer = io.BytesIO()
    with literal_text():
        figure = png_figure(series, peak_text(timeline), limits)
        figure.axes[0].set_title(printable(title))
        figure.savefig(buffer, format="png")
    write_bytes_atomically(Path(path), buffer.getvalue())


def png_figure(series: TimelineSeries, peak: str, limits: Sequence[Limit] = ()) -> Any:
    """The still picture as a matplotlib figure. UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UsageError("PNG pictures need matplotlib: pip install 'autosac[pictures]'") from None
    figure = Figure(figsize=(12, 6.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for phase, first, last in series.phases:
        axes.axvspan(first, last, color=SHADES[phase], linewidth=0, zorder=0)
    colors = [COLORS[category] for category in series.gib]
    axes.stackplot(series.x, *series.gib.values(), colors=colors, step="post", linewidth=0)
    handles: list[Any] = [Patch(color=COLORS[category], label=label(category)) for category in reversed(series.gib)]
    if series.reserved_gib is not None:
        handles += axes.step(series.x, series.reserved_gib, "k:", where="post", linewidth=1, label="reserved")
    top = _top(series, limits)
    for limit in limits:
        far = limit.gib > top
        axes.axhline(min(limit.gib, top), color=limit.color, linestyle="--", linewidth=1.2)
        axes.annotate(
            limit.label + _ABOVE * far,
            (0, min(limit.gib, top)),
            xycoords=("axes fraction", "data"),
            xytext=(4, -12 if far else 3),
            textcoords="offset points",
            fontsize=9,
            color=limit.color,
        )
    axes.set_ylim(0, top)
    axes.set_xlim(series.x[0], max(series.x[-1], series.x[0] + 1e-9))
    _mark_peak(axes, series, peak)
    axes.set(xlabel=series.unit, ylabel="GiB on the device")
    figure.legend(handles=handles, title="memory", loc="outside right upper", frameon=False, alignment="left")
    shown = {stretch.phase for stretch in series.phases}
    phases = [Patch(color=shade, label=phase.name.lower()) for phase, shade in SHADES.items() if phase in shown]
    if phases:
        figure.legend(
            handles=phases, title="phase of the step", loc="outside right lower", frameon=False, alignment="left"
        )
    return figure


def _mark_peak(axes: Any, series: TimelineSeries, peak: str) -> None:
    """A dot at the peak, and an arrow to it from what is known of it."""
    right = series.peak_x > (series.x[0] + series.x[-1]) / 2
    top = float(series.total_gib[series.peak])
    axes.plot(series.peak_x, top, "ko", markersize=4)
    axes.annotate(
        peak,
        (series.peak_x, top),
        xytext=(-26 if right else 26, 14),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        arrowprops={"arrowstyle": "->", "shrinkB": 3},
        bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1},
    )


def _top(series: TimelineSeries, limits: Sequence[Limit]) -> float:
    """The top of the axis: above all memory, and above the limits that are not so far away that memory would be a line."""
    highest = max(float(series.total_gib.max()), 1e-9)
    if series.reserved_gib is not None:
        highest = max(highest, float(series.reserved_gib.max()))
    near = [limit.gib for limit in limits if limit.gib <= _FAR * highest]
    return max(highest, *near, 0.0) * 1.15


def label(category: Category) -> str:
    """The category's name for people."""
    return category.name.lower().replace("_", " ")


def peak_text(timeline: MemoryTimeline) -> str:
    """Three lines: how much, at which operator, in which module."""
    peak = timeline.peak(largest=1)
    where = f"{printable(peak.module) or 'outside of all modules'} ({peak.phase.name.lower()})"
    return f"peak {peak.nbytes / GIB:.2f} GiB\n{printable(peak.op)}\n{where}"
