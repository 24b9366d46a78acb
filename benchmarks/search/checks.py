"""Lower bounds of layouts taken at random from a space against all that is worked out of them.

Checked of each layout: both bounds of the step against its best row that fits and against the step without checkpointing; of
each row, the step without checkpointing, the bound within the memory that the row itself takes, and the memory bound. A bound
above what it bounds is wrong: "proven" would be, too. Where all layouts of a space are checked, the search's best is compared
with the best of all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autosac.configurations.running.search import TitanSearch
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.request import SearchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A bound and what it bounds, in milliseconds or bytes."""

    layout: Layout
    name: str
    bound: float
    value: float

    @property
    def is_wrong(self) -> bool:
        """Whether the bound is above the value."""
        return self.bound > self.value

    @property
    def share(self) -> float:
        """Of the value that the bound reaches."""
        return self.bound / self.value if self.value and math.isfinite(self.value) else 0.0


def check_bounds(request: SearchRequest, count: int, seed: int) -> int:
    """Print how tight the bounds of `count` layouts are, and each that is wrong; how many are."""
    found: list[Checked] = []
    best = math.inf
    with searching(request) as search:
        search.first_bounds()
        chosen = random.Random(seed).sample(search.layouts, min(count, len(search.layouts)))
        for layout in chosen:
            answer = search.workers.submit(search.task(layout, math.inf)).result()
            some = list(_of_layout(search, layout, answer))
            best = min(best, *(row["step_ms"] for row in answer.get("rows", ()) if row["fits"]), math.inf)
            print(f"{layout}: " + ", ".join(f"{c.name} {c.share:.1%}" for c in some) + str(answer.get("refused", "")))
            found += some
        if len(chosen) == len(search.layouts):
            found += _of_search(search, best)
    wrong = [checked for checked in found if checked.is_wrong]
    for checked in wrong:
        print(f"WRONG {checked.layout}: {checked.name} is {checked.bound:,.3f}, of {checked.value:,.3f}")
    print(f"{len(chosen)} layouts, {len(found)} bounds, {len(wrong)} wrong")
    return len(wrong)


def _of_search(search: TitanSearch, best: float) -> Iterator[Checked]:
    """The search's best, within its gap, against that of all layouts. A plan that counts has been captured, the others' are
    derived.
    """
    result = search.run()
    if result.best is None:
        yield Checked(layout=search.layouts[0], name="the search, which found nothing,", bound=math.inf, value=best)
        return
    print(f"the best of all is {best:,.3f} ms, the search's {result.best.score:,.3f} ms: {result.best.name}")
    if not result.proven:
        yield Checked(layout=result.best.layout, name="the search, which proved nothing,", bound=math.inf, value=best)
    within = result.best.score * (1 - result.gap)
    yield Checked(layout=result.best.layout, name="the best found, less the gap,", bound=within, value=best)


def _of_layout(search: TitanSearch, layout: Layout, answer: dict[str, Any]) -> Iterator[Checked]:
    rows = answer.get("rows", [])
    if not rows:
        return
    search.ask_sheet(layout)
    best = min((row["step_ms"] for row in rows if row["fits"]), default=math.inf)
    yield Checked(layout=layout, name="first", bound=search.first_bounds()[layout], value=best)
    none = answer.get("at_least_ms", min(row["step_ms"] for row in rows))  # unless it cannot run
    yield Checked(layout=layout, name="none", bound=search.sheet_bound(layout, math.inf) or 0.0, value=none)
    least = search.least_bytes(layout)
    for row in rows:
        name, peak = row["checkpointing"], row["peak_reserved_bytes"]
        tight = search.sheet_bound(layout, peak) or 0.0
        yield Checked(layout=layout, name=f"{name} less none", bound=none, value=row["step_ms"])
        yield Checked(layout=layout, name=f"{name} within its own memory", bound=tight, value=row["step_ms"])
        yield Checked(layout=layout, name=f"{name} bytes", bound=least, value=peak)
