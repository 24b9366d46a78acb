"""What pages and pictures show, as plain values: tests compare these rather than pixels or the libraries' own files.

Test modules import this as ``pictures`` (see `pythonpath` in pyproject.toml).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

_PLOTLY = re.compile(r"Plotly\.newPlot\(\s*")
_SPACE = re.compile(r"[\s,]*")


def plotly_figures(page: str) -> list[dict[str, Any]]:
    """Data and layout of every plotly figure of a page, without plotly's template."""
    found = []
    decoder = json.JSONDecoder()
    for match in _PLOTLY.finditer(page):
        place, parts = match.end(), []
        for _ in range(3):  # the element's name, data, layout
            part, place = decoder.raw_decode(page, _SPACE.match(page, place).end())  # type: ignore[union-attr]
            parts.append(part)
        _, data, layout = parts
        layout.pop("template", None)
        found.append({"data": plain(data), "layout": plain(layout)})
    return found


def without_figures(page: str) -> str:
    """The page's own text: no scripts, no styles, no elements of plotly; one line for each element."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    text = re.sub(r"<div[^>]*>|</div>", "", text)
    return re.sub(r"(</(?:p|li|tr|h1|h2|table|ul)>)", r"\1\n", text)


def plain(value: Any) -> Any:
    """JSON's types, with six digits of each number; plotly's packed arrays as lists."""
    if isinstance(value, Mapping):
        if set(value) >= {"dtype", "bdata"}:
            return plain(np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"]).tolist())
        return {str(key): plain(of) for key, of in value.items()}
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}")
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return [plain(of) for of in value] if isinstance(value, list | tuple) else value


def drawn_by_matplotlib(figure: Any) -> list[Any]:
    """Of every axes of a figure: titles, limits, lines, bars, areas, texts and the legend; then the figure's own legends."""
    return plain(
        [*map(_axes, figure.axes), *[[text.get_text() for text in each.get_texts()] for each in figure.legends]]
    )


def _axes(axes: Any) -> dict[str, Any]:
    legend = axes.get_legend()
    return {
        "titles": [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()],
        "scales": [axes.get_xscale(), axes.get_yscale(), axes.get_xlim(), axes.get_ylim()],
        "lines": [
            [
                *(
                    line.get_label(),
                    str(line.get_color()),
                    line.get_linestyle(),
                    line.get_marker(),
                    line.get_linewidth(),
                ),
                *(line.get_drawstyle(), str(line.get_markerfacecolor()), line.get_xdata(), line.get_ydata()),
            ]
            for line in axes.lines
        ],
        "bars": [[bar.get_facecolor(), *_corners(bar)] for bar in axes.patches],
        "areas": [[area.get_facecolor(), *(p.vertices for p in area.get_paths())] for area in axes.collections],
        "texts": [
            [text.get_text(), text.get_position(), text.xy, text.get_ha(), text.get_fontsize(), str(text.get_color())]
            for text in axes.texts
        ],
        "ticks": [[text.get_text(), text.get_rotation(), text.get_ha()] for text in axes.get_xticklabels()]
        if axes.containers
        else [],
        "legend": [text.get_text() for text in legend.get_texts()] if legend else [],
    }


def _corners(patch: Any) -> Iterator[Any]:
    yield patch.get_path().transformed(patch.get_patch_transform()).vertices


class Pictures:
    """What matplotlib writes while a test runs, as `drawn_by_matplotlib` tells it; it writes nonetheless."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from matplotlib.figure import Figure

        self.drawn: list[Any] = []
        write = Figure.savefig

        def savefig(figure: Any, *args: Any, **kwargs: Any) -> None:
            write(figure, *args, **kwargs)
            self.drawn.append(drawn_by_matplotlib(figure))

        monkeypatch.setattr(Figure, "savefig", savefig)
