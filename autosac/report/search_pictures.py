"""The report of a search as one self-contained page (plotly): knobs, step time against memory, where the time goes."""

from __future__ import annotations

import html
import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosac.configurations.found.results import ConfigurationRow, SearchResult
from autosac.configurations.space.layout import Layout
from autosac.display.printable import printable
from autosac.errors import UsageError
from autosac.files.writing import write_text_atomically
from autosac.quantities import format_bytes, format_ms
from autosac.report.pareto import without_plotly
from autosac.report.search_tables import (
    MOST_ROWS,
    best_rows,
    cost_per_million,
    headings,
    notes,
    price_text,
    row_name,
)

GIB = 2**30
_STYLE = (
    "body{font-family:sans-serif;max-width:1400px;margin:2em auto;padding:0 1em;color:#222}h1{font-size:1.6em}"
    "li{margin:.3em 0}table{border-collapse:collapse;font-size:.9em;margin:1.5em 0}"
    "th,td{padding:.35em .8em;border-bottom:1px solid #ddd;text-align:left}td.n,td:first-child{white-space:nowrap}"
    "th.n,td.n{text-align:right}td:nth-child(2){min-width:16em}tbody tr:first-child{font-weight:bold}"
    ".wide{overflow-x:auto}.wide>div{min-width:900px}"
)
_KNOBS = {
    "gpu": "GPU",
    "replicate": "replicas",
    "shard": "FSDP shards",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "pipeline": "pipeline parallel",
    "schedule": "schedule",
    "stages": "stages a rank",
    "split": "layers of stages",
    "expert": "expert parallel",
    "expert_tensor": "expert tensor parallel",
    "microbatch": "microbatch",
    "reshard": "reshard",
    "compile": "compile",
    "async_tensor": "async tensor parallel",
    "float8": "float8",
    "optimizer": "optimizer",
    "cpu_offload": "CPU offload",
    "activation_offload": "activation offload",
    "chunk_loss": "chunked loss",
    "allocator": "allocator",
}
_NO_PIPELINE = "no pipeline"
_OF_PIPELINES = ("schedule", "stages", "split")
_AXIS_PIXELS = 90  # between two knobs: their names and values are written there
_MODES = {"none": "#d62728", "full": "#2ca02c", "selective-op": "#9467bd", "autosac": "#1f77b4"}
_FAR = 4  # times the highest peak: a budget beyond that is told, not drawn
_SPEEDS = [[0.0, "#08306b"], [0.3, "#4292c6"], [1.0, "#d9d9d9"]]  # the fastest stand out
_PARTS = {
    "compute": "#1f77b4",
    "recompute": "#aec7e8",
    "exposed communication": "#ff7f0e",
    "copies": "#9467bd",
    "bubble": "#d62728",
    "host": "#7f7f7f",
}


def check_drawing() -> None:
    """UsageError without plotly."""
    if importlib.util.find_spec("plotly") is None:
        raise without_plotly()


def search_html(path: Path, result: SearchResult) -> None:
    """Write the page. UsageError without plotly or without a row to draw, OSError if it cannot be written."""
    write_text_atomically(path, search_page(result))


def search_page(result: SearchResult) -> str:
    """The page's text, plotly's script included once."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise without_plotly() from None
    if not result.rows:
        raise UsageError("the search has simulated no configuration: there is nothing to draw")
    figures = [_against_memory(go, result), _parts(go, result)]
    if len(_drawn(result)) > 1:
        figures.insert(0, _coordinates(go, result))
    body = [f"<h1>{html.escape(title(result))}</h1><ul>"]
    body += [f"<li>{html.escape(printable(note))}</li>" for note in notes(result)]
    body += ["</ul>", _table(result)]
    for i, figure in enumerate(figures):
        drawn = figure.to_html(full_html=False, include_plotlyjs=i == 0, config={"displaylogo": False})
        body.append(f"<div class='wide'>{drawn}</div>")
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    head += f"<title>{html.escape(title(result))}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>"


def title(result: SearchResult) -> str:
    """What was searched."""
    offers = dict.fromkeys(printable(f"{row.offer.world_size} x {row.offer.gpu}") for row in result.rows)
    return f"Configurations on {' or '.join(offers)}"


def _table(result: SearchResult) -> str:
    """The ten best, as in the terminal."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = ["n" if right else "" for _, right in headings(result)]
        texts = (
            f"<{tag} class='{kind}'>{html.escape(printable(cell))}</{tag}>"
            for cell, kind in zip(cells, kinds, strict=True)
        )
        return f"<tr>{''.join(texts)}</tr>"

    rows = best_rows(result)
    if not rows:
        return ""
    head = row([heading for heading, _ in headings(result)], "th")
    cells = "".join(row(cells, "td") for cells in rows)
    return f"<div class='wide'><table><thead>{head}</thead><tbody>{cells}</tbody></table></div>"


def _drawn(result: SearchResult) -> Sequence[ConfigurationRow]:
    """The configurations that fit, or all if none does."""
    return result.fitting or result.rows


def _is_priced(result: SearchResult) -> bool:
    return result.objective == "cost-per-token"


def _coordinates(go: Any, result: SearchResult) -> Any:
    """Parallel coordinates of the knobs that differ; each line is a configuration that was simulated and fits."""
    rows = _drawn(result)
    dimensions = []
    for name, label in _KNOBS.items():
        dimensions += _dimension(label, [_knob(row.layout, name) for row in rows])
    dimensions += _dimension("checkpointing", [row.measured.checkpointing for row in rows])
    dimensions.append(
        {
            "label": "peak (GiB)",
            "tickformat": ",.4~g",
            "values": [row.measured.peak_reserved_bytes / GIB for row in rows],
        }
    )
    dimensions.append({"label": "step (ms)", "tickformat": ",.4~g", "values": [row.measured.step_ms for row in rows]})
    if _is_priced(result):
        dimensions.append({"label": "cost of 1M tokens", "values": [cost_per_million(row) for row in rows]})
    figure = go.Figure(
        go.Parcoords(
            dimensions=dimensions,
            line={"color": dimensions[-1]["values"], "colorscale": _SPEEDS, "showscale": False},
        )
    )
    figure.update_layout(
        title=f"Knobs of the configurations that fit (dark: {'cheap' if _is_priced(result) else 'fast'})",
        height=420,
        width=max(700, _AXIS_PIXELS * (len(dimensions) + 1)),
        margin={"t": 110, "l": 140, "r": 80},
    )
    return figure


def _knob(layout: Layout, name: str) -> Any:
    """A knob's value, if it means anything for a layout."""
    return _NO_PIPELINE if layout.pipeline == 1 and name in _OF_PIPELINES else getattr(layout, name)


def _dimension(label: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """The axis of a knob by the order of its values; none if all are equal."""
    known = sorted(set(values), key=lambda v: (isinstance(v, str), v))
    if len(set(known) - {_NO_PIPELINE}) < 2:  # what has no pipeline shows on another axis
        return []
    places = {value: i for i, value in enumerate(known)}
    texts = [printable(str(value)) for value in known]
    return [
        {
            "label": label,
            "values": [places[v] for v in values],
            "tickvals": list(places.values()),
            "ticktext": texts,
            "range": [-0.1, len(known) - 0.9],
        }
    ]


def front(rows: Sequence[ConfigurationRow]) -> list[ConfigurationRow]:
    """The rows of which no other is as fast with as little memory, by memory."""
    found: list[ConfigurationRow] = []
    for row in sorted(rows, key=lambda r: (r.measured.peak_reserved_bytes, r.measured.step_ms)):
        if not found or row.measured.step_ms < found[-1].measured.step_ms:
            found.append(row)
    return found


def _against_memory(go: Any, result: SearchResult) -> Any:
    figure = go.Figure()
    for checkpointing, colour in _MODES.items():
        rows = [row for row in result.rows if row.measured.checkpointing == checkpointing]
        rows.sort(key=lambda row: not row.measured.fits)  # the legend shows the first
        if rows:
            figure.add_scatter(
                x=[row.measured.peak_reserved_bytes / GIB for row in rows],
                y=[row.measured.step_ms for row in rows],
                text=[_hover(result, row) for row in rows],
                hoverinfo="text",
                mode="markers",
                name=checkpointing,
                marker={
                    "size": 9,
                    "color": colour,
                    "symbol": ["circle" if row.measured.fits else "circle-open" for row in rows],
                },
            )
    best = front(result.rows)
    figure.add_scatter(
        x=[row.measured.peak_reserved_bytes / GIB for row in best],
        y=[row.measured.step_ms for row in best],
        mode="lines",
        line={"color": "#333333", "shape": "hv", "width": 1},
        hoverinfo="skip",
        name="Pareto front",
    )
    budgets: dict[int, list[str]] = {}
    for gpu, size in result.budgets_bytes.items():
        budgets.setdefault(size, []).append(gpu)
    most = max(row.measured.peak_reserved_bytes for row in result.rows)
    beyond: list[str] = []
    for size, gpus in budgets.items():
        text = "budget" if len(budgets) == 1 else f"budget of {html.escape(printable(', '.join(gpus)))}"
        if size > _FAR * most:  # its line would leave no room for the points
            beyond.append(f"; {text}: {size / GIB:.1f}")
            continue
        figure.add_vline(
            x=size / GIB,
            line={"dash": "dot", "color": "#888888"},
            annotation={"text": text, "textangle": -90, "xanchor": "right", "yanchor": "top", "xshift": -3},
        )
    figure.update_layout(
        title="Step time against memory (hollow: does not fit)",
        xaxis_title=f"peak reserved memory of the fullest rank (GiB{''.join(beyond)})",
        yaxis_title="step time (ms)",
        template="plotly_white",
        height=480,
    )
    return figure


def _hover(result: SearchResult, row: ConfigurationRow) -> str:
    measured = row.measured
    lines = [
        f"{row.offer.world_size} x {row.offer.gpu}",
        *str(row.layout).split(", "),
        f"checkpointing {measured.checkpointing}",
        f"step {format_ms(measured.step_ms)}, MFU {measured.mfu:.1%}",
        f"peak {format_bytes(measured.peak_reserved_bytes)}",
        *([f"cost of 1M tokens {price_text(cost_per_million(row))}"] if _is_priced(result) else []),
    ]
    return "<br>".join(html.escape(printable(line)) for line in lines)


def _parts(go: Any, result: SearchResult) -> Any:
    """Where the ten best spend their steps."""
    rows = list(result.fitting[:MOST_ROWS])
    figure = go.Figure()
    for name, colour in _PARTS.items():
        figure.add_bar(
            y=[_wrapped(f"{i}. {row_name(result, row)}") for i, row in enumerate(rows, start=1)],
            x=[_part(row, name) for row in rows],
            name=name,
            orientation="h",
            marker_color=colour,
            hovertemplate="%{x:,.1f} ms %{fullData.name}<extra></extra>",
        )
    figure.update_layout(
        title="Where the step goes: the best ten (fullest rank)",
        xaxis_title="milliseconds",
        template="plotly_white",
        barmode="stack",
        legend={"traceorder": "normal", "orientation": "h", "y": 1.0, "yanchor": "bottom"},
        margin={"t": 120},
        height=220 + 44 * len(rows),
        yaxis={"autorange": "reversed", "automargin": True},
    )
    return figure


def _wrapped(name: str) -> str:
    """On lines that leave room for the bars."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(printable(name), 44))


def _part(row: ConfigurationRow, name: str) -> float:
    parts = row.measured.parts
    recompute = min(parts.get("recompute_ms", 0.0), parts.get("compute_ms", 0.0))
    return {
        "compute": parts.get("compute_ms", 0.0) - recompute,
        "recompute": recompute,
        "exposed communication": parts.get("exposed_communication_ms", 0.0),
        "copies": parts.get("exposed_copy_ms", 0.0),
        "bubble": parts.get("bubble_ms", 0.0),
        "host": parts.get("host_bound_ms", 0.0),
    }[name]
