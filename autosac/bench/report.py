"""The report: a self-contained page (plotly), pictures (matplotlib), Markdown and CSV.

The figures are those of `figures`; tables come from `results` and the case study.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosac.bench.case_study import CaseResult
from autosac.bench.figures import GIB, Figure, figures
from autosac.bench.results import Results, markdown_table
from autosac.display.drawing import literal_text
from autosac.errors import UsageError
from autosac.files.writing import write_bytes_atomically, write_text_atomically
from autosac.quantities import format_bytes, format_ms

_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: right; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
th { border-bottom: 2px solid #888; }
"""
_LEGEND = """\
Each row is a checkpointing policy for one configuration. *active* and *reserved* are memory peaks, and *of budget* is the
peak as a share of the budget (`!`: more than the budget). *slowdown*, *recompute* and *of step* compare with the step without
checkpointing; *below full* says how much less is recomputed than under full checkpointing. *found in* is the time to find the
policy. In the table of solvers, *filled up* is the recomputation after the rest of the budget was used.
"""


def check_pictures() -> None:
    """UsageError unless plotly and matplotlib are installed: said before the work, not after it."""
    for name in ("plotly", "matplotlib"):
        try:
            __import__(name)
        except ImportError:
            raise UsageError(f"the report needs {name}: pip install 'autosac[pictures]'") from None


def write_report(folder: Path, results: Results, case: CaseResult | None) -> list[Path]:
    """Write results.csv, results.md, results.html and a PNG per figure; the paths. OSError if that is not possible."""
    drawn = figures(results, case)
    written = {
        folder / "results.csv": results.to_csv().encode(),
        folder / "results.md": markdown(results, case, drawn).encode(),
        folder / "results.html": page(results, case, drawn).encode(),
    }
    written |= {folder / f"{figure.key}.png": picture(figure) for figure in drawn}
    for path, content in written.items():
        write_bytes_atomically(path, content)
    return list(written)


def write_document(path: Path, results: Results, case: CaseResult | None, command: str) -> None:
    """The Markdown as a page of the documentation, with the command that makes it."""
    head = f"# {results.suite}\n\nPrinted by `{command}`; predicted for {results.gpu}.\n\n{_LEGEND}\n"
    write_text_atomically(path, head + markdown(results, case, ()))


def markdown(results: Results, case: CaseResult | None, drawn: Sequence[Figure]) -> str:
    """Tables, claims and, where they are drawn, the figures."""
    parts = [results.to_markdown()]
    if case is not None:
        parts += [f"### {case.model} {case.configuration} by budget\n", markdown_table(*_budget_table(case)) + "\n"]
        parts += [f"### Operators of {case.module} (Table 5.6)\n", markdown_table(*_operator_table(case)) + "\n"]
        parts += [f"- {case.claim()}\n"]
    parts += [f"![{figure.title}]({figure.key}.png)\n" for figure in drawn]
    return "\n".join(parts)


def _budget_table(case: CaseResult) -> tuple[list[str], list[list[str]]]:
    headings = ["budget", "peak", "recompute", "modules checkpointed", "discarded on average"]
    rows = []
    for budget in case.budgets:
        if budget.error:
            rows.append([budget.budget, budget.error, "", "", ""])
            continue
        count = len(budget.modules)
        mean = sum(m.discard_fraction for m in budget.modules) / count if count else 0.0
        rows.append(
            [
                budget.budget,
                format_bytes(budget.peak_bytes),
                format_ms(budget.recompute_ms),
                str(count),
                f"{mean:.1%}",
            ]
        )
    return headings, rows


def _operator_table(case: CaseResult) -> tuple[list[str], list[list[str]]]:
    rows = [[str(o.number), o.operator, f"{o.runtime_ms:.4f}", f"{o.memory_bytes}"] for o in case.operators]
    return ["index", "operator", "runtime (ms)", "memory (B)"], rows


# ---- the page ------------------------------------------------------------------------------------------------


def page(results: Results, case: CaseResult | None, drawn: Sequence[Figure]) -> str:
    """The page, plotly's script included once. UsageError without plotly."""
    check_pictures()
    body = [f"<h1>{html.escape(results.suite)}</h1><p>Predicted for {html.escape(results.gpu)}.</p>"]
    body.append("<ul>" + "".join(f"<li>{html.escape(str(claim))}</li>" for claim in results.claims()))
    body.append((f"<li>{html.escape(case.claim())}</li>" if case is not None else "") + "</ul>")
    for i, figure in enumerate(drawn):
        body.append(_plotly(figure).to_html(full_html=False, include_plotlyjs=i == 0))
    body += ["<h2>Policies</h2>", _html_table(*results.table())]
    if any(row.measured for row in results.rows):
        body += ["<h2>Measured beside predicted</h2>", _html_table(*results.measured_table())]
    if results.solvers:
        body += ["<h2>Solvers on equal terms</h2>", _html_table(*results.solver_table())]
    if case is not None:
        body += [f"<h2>{html.escape(case.model)} by budget</h2>", _html_table(*_budget_table(case))]
        body += [f"<h2>Operators of {html.escape(case.module)}</h2>", _html_table(*_operator_table(case))]
    head = f"<meta charset='utf-8'><title>{html.escape(results.suite)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>"


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _plotly(figure: Figure) -> Any:
    import plotly.graph_objects as go

    drawn = go.Figure()
    for series in figure.series:
        if figure.x:
            drawn.add_scatter(
                x=figure.x,
                y=series.values,
                name=series.name,
                mode="lines+markers",
                line={"color": series.colour, "shape": "vh"},
            )
        else:
            drawn.add_bar(x=figure.categories, y=series.values, name=series.name, marker_color=series.colour)
    for value, text in figure.lines:
        drawn.add_hline(y=value, line={"dash": "dash", "color": "#000"}, annotation_text=text)
    for value, text in figure.vertical:
        drawn.add_vline(x=value, line={"dash": "dot", "color": "#555"}, annotation_text=text)
    drawn.update_layout(
        title=figure.title,
        xaxis_title=figure.x_title,
        yaxis_title=figure.value_title,
        template="plotly_white",
        barmode="group",
        hovermode="closest" if figure.x else "x unified",
        height=470,
    )
    if figure.logarithmic:
        drawn.update_yaxes(type="log")
    return drawn


# ---- pictures ------------------------------------------------------------------------------------------------


def picture(figure: Figure) -> bytes:
    """The figure as PNG. UsageError without matplotlib."""
    check_pictures()
    with literal_text():
        return _drawn(figure)


def _drawn(figure: Figure) -> bytes:
    from matplotlib.figure import Figure as Canvas

    drawn = Canvas(figsize=(10, 4.8), dpi=110, layout="constrained")
    axes = drawn.add_subplot()
    if figure.x:
        for series in figure.series:
            heights = [0.0 if value is None else value for value in series.values]
            axes.step(figure.x, heights, where="pre", marker="o", markersize=3, color=series.colour, label=series.name)
    else:
        _bars(axes, figure)
    for value, text in figure.lines:
        axes.axhline(value, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            text, (0, value), xycoords=("axes fraction", "data"), xytext=(3, 3), textcoords="offset points", fontsize=8
        )
    for value, text in figure.vertical:
        axes.axvline(value, color="#555555", linestyle=":", linewidth=1)
        axes.annotate(
            text,
            (value, 0.93),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    if figure.logarithmic:
        axes.set_yscale("log")
    axes.set(title=figure.title, xlabel=figure.x_title, ylabel=figure.value_title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if len(figure.series) > 1:
        axes.legend(fontsize=8, ncols=min(4, len(figure.series)))
    content = io.BytesIO()
    drawn.savefig(content, format="png")
    return content.getvalue()


def _bars(axes: Any, figure: Figure) -> None:
    """Bars of every series side by side in each category."""
    width = 0.8 / len(figure.series)
    for i, series in enumerate(figure.series):
        places = [j + (i - (len(figure.series) - 1) / 2) * width for j in range(len(figure.categories))]
        heights = [0.0 if value is None else value for value in series.values]
        axes.bar(places, heights, width, color=series.colour, label=series.name)
    crowded = sum(map(len, figure.categories)) > 90
    axes.set_xticks(
        range(len(figure.categories)),
        figure.categories,
        rotation=30 if crowded else 0,
        fontsize=8,
        ha="right" if crowded else "center",
    )
    axes.margins(y=0.22)


__all__ = ["GIB", "check_pictures", "markdown", "page", "picture", "write_document", "write_report"]
