"""SACEstimator (AUTO-SAC section 5.3): from a captured step and its prices to what the solvers need.

For every region of a trace that was captured without checkpointing, `SACEstimator.stats` gives each operator

- its runtime: the device time of the events that it covers, plus host time if asked (eager checkpointing launches every
  recomputed operator again: a launch-bound model pays for each);
- its memory: the storages that it made and that outlived it, except those that are alive at the region's backward whatever
  the policy does (its inputs, and outputs that others hold).

With `on_demand`, recomputation runs only what leads from what is kept to what the backward asks for, as plans do: operators
that no tensor of the backward depends on cost nothing, and what else need not run follows from what is kept (`sac_closure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autosac.choices import CURVES
from autosac.errors import UsageError
from autosac.estimator.sac_closure import closure_of, ever_needed
from autosac.estimator.sac_curves import MAX_SEGMENTS, tight_chords, upper_bound
from autosac.estimator.sac_rules import Grouping, operator_groups
from autosac.estimator.sac_stats import (
    SACModGreedyOrder,
    SACModStats,
    SACModTradeoffStats,
    SACOperator,
    tradeoff,
)
from autosac.memory_sim.spans import Span, StorageEvents, region_spans
from autosac.solvers import Closure, CurveSegment, LocalProblem
from autosac.trace import Call, Collective, Label, Op, Phase, Region, Trace

_HELD_ELSEWHERE = (Label.PARAMETER, Label.UNSHARDED_PARAMETER, Label.COMMUNICATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class SACModule:
    """One region's statistics with what follows from them."""

    stats: SACModStats
    problem: LocalProblem
    tradeoff: SACModTradeoffStats

    @property
    def order(self) -> SACModGreedyOrder:
        """The groups by MSPS."""
        return self.tradeoff.order

    def segments(self, curve: str = "staircase", max_segments: int | None = None) -> tuple[CurveSegment, ...]:
        """The trade-off curve as lines: "staircase" or "pwlf" (see `sac_curves`).

        Without `max_segments` the whole hull for "staircase", whose relaxation is then that of the joint problem, a bound of
        every plan; and MAX_SEGMENTS lines for "pwlf". UsageError for another name.
        """
        if curve not in CURVES:
            raise UsageError(f"curve {curve!r}: expected one of {', '.join(CURVES)}")
        points = self.tradeoff.curve()
        if curve == "pwlf":
            return upper_bound(points, max_segments or MAX_SEGMENTS)
        return tight_chords(points, max_segments or len(points))


class SACEstimator:
    """Statistics of the regions of one trace. See the module's docstring.

    `event_ms`: device time of every event. `host_us_per_operator`: host time of every recomputed operator
    that is not a view. `store_random`: always keep random operators (else all or none of them); with `on_demand` each
    is like others, but for compiled steps. UsageError if the times do not fit.
    """

    def __init__(
        self,
        trace: Trace,
        event_ms: Sequence[float],
        *,
        host_us_per_operator: float = 0.0,
        store_random: bool = True,
        on_demand: bool = False,
    ) -> None:
        if len(event_ms) != len(trace.events):
            raise UsageError(f"{len(event_ms)} times were given for the {len(trace.events)} events of the trace")
        if not host_us_per_operator >= 0:
            raise UsageError(f"host time per operator must not be negative: {host_us_per_operator}")
        self._trace = trace
        self._event_ms = [float(ms) for ms in event_ms]
        self._host_ms = host_us_per_operator * 1e-3
        self._store_random = store_random
        self._on_demand = on_demand
        # The compiler does not always draw the same numbers again.
        self._redraws = on_demand and not trace.info.compiled
        self._lifetimes = StorageEvents(trace)
        self._spans = region_spans(trace, self._lifetimes)
        self._writes = _forward_writes(trace)

    def modules(self) -> dict[int, SACModule]:
        """All regions that a backward belongs to, by their index in the trace; refused ones included."""
        found = {}
        problems: dict[LocalProblem, LocalProblem] = {}
        for i, span in enumerate(self._spans):
            if span is not None:
                stats = self.stats(i)
                problem = stats.local_problem()
                problem = problems.setdefault(problem, problem)
                found[i] = SACModule(stats=stats, problem=problem, tradeoff=tradeoff(problem))
        return found

    def stats(self, region_index: int) -> SACModStats:
        """Statistics of one region. UsageError if no backward belongs to it."""
        region, span = self._trace.regions[region_index], self._spans[region_index]
        name = self._trace.modules[region.module]
        if span is None:
            raise UsageError(f"no backward uses what the forward of {name!r} makes")
        grouping = operator_groups(
            region.calls,
            written_later=self._written_later(region, span),
            store_random=self._store_random,
            redraws=self._redraws,
        )
        operators = self._operators(region, span, grouping)
        closure = self._closure(region, span, grouping, operators) if self._on_demand else None
        needed = ever_needed(region.calls, span.implicit) if self._on_demand else range(len(region.calls))
        return SACModStats(
            module=name,
            region=region_index,
            operators=tuple(o if i in needed else o._replace(runtime_ms=0.0) for i, o in enumerate(operators)),
            groups=grouping.groups,
            implicit_bytes=self._lifetimes.bytes_of(span.implicit),
            boundary_bytes=self._lifetimes.bytes_of(span.boundary),
            refusal=grouping.refusal,
            closure=closure,
            closed=tuple(needed) if self._on_demand else (),
        )

    def _operators(self, region: Region, span: Span, grouping: Grouping) -> tuple[SACOperator, ...]:
        outside = self._outside(region, span)
        return tuple(
            SACOperator(
                name=call.op,
                occurrence=call.occurrence,
                runtime_ms=self._runtime_ms(call),
                memory_bytes=self._lifetimes.bytes_of([s for s in call.created if s not in outside]),
                view_like=call.is_view,
                random=call.is_random,
                inplace_parent=parent,
                must_save=call.must_save,
                outputs=call.outputs,
            )
            for call, parent in zip(region.calls, grouping.inplace_parent, strict=True)
        )

    def _runtime_ms(self, call: Call) -> float:
        if call.is_view:
            return 0.0
        return sum(self._event_ms[call.first : call.last], self._host_ms)

    def _written_later(self, region: Region, span: Span) -> set[int]:
        """Storages of the region that something else writes to between its forward and its backward."""
        storages = {s for call in region.calls for s in (*call.created, *call.reads)}
        return {
            s
            for s in storages.intersection(self._writes)
            if any(region.last <= i < span.active_first for i in self._writes[s])
            and self._trace.storages[s].label not in _HELD_ELSEWHERE
        }

    def _closure(self, region: Region, span: Span, grouping: Grouping, operators: Sequence[SACOperator]) -> Closure:
        """What autograd holds is asked for; what is alive at the backward whatever the policy does is kept for nothing."""
        outside = self._outside(region, span)
        return closure_of(
            region.calls,
            grouping.groups,
            span.implicit,
            [operator.runtime_ms for operator in operators],
            lambda s: 0 if s in outside else self._lifetimes.bytes_of([s]),
        )

    def _outside(self, region: Region, span: Span) -> set[int]:
        return {s for s in (*region.inputs, *region.outputs) if self._lifetimes.free_of(s) >= span.active_first}


def _forward_writes(trace: Trace) -> dict[int, list[int]]:
    """Events of the forward that write to each storage."""
    writes: dict[int, list[int]] = {}
    for i, event in enumerate(trace.events):
        if isinstance(event, Op | Collective) and event.phase is Phase.FORWARD and event.signature >= 0:
            for position in trace.signatures[event.signature].mutates:
                storage = event.inputs[position]
                if storage >= 0:
                    writes.setdefault(storage, []).append(i)
    return writes
