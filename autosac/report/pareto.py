"""The Pareto curve as a picture: step time against peak memory, plans and the usual policies as points."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autosac.display.drawing import literal_text
from autosac.display.printable import printable
from autosac.errors import UsageError
from autosac.files.writing import write_bytes_atomically, write_text_atomically
from autosac.plans import Plan, Prediction
from autosac.quantities import format_bytes, format_ms

GIB = 2**30
_TOO_LARGE = "out of memory on this GPU"
_COLOURS = {"none": "#7f7f7f", "full": "#d62728", "selective-op": "#ff7f0e"}


class ParetoPoint(NamedTuple):
    """One policy: peak in GiB (of the kind that the plans bound), step time, what hovering tells, and whether the GPU has so
    much memory: if not, its marker is hollow.
    """

    name: str
    peak_gib: float
    step_ms: float
    text: str
    fits: bool = True


def points(plans: Sequence[Plan]) -> tuple[list[ParetoPoint], list[ParetoPoint]]:
    """(the plans by peak, the policies beside them). UsageError without plans."""
    if not plans:
        raise UsageError("there is no plan to draw")
    kind = plans[0].made_for.budget_kind
    curve = [
        _point(
            f"AutoSAC, {format_bytes(plan.made_for.budget_bytes)}", plan.predictions["autosac"], kind, len(plan.units)
        )
        for plan in plans
    ]
    others = [_point(name, prediction, kind) for name, prediction in plans[0].predictions.items() if name != "autosac"]
    return sorted(curve, key=lambda point: point.peak_gib), others


def _point(name: str, prediction: Prediction, kind: str, units: int | None = None) -> ParetoPoint:
    peak = prediction.peak_bytes(kind)
    lines = [name, f"peak {kind} {format_bytes(peak)}", f"step {format_ms(prediction.step_ms)}"]
    lines.append(f"recomputation {format_ms(prediction.recompute_ms)}")
    if units is not None:
        lines.append(f"{units} modules checkpointed")
    if not prediction.fits:
        lines.append(_TOO_LARGE)
    return ParetoPoint(printable(name), peak / GIB, prediction.step_ms, "<br>".join(lines), prediction.fits)


def _texts(plans: Sequence[Plan]) -> tuple[str, str, str]:
    made_for = plans[0].made_for
    title = f"{printable(made_for.model)} on {made_for.world_size} x {printable(made_for.gpu)}: step time against peak memory"
    return title, f"peak {made_for.budget_kind} memory (GiB)", "step time (ms)"


def without_plotly() -> UsageError:
    """What a page needs that is not installed."""
    return UsageError("HTML pictures need plotly: pip install 'autosac[pictures]'")


def pareto_html(path: str | Path, plans: Sequence[Plan]) -> None:
    """Write the curve as a self-contained page. UsageError without plotly, OSError if it cannot be written."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise without_plotly() from None
    curve, others = points(plans)
    title, x_title, y_title = _texts(plans)
    figure = go.Figure()
    figure.add_scatter(
        x=[p.peak_gib for p in curve],
        y=[p.step_ms for p in curve],
        text=[p.text for p in curve],
        hoverinfo="text",
        mode="lines+markers",
        name="AutoSAC" if all(p.fits for p in curve) else f"AutoSAC (hollow: {_TOO_LARGE})",
        line={"color": "#1f77b4", "shape": "hv"},
        marker={"symbol": ["circle" if p.fits else "circle-open" for p in curve], "size": 8},
    )
    for p in others:
        figure.add_scatter(
            x=[p.peak_gib],
            y=[p.step_ms],
            text=[p.text],
            hoverinfo="text",
            mode="markers",
            name=p.name if p.fits else f"{p.name}, {_TOO_LARGE}",
            marker={
                "size": 12,
                "symbol": "diamond" if p.fits else "diamond-open",
                "color": _COLOURS.get(p.name, "#9467bd"),
            },
        )
    for plan in plans:
        figure.add_vline(x=plan.made_for.budget_bytes / GIB, line={"width": 1, "dash": "dot", "color": "#bbbbbb"})
    figure.update_layout(title=title, xaxis_title=x_title, yaxis_title=y_title, template="plotly_white")
    write_text_atomically(Path(path), figure.to_html(include_plotlyjs=True))


def pareto_png(path: str | Path, plans: Sequence[Plan]) -> None:
    """Write the curve as a picture. UsageError without matplotlib, OSError if it cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("PNG pictures need matplotlib: pip install 'autosac[pictures]'") from None
    with literal_text():
        content = _drawn(Figure(figsize=(9, 5.5), dpi=110, layout="constrained"), plans)
    write_bytes_atomically(Path(path), content)


def _drawn(figure: Any, plans: Sequence[Plan]) -> bytes:
    """The picture, as PNG."""
    curve, others = points(plans)
    title, x_title, y_title = _texts(plans)
    axes = figure.add_subplot()
    for plan in plans:
        axes.axvline(plan.made_for.budget_bytes / GIB, color="#cccccc", linewidth=0.8, linestyle=":", zorder=0)
    axes.step(
        [p.peak_gib for p in curve],
        [p.step_ms for p in curve],
        where="post",
        color="#1f77b4",
        zorder=2,
    )
    for fits in (True, False):
        chosen = [p for p in curve if p.fits is fits]
        if chosen:
            axes.plot(
                [p.peak_gib for p in chosen],
                [p.step_ms for p in chosen],
                "o",
                color="#1f77b4",
                zorder=3,
                markerfacecolor="#1f77b4" if fits else "white",
                label="AutoSAC" if fits else f"AutoSAC, {_TOO_LARGE}",
            )
    for p in others:
        axes.plot(
            p.peak_gib,
            p.step_ms,
            "D",
            markersize=9,
            color=_COLOURS.get(p.name, "#9467bd"),
            markerfacecolor=_COLOURS.get(p.name, "#9467bd") if p.fits else "white",
            label=p.name if p.fits else f"{p.name}, {_TOO_LARGE}",
            linestyle="none",
        )
    axes.set(title=title, xlabel=x_title, ylabel=y_title)
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
