"""Balanced pipeline stages beside TorchTitan's own: what both take, simulated under the space's ways of checkpointing.

Of every pipeline of the space, the best step that fits is taken for each of the two splits, as the search would.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autosac.configurations.running.search import TitanSearch
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.request import SearchRequest
from autosac.quantities import format_bytes

_HEADINGS = ("pipeline", "TorchTitan's layers", "balanced", "TorchTitan's step", "balanced step", "gain", "peaks")


def compare_splits(request: SearchRequest) -> int:
    """Print a table; how many pipelines there are."""
    knobs = request.knobs.model_copy(update={"pipeline_split": ("torchtitan", "balanced")})
    print("| " + " | ".join(_HEADINGS) + " |\n|---|---|---|--:|--:|--:|---|")
    with searching(replace(request, space=knobs)) as search:
        pipelines = [layout for layout in search.layouts if layout.split == "balanced"]
        for layout in pipelines:
            search.ask_sheet(layout)
            print(_row(search, layout), flush=True)
    return len(pipelines)


def _row(search: TitanSearch, balanced: Layout) -> str:
    own = replace(balanced, split="torchtitan")
    counts = ["-".join(map(str, search.stage_layers(layout))) for layout in (own, balanced)]
    (own_ms, own_bytes), (ms, nbytes) = _best(search, own), _best(search, balanced)
    gain = f"{own_ms / ms - 1:+.1%}" if math.isfinite(own_ms) and math.isfinite(ms) else "–"
    name = ", ".join(word for word in str(own).split(", ") if not word.startswith("fsdp"))
    peaks = f"{format_bytes(own_bytes)}, {format_bytes(nbytes)}"
    return f"| {name} | {counts[0]} | {counts[1]} | {_text(own_ms)} | {_text(ms)} | {gain} | {peaks} |"


def _best(search: TitanSearch, layout: Layout) -> tuple[float, int]:
    """The best step that fits, in milliseconds, and its peak; infinite and the least peak if none does."""
    rows = search.workers.submit(search.task(layout, math.inf)).result().get("rows", [])
    fitting = [(row["step_ms"], row["peak_reserved_bytes"]) for row in rows if row["fits"]]
    return min(fitting, default=(math.inf, min((row["peak_reserved_bytes"] for row in rows), default=0)))


def _text(ms: float) -> str:
    return f"{ms:,.1f} ms" if math.isfinite(ms) else "does not fit"
