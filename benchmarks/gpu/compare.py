"""Measured beside predicted, from the results of all programs of this folder, as Markdown.

python -m benchmarks.gpu.compare DIR
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from autosac.estimator.gpu import match_gpu
from autosac.files.writing import write_text_atomically
from benchmarks.gpu import products
from benchmarks.gpu.steps import table_of

_GIB = 2**30


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def _cell(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{value / scale:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def lines_of(document: dict[str, Any]) -> list[str]:
    """One table: a row for every run."""
    about = document["about"]
    name = about.get("gpu", {}).get("name", about["device"])
    lines = [
        f"{name}, {about['date'][:10]}, torch {about['versions'].get('torch', '?')}",
        "",
        "| model | policy | step (ms) | predicted | error | active (GiB) | predicted | error | reserved (GiB) | predicted "
        "| error | note |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    errors: dict[str, list[float]] = {"step_ms": [], "peak_active_bytes": [], "peak_reserved_bytes": []}
    for row in document["rows"]:
        predicted, measured = row.get("predicted", row), row.get("measured") or {}
        policy = row.get("policy", "")
        if row.get("budget_bytes") and policy == "knapsack":
            policy = f"plan for {row['budget_bytes'] / _GIB:.4g} GiB"
        failure = row.get("error") or measured.get("error") or ""
        cells = [row["model"], policy]
        for key, scale, digits in (("step_ms", 1, 1), ("peak_active_bytes", _GIB, 3), ("peak_reserved_bytes", _GIB, 3)):
            error = _error(predicted.get(key), measured.get(key))
            if error is not None:
                errors[key].append(error)
            cells += [
                _cell(measured.get(key), scale, digits),
                _cell(predicted.get(key), scale, digits),
                _percent(error),
            ]
        lines.append("| " + " | ".join([*cells, failure.replace("|", "/")]) + " |")
    lines.append("")
    for key, found in errors.items():
        if found:
            mean = statistics.mean(map(abs, found))
            lines.append(f"- {key}: mean error {mean:.1%}, worst {max(found, key=abs):+.1%} ({len(found)} runs)")
    return lines


def power_lines(document: dict[str, Any]) -> list[str]:
    """What `benchmarks.gpu.power` measured: a row for every mix."""
    lines = ["| mix | short (ms) | lasting (ms) | ratio | W | MHz |", "|---|--:|--:|--:|--:|--:|"]
    for row in document["rows"]:
        if "sustained_ms" in row:
            short, lasting = row["short_ms"], row["sustained_ms"]
            cells = [row["mix"], f"{short:.3f}", f"{lasting:.3f}", f"{lasting / short:.2f}", f"{row['watts']:.0f}"]
            lines.append("| " + " | ".join([*cells, f"{row['mhz']:.0f}"]) + " |")
    return lines


def products_lines(document: dict[str, Any]) -> list[str]:
    """What `benchmarks.gpu.products` measured beside prices at full clock, before they were known and now, by halves."""
    about = document["about"]["gpu"]
    gpu = match_gpu(about["name"], tuple(about["capability"]), about["sm_count"], about["total_bytes"])
    return products.table_of(document["rows"], products.prices_us(gpu))


def main() -> None:
    """Print and write ``comparison.md``."""
    folder = Path(sys.argv[1])
    lines = []
    for name in ("plain", "titan", "gradients", "allocator"):
        path = folder / f"{name}.json"
        if path.exists():
            lines += [f"## {name}", "", *lines_of(json.loads(path.read_text())), ""]
    for name, table in (("power", power_lines), ("products", products_lines)):
        path = folder / f"{name}.json"
        if path.exists():
            document = json.loads(path.read_text())
            lines += [f"## {name}", "", *table(document), ""]
    for kind in ("eager", "compiled", "study", "later", "later-compiled"):
        path = folder / f"predicted-{kind}.json"
        if path.exists():
            lines += [f"## steps, {kind}", "", *table_of(json.loads(path.read_text())), ""]
    print("\n".join(lines))
    write_text_atomically(folder / "comparison.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
