"""What a search found, in the terminal."""

from __future__ import annotations

import math
from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from autosac.configurations.found.results import ConfigurationRow, SearchResult, is_tied, why_lost
from autosac.configurations.space.layout import Layout
from autosac.display.tables import Table
from autosac.quantities import format_bytes, format_ms

MOST_ROWS = 10


def search_summary(result: SearchResult) -> RenderableType:
    """The table of the ten best, and what is worth telling."""
    lines = [Text(f"- {note}") for note in notes(result)]
    return Group(search_table(result), *lines) if result.fitting else Group(*lines)


def search_table(result: SearchResult) -> Table:
    """The ten best that fit."""
    table = Table(title=f"Configurations (budget {budget_text(result)})")
    for heading, right in headings(result):
        table.add_column(heading, justify="right" if right else "left")
    for cells in best_rows(result):
        table.add_row(*cells)
    return table


def budget_text(result: SearchResult) -> str:
    """What each GPU may use; of each kind, where they differ."""
    if len(set(result.budgets_bytes.values())) < 2:
        return " or ".join(f"{format_bytes(size)} of each GPU" for size in {*result.budgets_bytes.values()})
    return ", ".join(f"{format_bytes(size)} of each {gpu}" for gpu, size in result.budgets_bytes.items())


def layout_text(result: SearchResult, layout: Layout) -> str:
    """A layout, with its GPUs if there are several kinds."""
    return f"{layout.world_size} x {layout.gpu}, {layout}" if len(result.offers) > 1 else str(layout)


def row_name(result: SearchResult, row: ConfigurationRow) -> str:
    """A configuration, with its GPUs if there are several kinds."""
    return f"{layout_text(result, row.layout)}, {row.measured.checkpointing}"


def headings(result: SearchResult) -> list[tuple[str, bool]]:
    """The columns of the ten best, and whether they hold numbers."""
    numbers = ["step time", "tokens/s/GPU", "MFU", "peak reserved"]
    numbers += ["cost of 1M tokens"] if result.objective == "cost-per-token" else []
    left = [("", False), ("configuration", False), ("checkpointing", False)]
    return [*left, *((heading, True) for heading in numbers), ("limit", False)]


def best_rows(result: SearchResult) -> list[list[str]]:
    """The cells of the ten best that fit."""
    found = []
    for position, row in enumerate(result.fitting[:MOST_ROWS], start=1):
        m = row.measured
        cells = [
            str(position) if not _tied(result, row) else f"{position} =",
            layout_text(result, row.layout),
            m.checkpointing,
            format_ms(m.step_ms),
            f"{m.tokens_per_second:,.0f}",
            f"{m.mfu:.1%}",
            format_bytes(m.peak_reserved_bytes),
        ]
        cells += [price_text(cost_per_million(row))] if result.objective == "cost-per-token" else []
        found.append([*cells, row.binds])
    return found


def price_text(price: float) -> str:
    """Three decimals, or three digits of what is less than a tenth."""
    return f"{price:,.3f}" if price >= 0.1 else f"{price:#.3g}"


def cost_per_million(row: ConfigurationRow) -> float:
    """What training on a million tokens costs, in the currency of the prices."""
    return row.offer.price / 3600 / row.measured.tokens_per_second * 1e6


def sure_text(result: SearchResult) -> str:
    """With which probability what fits does so; empty if that was not asked for."""
    if result.confidence is None:
        return ""
    return f"with a probability of {f'{result.confidence:.4%}'.rstrip('0%').rstrip('.')}%"


def notes(result: SearchResult) -> list[str]:
    """Why the runner-up lost, ties, the proof, how much work it was, what failed."""
    best, fitting, counts = result.best, result.fitting, result.counts
    found: list[str] = []
    if best is None:
        found.append("no configuration that was worked out fits" if result.rows else "no configuration was worked out")
    else:
        others = [row for row in fitting[1:] if row.layout != best.layout] or list(fitting[1:])
        if others:
            lost = why_lost(best, others[0])
            share = others[0].score / best.score - 1
            found.append(
                f"the runner-up ({row_name(result, others[0])}) is {share:.1%} behind{f': {lost}' if lost else ''}"
            )
        elif result.closest is not None and not counts.open:
            layout, bound = result.closest
            share = bound / best.score - 1
            rest = f"at least {share:.1%} behind" if share > 0 else f"at most {-share:.1%} better"
            found.append(
                f"the closest of the others ({layout_text(result, layout)}) was ruled out by its bound: it is {rest}"
            )
        found += _kinds_left_out(result, best)
        tied = len(result.tied)
        if tied:
            found.append(
                f"{tied} configuration{'s are' if tied > 1 else ' is'} tied with the best (marked =): they differ by less "
                "than the prediction's error"
            )
    if result.proven and best is not None:
        found.append(f"proven: no configuration of the space is better than the best by more than {result.gap:.1%}")
    elif not result.proven:
        found.append(f"not proven: {_why_not_proven(result)}")
    left = f", {counts.open:,} open" if counts.open else ""
    untried = (
        f" ({counts.induced:,} of them untried, because others with the same settings were)" if counts.induced else ""
    )
    sheets = f"{counts.sheets:,} one-layer capture{'' if counts.sheets == 1 else 's'} gave bounds"
    plans = (
        f"; {counts.derived:,} plan{'' if counts.derived == 1 else 's'} derived, {counts.confirmed:,} of them captured"
    )
    if result.confidence is not None:
        found.append(f"what fits does so {sure_text(result)} at least: the budget has room for the prediction's error")
    layouts = f"{counts.legal:,} layout{'' if counts.legal == 1 else 's'}"
    configurations = f"{counts.configurations:,} configuration{'' if counts.configurations == 1 else 's'}"
    found.append(
        f"{configurations} in {layouts}: {counts.bounded:,} ruled out by bounds, "
        f"{counts.evaluated:,} simulated, {counts.refused:,} refused{untried}{left}; {sheets}{plans if counts.derived else ''}"
    )
    if counts.reused:
        found.append(f"{counts.reused:,} answer{' came' if counts.reused == 1 else 's came'} from the study")
    for what, reasons in (("refused", result.refused), ("failed", result.failed)):
        found += [f"{number} {what}: {why}" for why, number in Counter(reasons.values()).most_common(3)]
    return found


def _kinds_left_out(result: SearchResult, best: ConfigurationRow) -> list[str]:
    """How far kinds of GPUs are behind of which bounds left nothing to simulate."""
    if result.counts.open:  # what is open may be closer
        return []
    simulated = {row.layout.gpu for row in result.rows}
    left = [offer for offer in result.offers if offer.gpu not in simulated and offer.gpu in result.kinds]
    return [
        f"{offer.world_size} x {offer.gpu}: "
        + (
            f"ruled out by bounds, at least {max(0.0, result.kinds[offer.gpu] / best.score - 1):.1%} behind"
            if math.isfinite(result.kinds[offer.gpu])
            else "nothing fits"
        )
        for offer in left
    ]


def _why_not_proven(result: SearchResult) -> str:
    failed = result.counts.failed
    if failed:
        evaluations = f"{failed} evaluation{'' if failed == 1 else 's'} failed"
        return f"{evaluations}, with bounds below the best; --resume tries again"
    if result.sampled:
        return "the space is too large to list; this is the best of the layouts that were proposed (a smaller --space proves)"
    return "the search was not finished"


def _tied(result: SearchResult, row: ConfigurationRow) -> bool:
    best = result.best
    return best is not None and row is not best and is_tied(best, row)


def search_document(result: SearchResult) -> dict[str, object]:
    """The result as JSON."""
    best = result.best
    return {
        "proven": result.proven,
        "gap": result.gap,
        "objective": result.objective,
        "budgets_bytes": dict(result.budgets_bytes),
        "seconds": result.seconds,
        "counts": {name: getattr(result.counts, name) for name in result.counts.__dataclass_fields__},
        "best": row_document(best, result) if best is not None else None,
        "rows": [row_document(row, result) for row in result.rows],
        "failed": [{"layout": str(layout), "reason": why} for layout, why in result.failed.items()],
        "refused": [{"layout": str(layout), "reason": why} for layout, why in result.refused.items()],
    }


def row_document(row: ConfigurationRow, result: SearchResult) -> dict[str, object]:
    """One configuration as JSON."""
    measured = row.measured
    best = result.best
    return {
        "gpu": row.offer.gpu,
        "world_size": row.offer.world_size,
        "layout": {name: getattr(row.layout, name) for name in row.layout.__dataclass_fields__},
        "settings": dict(result.settings.get(row.layout, {})),
        "checkpointing": measured.checkpointing,
        "step_ms": measured.step_ms,
        "tokens_per_second_per_gpu": measured.tokens_per_second,
        "mfu": measured.mfu,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "fits": measured.fits,
        "limit": row.binds,
        "parts_ms": dict(measured.parts),
        "cost_per_million_tokens": cost_per_million(row) if row.offer.price else None,
        "tied_with_best": best is not None and is_tied(best, row),
        "score": row.score if math.isfinite(row.score) else None,
    }
