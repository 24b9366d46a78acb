"""From a capture in which units recompute all that they may to the capture in which they keep some of it.

`Keeper(observed, template)` finds, once, where each operator of a unit ran: `observed` says which operators a policy sees
in the unit's forward (`Region.calls`), the same rows are found in the template's forward (they have to be the same, one by
one); the template's own regions say which of them its recomputation ran again. `Keeper.keeping(decisions)` then edits the
template (`autosac.derivation.edits`).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosac.derivation.edits import KeptResults, StepEdits
from autosac.derivation.gathers import Gather, Hook, gatherings, hooks_of, renamed
from autosac.derivation.steps import (
    COPY,
    NEVER,
    CapturedSteps,
    NotDerivableError,
    Recomputation,
    Skeleton,
    Tables,
    executions,
)
from autosac.derivation.unit_executions import CallRows, Need, UnitExecution, empty_inputs
from autosac.plans import Decision
from autosac.trace import (
    UNSHARD,
    Alloc,
    Call,
    Event,
    ModuleExit,
    Phase,
    Region,
    Signature,
    Trace,
)


class Keeper:
    """See the module's docstring. NotDerivableError if the traces do not fit each other."""

    def __init__(self, observed: CapturedSteps, template: CapturedSteps) -> None:
        self._template = template
        tables = Tables([template.trace, observed.trace])
        if tables.signatures != template.trace.signatures and not set(tables.signature_maps[1]):
            raise NotDerivableError("the observed step is empty")
        self._observed = observed
        self._signatures = (tables.signature_maps[1], tables.signature_maps[0])
        self._hooks: dict[range, Hook] = {}
        if gatherings(template):
            self._hooks = hooks_of(Skeleton(observed, tables, 1), Skeleton(template, tables, 0), tables.source_maps[1])
        self._forward = self._aligned()
        self._storages = self._paired_storages()
        self.executions: dict[int, tuple[UnitExecution, ...]] = {}
        blocks: dict[int, list[Region]] = {}
        for region in template.trace.regions:
            blocks.setdefault(region.module, []).append(region)
        if sorted(blocks) != sorted({block.module for block in template.recomputations}):
            raise NotDerivableError("the template's recomputations are not those of a plan")
        for module, found in blocks.items():
            regions = executions(observed.trace, module)
            if len(regions) != len(found):
                raise NotDerivableError("a module is recomputed more or less often than it runs")
            self.executions[module] = tuple(
                self._execution(region, block)
                for region, block in zip(regions, sorted(found, key=lambda block: block.inputs), strict=True)
            )

    # ---- where operators ran ----------------------------------------------------------------------------------------

    def _aligned(self) -> tuple[list[int], list[int]]:
        """The forward's rows in both traces, pair by pair."""
        mine, theirs = self._observed.forward_rows(), self._template.forward_rows()
        first = [self._observed.key(i, self._signatures[0]) for i in mine]
        if first != [self._template.key(i, self._signatures[1]) for i in theirs]:
            raise NotDerivableError("the forward under checkpointing runs other operators")
        return mine, theirs

    def _paired_storages(self) -> dict[int, int]:
        """The template's storage for each storage that the observed forward allocated."""
        pairs = zip(*self._forward, strict=True)
        mine, theirs = self._observed.rows, self._template.rows
        return {mine[i].storage: theirs[j].storage for i, j in pairs if type(mine[i]) is Alloc}

    def _execution(self, region: Region, block: Region) -> UnitExecution:
        mine, theirs = self._forward
        start, split = self._observed.split, self._template.split
        first_row = bisect.bisect_left(mine, region.first + start)
        last_row = bisect.bisect_left(mine, region.last + start)
        again = {(c.op, c.occurrence): range(c.first + split, c.last + split) for c in block.calls if c.op != UNSHARD}
        found: list[CallRows] = []
        for call in region.calls:
            low = bisect.bisect_left(mine, call.first + start, first_row, last_row)
            high = bisect.bisect_left(mine, call.last + start, low, last_row)
            repeated = again.get((call.op, call.occurrence), range(0))
            if low == high:
                found.append(CallRows(call, range(0), repeated, {}))
                continue
            before, after = mine[low] - call.first - start, call.last + start - 1 - mine[high - 1]
            forward = range(theirs[low] - before, theirs[high - 1] + after + 1)
            observed = self._observed.rows[call.first + start : call.last + start]
            if [type(row) for row in observed] != [type(self._template.rows[i]) for i in forward]:
                raise NotDerivableError("an operator's allocations differ")
            found.append(CallRows(call, forward, repeated, self._made(call, forward, repeated)))
        calls = tuple(found)
        whole = Recomputation(block.module, block.first + split, block.last + split)
        completed = self._completed(block.module, theirs[last_row - 1] if last_row > first_row else -1)
        reruns = [rows.recomputed for rows in calls]
        gathered = (range(c.first + split, c.last + split) for c in block.calls if c.op == UNSHARD)
        gathers = tuple(Gather(self._template, rows, reruns, self._hooks[rows]) for rows in gathered)
        empty = empty_inputs(calls, self._template)
        execution = UnitExecution(calls=calls, block=whole, completed=completed, gathers=gathers, empty=empty)
        wanted = [calls[c].call for c in Need(execution, self.roots(execution), frozenset()).calls]
        # A view that a tensor becomes in place (`as_strided_`) launches nothing, so nothing tells whether it runs again. What
        # runs on the host reads what has no storage, so nothing tells who needs it; it leaves no rows, either.
        on_host = {(rows.call.op, rows.call.occurrence) for rows in calls if _runs_on_host(rows)}
        needed = {(call.op, call.occurrence) for call in wanted if not (call.is_view and call.writes)}
        if needed - on_host != again.keys() - on_host:
            raise NotDerivableError("a recomputation runs other operators than are needed")
        return execution

    def _made(self, call: Call, forward: range, repeated: range) -> dict[int, tuple[int, int]]:
        rows, storages = self._template.rows, self._template.trace.storages
        before = [rows[i].storage for i in forward if type(rows[i]) is Alloc]
        again = [rows[i].storage for i in repeated if type(rows[i]) is Alloc]
        if call.op != COPY:  # what it changes from outside is copied once more
            again = [s for s in again if storages[s].op != COPY]
        if repeated and len(before) != len(again):
            raise NotDerivableError("an operator allocates otherwise when it runs again")
        pairs = dict(zip(before, again, strict=True)) if repeated else {}
        made = {s: self._storages[s] for s in call.created if s in self._storages}
        return {s: (here, pairs.get(here, -1)) for s, here in made.items()}

    def _completed(self, module: int, last: int) -> int:
        """The end of a module's forward in the template."""
        rows = self._template.rows
        for i in range(last + 1, len(rows)):
            if type(rows[i]) is ModuleExit and rows[i].module == module and rows[i].phase is Phase.FORWARD:
                return i - 1
        raise NotDerivableError("a forward has no end")

    def roots(self, execution: UnitExecution) -> frozenset[int]:
        """What the backward asks for, as observed: what the recomputation makes and leaves."""
        ends = self._template.ends
        return frozenset(
            s
            for rows in execution.calls
            for s, (_, again) in rows.made.items()
            if again >= 0 and ends.get(again, NEVER) >= execution.block.last
        )

    # ---- the edits --------------------------------------------------------------------------------------------------

    def keeping(self, decisions: Mapping[int, Sequence[Decision]]) -> Trace:
        """The template's step with what the units (by module) keep. NotDerivableError."""
        edits = StepEdits()
        signatures = dict.fromkeys(self._template.trace.signatures)
        index = {signature: i for i, signature in enumerate(signatures)}
        for module, rows in decisions.items():
            for execution in self.executions[module]:
                keeping = KeptResults(self._template, execution, self.roots(execution), rows, edits, index)
                if any(row.keep for row in rows):
                    keeping.apply()
        return self._edited(edits, tuple(index))

    def _edited(self, edits: StepEdits, signatures: tuple[Signature, ...]) -> Trace:
        split = self._template.split
        parts: list[list[Event]] = [[], []]
        for i, row in enumerate(self._template.rows):
            part = parts[i >= split]
            if i not in edits.deleted:
                part.append(renamed(row, edits.renamed))
            part += edits.inserted.get(i, ())
        trace = self._template.trace
        return replace(
            trace,
            signatures=signatures,
            storages=(*trace.storages, *edits.storages),
            prologue=tuple(parts[0]),
            events=tuple(parts[1]),
            regions=(),
        )


def _runs_on_host(rows: CallRows) -> bool:
    """Whether an operator makes numbers in host memory of others there."""
    call = rows.call
    on_host = bool(call.outputs) and all(meta.place == "cpu" for meta in call.outputs)
    return on_host and not rows.forward and not rows.recomputed and not call.reads
