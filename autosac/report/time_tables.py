"""Where the step time goes, as tables: by what serves as its price, by module, along the critical path.

    prices          every cost model that served, how much of the priced device time is its, and the relative standard error
                    that it states (weighted by time). "learned:matmul@l40s": the L40S's model, scaled to this GPU. Prices
                    are those of operators alone; the line below says what they take in the step, beside each other
    modules         device time of a module and all below it, as in the step; modules that differ only in a number and agree
                    in two digits are one row. The row of the model has the step's computation and communication
    critical path   what the step consists of without a gap (`runtime_sim.critical_path`), by kind of operator, collective, or
                    the host

`time_tables` is for people, `time_document` for machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType

from autosac.display.module_names import span, without_numbers
from autosac.display.tables import Table
from autosac.estimator import Pricing
from autosac.quantities import format_ms
from autosac.runtime_sim import ModuleTimes, PathSegment
from autosac.runtime_sim.program import Engine
from autosac.simulation import Simulation
from autosac.trace import Collective, Op, Trace

_ROWS = 12


class Served(NamedTuple):
    """A cost model: the milliseconds it priced, their share of all priced ones, its mean relative standard error."""

    model: str
    ms: float
    share: float
    rel_std: float


class Link(NamedTuple):
    """A kind of link of the critical path: how often, how long, and why it did not begin earlier (ms by reason)."""

    what: str
    number: int
    ms: float
    reasons: dict[str, float]


def served(pricing: Pricing) -> list[Served]:
    """Which model served how much of the step's device time, the most first."""
    total = float(pricing.event_ms.sum()) or 1.0
    rows = []
    for model, ms in pricing.shares().items():
        mine = pricing.event_source == pricing.source.index(model)
        error = float(np.dot(pricing.event_rel_std[mine], pricing.event_ms[mine])) / ms if ms else 0.0
        rows.append(Served(model, ms, ms / total, error))
    return rows


def served_line(pricing: Pricing) -> str:
    """The models by their classes on one line: ``learned 62% (11% scaled from l40s), roofline 5%``."""
    classes: dict[str, float] = defaultdict(float)
    scaled: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in served(pricing):
        name, _, of = row.model.partition("@")
        name = name.partition(":")[0]
        classes[name] += row.share
        if of:
            scaled[name][of] += row.share
    parts = []
    for name, share in sorted(classes.items(), key=lambda item: -item[1]):
        if share < 0.0005:
            continue
        others = ", ".join(f"{part:.0%} scaled from {of}" for of, part in scaled[name].items() if part >= 0.005)
        parts.append(f"{name} {share:.0%}" + f" ({others})" * bool(others))
    return ", ".join(parts) or "nothing"


def links(segments: Sequence[PathSegment], traces: dict[int, Trace]) -> list[Link]:
    """The critical path by what it consists of, the longest first. `traces`: by rank."""
    found: dict[str, list[PathSegment]] = defaultdict(list)
    for segment in segments:
        found[_what(segment, traces[segment.rank])].append(segment)
    result = []
    for what, mine in found.items():
        reasons: dict[str, float] = defaultdict(float)
        for segment in mine:
            reasons[segment.reason] += segment.end_ms - segment.start_ms
        result.append(Link(what, len(mine), sum(reasons.values()), dict(reasons)))
    return sorted(result, key=lambda link: -link.ms)


def _what(segment: PathSegment, trace: Trace) -> str:
    if segment.reason in ("host", "sync") or segment.event < 0:
        return "the host"
    event = trace.events[segment.event]
    if type(event) is Op:
        return trace.signatures[event.signature].name.removeprefix("aten.").removesuffix(".default")
    return event.kind if type(event) is Collective else type(event).__name__


def time_tables(simulation: Simulation) -> RenderableType:
    """What the step time consists of: see the module's docstring."""
    return Group(_prices(simulation), _modules(simulation.breakdown.modules), _path(simulation))


def time_document(simulation: Simulation) -> dict[str, Any]:
    """The same for machines: every module, and the critical path by kind."""
    return {
        "priced_by": [row._asdict() for row in served(simulation.pricing)],
        "shared": shared(simulation)._asdict(),
        "modules": [
            {name: getattr(module, name) for name in ModuleTimes.__dataclass_fields__}
            for module in simulation.breakdown.modules
        ],
        "critical_path": [link._asdict() for link in _links_of(simulation)],
    }


class Shared(NamedTuple):
    """Computation and communication (ms): `alone`, as priced, and `together` in the step, where they slow each other down, and
    collectives that move bytes at the same time count once.
    """

    alone_compute_ms: float
    alone_communication_ms: float
    together_compute_ms: float
    together_communication_ms: float

    def __str__(self) -> str:
        alone = (
            f"computation {format_ms(self.alone_compute_ms)}, communication {format_ms(self.alone_communication_ms)}"
        )
        together = f"{format_ms(self.together_compute_ms)} and {format_ms(self.together_communication_ms)}"
        return f"priced alone: {alone}; in the step, where they overlap: {together}"


def shared(simulation: Simulation) -> Shared:
    """What the prices add up to, and what the step's summary says."""
    timeline, breakdown = simulation.timeline, simulation.breakdown
    engine = timeline.ranks[simulation.stage].engine
    priced = timeline.problem.event_ms[simulation.stage]
    return Shared(
        float(priced[engine == Engine.COMPUTE].sum()),
        float(priced[engine == Engine.COMMUNICATION].sum()),
        breakdown.compute_ms,
        breakdown.communication_ms,
    )


def _prices(simulation: Simulation) -> Table:
    pricing = simulation.pricing
    table = Table("cost model", title="Device time by cost model", caption=str(shared(simulation)))
    for heading in ("time", "share", "standard error"):
        table.add_column(heading, justify="right")
    for row in served(pricing):
        table.add_row(row.model, format_ms(row.ms), f"{row.share:.1%}", f"{row.rel_std:.0%}")
    return table


def _modules(modules: Sequence[ModuleTimes]) -> Table:
    """The modules of the first two levels that launch something, alike ones together."""
    table = Table("module", title="Device time by module (including submodules)")
    for heading in ("number", "compute", "communication", "exposed", "recomputed"):
        table.add_column(heading, justify="right")
    shown = [m for m in modules if m.name.count(".") <= 1 and (m.compute_ms or m.communication_ms)]
    equal: dict[tuple[str, ...], list[ModuleTimes]] = defaultdict(list)
    for module in shown:
        equal[without_numbers(module.name), *_rounded(module)].append(module)
    for members in equal.values():
        first = members[0]
        table.add_row(
            span([member.name for member in members]) or "(model)",
            str(len(members)),
            *(format_ms(value) for value in _times(first)),
        )
    return table


def _times(module: ModuleTimes) -> tuple[float, float, float, float]:
    return module.compute_ms, module.communication_ms, module.exposed_communication_ms, module.recompute_ms


def _rounded(module: ModuleTimes) -> tuple[str, ...]:
    """Equal for modules that are to share a row: two digits are the same."""
    return tuple(f"{value:.1e}" if value > 0.05 else "" for value in _times(module))


def _links_of(simulation: Simulation) -> list[Link]:
    timeline = simulation.timeline
    return links(timeline.critical_path(), {rank.rank: rank.trace for rank in timeline.ranks})


def _path(simulation: Simulation) -> Table:
    table = Table("on the critical path", title=f"Critical path of the step ({format_ms(simulation.step_ms)})")
    for heading in ("number", "time", "share"):
        table.add_column(heading, justify="right")
    table.add_column("mostly begins after")
    found = _links_of(simulation)
    for link in found[:_ROWS]:
        why = max(link.reasons, key=lambda reason: link.reasons[reason])
        share = f"{link.ms / simulation.step_ms:.1%}"
        table.add_row(link.what, str(link.number), format_ms(link.ms), share, _REASONS.get(why, why))
    rest = found[_ROWS:]
    if rest:
        ms = sum(link.ms for link in rest)
        share = f"{ms / simulation.step_ms:.1%}"
        table.add_row(f"{len(rest)} others", str(sum(link.number for link in rest)), format_ms(ms), share, "")
    return table


_REASONS = {
    "start": "the step's beginning",
    "stream": "the kernel before it on its stream",
    "dependency": "a kernel on another stream",
    "engine": "another kernel kept the GPU busy",
    "peer": "the last rank arrived",
    "launch": "the host launched it",
    "host": "the host's work before it",
    "sync": "the host's wait for the device",
}
