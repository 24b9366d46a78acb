"""From a capture in which units recompute all that they may to the capture in which they keep some of it.

`Keeper(observed, template)` finds, once, where each operator of a unit ran: `observed` says which operators a policy sees
in the unit's forward (`Region.calls`), the same rows are found in the template's forward (they have to be the same, one by
one) and then in its recomputation, which may lack rows: those of hooks that do not run again, and the end, if it stops early.
`Keeper.keeping(decisions)` then edits the template, by the rules of the package's docstring.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autosac.derivation.steps import DETACH, NEVER, NotDerivableError, Recomputation, Steps, Tables, executions
from autosac.plans import Decision
from autosac.trace import (
    Alloc,
    Call,
    Collective,
    Event,
    Free,
    Op,
    RecordStream,
    Region,
    Signature,
    TensorMeta,
    Trace,
    WorkWait,
)

_HOOKS = ("fsdp.", "c10d.", "resize_")


class CallRows(NamedTuple):
    """An operator's rows in the template: `forward` and `recomputed` (empty if recomputation stopped before it).

    Both are whole ranges, with what the operator allocated and freed inside.
    """

    call: Call
    forward: range
    recomputed: range


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One forward of a unit and its recomputation."""

    calls: tuple[CallRows, ...]
    block: Recomputation


@dataclass(kw_only=True)
class _Edits:
    """What is to be changed in the template's rows."""

    deleted: set[int] = field(default_factory=set)
    inserted: dict[int, list[Event]] = field(default_factory=dict)
    renamed: dict[int, int] = field(default_factory=dict)
    works: dict[int, int] = field(default_factory=dict)


class Keeper:
    """See the module's docstring. NotDerivableError if the traces do not fit each other."""

    def __init__(self, observed: Steps, template: Steps) -> None:
        self._template = template
        tables = Tables([template.trace, observed.trace])
        if tables.signatures != template.trace.signatures and not set(tables.signature_maps[1]):
            raise NotDerivableError("the observed step is empty")
        self._observed = observed
        self._signatures = (tables.signature_maps[1], tables.signature_maps[0])
        self._forward = self._aligned()
        self.executions: dict[int, tuple[Execution, ...]] = {}
        blocks: dict[int, list[Recomputation]] = {}
        for block in template.recomputations:
            blocks.setdefault(block.module, []).append(block)
        for module, found in blocks.items():
            regions = executions(observed.trace, module)
            if len(regions) != len(found):
                raise NotDerivableError("a module is recomputed more or less often than it runs")
            self.executions[module] = tuple(
                self._execution(region, block) for region, block in zip(regions, self._paired(regions, found), strict=True)
            )

    # ---- where operators ran ----------------------------------------------------------------------------------------

    def _aligned(self) -> tuple[list[int], list[int]]:
        """The forward's rows in both traces, pair by pair."""
        mine, theirs = self._observed.forward_rows(), self._template.forward_rows()
        first = [self._observed.key(i, self._signatures[0]) for i in mine]
        if first != [self._template.key(i, self._signatures[1]) for i in theirs]:
            raise NotDerivableError("the forward under checkpointing runs other operators")
        return mine, theirs

    def _paired(self, regions: Sequence[Region], blocks: Sequence[Recomputation]) -> list[Recomputation]:
        """The recomputation of each forward: the one that reads what that forward read and no other one did."""
        if len(regions) == 1:
            return list(blocks)
        own = [set(region.inputs) for region in regions]
        to_template = self._storages()
        reads = []
        for block in blocks:
            rows = self._template.rows[block.first : block.last]
            reads.append({s for row in rows if type(row) is Op or type(row) is Collective for s in row.inputs})
        found = []
        for e, inputs in enumerate(own):
            others = set().union(*(other for o, other in enumerate(own) if o != e))
            wanted = {to_template.get(s, -1) for s in inputs - others} - {-1}
            fitting = [block for block, read in zip(blocks, reads, strict=True) if read & wanted]
            if len(fitting) != 1:
                raise NotDerivableError("it is not clear which forward a recomputation repeats")
            found.append(fitting[0])
        return found

    def _storages(self) -> dict[int, int]:
        """The template's storage for each storage that the observed forward allocated."""
        pairs = zip(*self._forward, strict=True)
        mine, theirs = self._observed.rows, self._template.rows
        return {mine[i].storage: theirs[j].storage for i, j in pairs if type(mine[i]) is Alloc}

    def _execution(self, region: Region, block: Recomputation) -> Execution:
        mine, theirs = self._forward
        start = self._observed.split
        found: list[CallRows] = []
        first_row = bisect.bisect_left(mine, region.first + start)
        last_row = bisect.bisect_left(mine, region.last + start)
        covered: set[int] = set()
        spans = []
        for call in region.calls:
            low = bisect.bisect_left(mine, call.first + start, first_row, last_row)
            high = bisect.bisect_left(mine, call.last + start, low, last_row)
            spans.append((low, high))
            covered.update(range(low, high))
        hooks = {self._template.key(theirs[k], self._signatures[1]) for k in range(first_row, last_row) if k not in covered}
        recomputed = self._recomputed([theirs[low:high] for low, high in spans], block, hooks)
        for call, (low, high), again in zip(region.calls, spans, recomputed, strict=True):
            if low == high:
                found.append(CallRows(call, range(0), range(0)))
                continue
            before, after = mine[low] - call.first - start, call.last + start - 1 - mine[high - 1]
            observed = self._observed.rows[call.first + start : call.last + start]
            forward = range(theirs[low] - before, theirs[high - 1] + after + 1)
            repeated = range(again[0] - before, again[-1] + after + 1) if again else range(0)
            self._check(observed, forward)
            if again:
                self._check(observed, repeated)
            found.append(CallRows(call, forward, repeated))
        return Execution(calls=tuple(found), block=block)

    def _check(self, observed: Sequence[Event], rows: range) -> None:
        """An operator ran the same rows, row by row."""
        if [type(row) for row in observed] != [type(self._template.rows[i]) for i in rows]:
            raise NotDerivableError("an operator's allocations differ")

    def _recomputed(
        self, calls: Sequence[Sequence[int]], block: Recomputation, hooks: set[tuple[object, ...]]
    ) -> list[list[int]]:
        """Each call's rows in the recomputation."""
        template, signatures = self._template, self._signatures[1]
        rows = [i for i in range(block.first, block.last) if self._is_work(i)]
        keys = [template.key(i, signatures) for i in rows]
        at = 0
        found: list[list[int]] = []
        for call in calls:
            wanted = [template.key(i, signatures) for i in call]
            while at < len(rows) and wanted and keys[at : at + len(wanted)] != wanted:
                key = keys[at]
                if key not in hooks and not str(self._name(rows[at])).startswith(_HOOKS):
                    raise NotDerivableError("a recomputation runs other operators than its forward")
                at += 1
            found.append(rows[at : at + len(wanted)])
            at += len(wanted) if at < len(rows) else 0
        if at < len(rows) and any(
            key not in hooks and not str(self._name(i)).startswith(_HOOKS)
            for key, i in zip(keys[at:], rows[at:], strict=True)
        ):
            raise NotDerivableError("a recomputation runs more operators than its forward")
        return found

    def _is_work(self, i: int) -> bool:
        row = self._template.rows[i]
        if type(row) is Op:
            return row.signature not in self._template.detaches
        return type(row) is Alloc or type(row) is Collective or type(row) is WorkWait

    def _name(self, i: int) -> str:
        row = self._template.rows[i]
        if type(row) is Alloc:
            return self._template.trace.storages[row.storage].op
        if type(row) is Op or type(row) is Collective:
            return self._template.trace.signatures[row.signature].name
        return ""

    # ---- the edits --------------------------------------------------------------------------------------------------

    def keeping(self, decisions: Mapping[int, Sequence[Decision]]) -> Trace:
        """The template's step with what the units (by module) keep. NotDerivableError."""
        edits = _Edits()
        signatures = dict.fromkeys(self._template.trace.signatures)
        index = {signature: i for i, signature in enumerate(signatures)}
        for module, rows in decisions.items():
            if any(row.keep for row in rows):
                for execution in self.executions[module]:
                    _Keeping(self._template, execution, rows, edits, index).apply()
        return self._edited(edits, tuple(index))

    def _edited(self, edits: _Edits, signatures: tuple[Signature, ...]) -> Trace:
        split = self._template.split
        parts: list[list[Event]] = [[], []]
        for i, row in enumerate(self._template.rows):
            part = parts[i >= split]
            if i not in edits.deleted:
                part.append(_renamed(row, edits.renamed, edits.works))
            if i in edits.inserted:
                part += edits.inserted[i]
        trace = self._template.trace
        return replace(trace, signatures=signatures, prologue=tuple(parts[0]), events=tuple(parts[1]), regions=())


def _renamed(row: Any, names: Mapping[int, int], works: Mapping[int, int]) -> Event:
    kind = type(row)
    if kind is Op or kind is Collective:
        if not names.keys().isdisjoint(row.inputs) or not names.keys().isdisjoint(row.outputs):
            return row._replace(
                inputs=tuple(names.get(s, s) for s in row.inputs), outputs=tuple(names.get(s, s) for s in row.outputs)
            )
    elif (kind is Free or kind is RecordStream) and row.storage in names:
        return row._replace(storage=names[row.storage])
    elif kind is WorkWait and row.work in works:
        return row._replace(work=works[row.work])
    return row


class _Keeping:
    """The edits for one execution of a unit under its decisions."""

    def __init__(
        self,
        template: Steps,
        execution: Execution,
        decisions: Sequence[Decision],
        edits: _Edits,
        signatures: dict[Signature, int],
    ) -> None:
        self._template = template
        self._execution = execution
        self._edits = edits
        self._signatures = signatures
        counted = [rows for rows in execution.calls if rows.call.occurrence >= 0]
        if [(d.op, d.occurrence) for d in decisions] != [(rows.call.op, rows.call.occurrence) for rows in counted]:
            raise NotDerivableError("the plan decides about other operators than the module runs")
        self._kept = [rows for rows, decision in zip(counted, decisions, strict=True) if decision.keep]
        random = [decision.keep for rows, decision in zip(counted, decisions, strict=True) if rows.call.is_random]
        if random != sorted(random):
            raise NotDerivableError("the plan recomputes a random operator after a kept one")
        self._made: dict[int, bool] = {}
        kept = set(map(id, self._kept))
        for rows in execution.calls:
            for i in rows.forward:
                row = template.rows[i]
                if type(row) is Alloc:
                    self._made[row.storage] = id(rows) in kept
        # Then what is held is given under a version counter of its own.
        self._fresh = any(_may_write(rows.call) for rows in self._kept)

    def apply(self) -> None:
        """Add the edits."""
        held: list[int] = []
        for rows in self._kept:
            if not rows.forward:
                continue
            outputs = [storage for storage, _ in self._outputs(rows.forward)]
            if any(s >= 0 and not self._made.get(s, self._lives_outside(s)) for s in outputs):
                raise NotDerivableError("the plan keeps an alias of what is recomputed")
            for storage in outputs:
                self._check_changes(storage)
            self._detach(rows.forward, outputs)
            if not rows.recomputed:
                held += [storage for storage in outputs if storage >= 0]
                continue
            if self._fresh:
                self._detach(rows.recomputed, outputs)
            self._give(rows, outputs, [storage for storage, _ in self._outputs(rows.recomputed)])
        self._release(held)

    def _outputs(self, rows: range) -> list[tuple[int, TensorMeta]]:
        """Storage and look of what an operator returned: what its last row returns."""
        for i in reversed(rows):
            row = self._template.rows[i]
            if type(row) is Op or type(row) is Collective:
                metas = self._template.trace.signatures[row.signature].outputs
                return list(zip(row.outputs, metas, strict=True))
            if type(row) is not Free and type(row) is not Alloc:
                break
        raise NotDerivableError("the plan keeps an operator whose result is not known")

    def _detach(self, rows: range, storages: Sequence[int]) -> None:
        """A detached alias of every tensor that an operator returned, the memory of which is now `storages`."""
        last = next(self._template.rows[i] for i in reversed(rows) if type(self._template.rows[i]) is not Free)
        changed = self._changed(last)
        made: list[Event] = []
        for (old, meta), storage in zip(self._outputs(rows), storages, strict=True):
            if old in changed:
                continue  # an argument, which is not held
            signature = Signature(DETACH, (meta,), (meta,), is_view=True)
            number = self._signatures.setdefault(signature, len(self._signatures))
            made.append(Op(number, last.stream, last.module, last.phase, last.source, (storage,), (storage,)))
        self._edits.inserted.setdefault(rows[-1], []).extend(made)

    def _changed(self, row: Op | Collective) -> set[int]:
        """The storages that an operator changed."""
        return {row.inputs[i] for i in self._template.trace.signatures[row.signature].mutates}

    def _check_changes(self, storage: int) -> None:
        """What is held holds its last value: who changed it must be kept too, and who read it before must not run again."""
        end = self._execution.block.first
        changes = [i for i in self._template.changes.get(storage, ()) if i < end]
        if not changes:
            return
        kept = {i for rows in self._kept for i in rows.forward}
        again = (i for rows in self._execution.calls if not rows.call.is_view for i in rows.forward if i not in kept)
        early = any(i < changes[-1] and storage in getattr(self._template.rows[i], "inputs", ()) for i in again)
        if early or not kept.issuperset(changes):
            raise NotDerivableError("the plan keeps what is changed in place")

    def _lives_outside(self, storage: int) -> bool:
        """The storage comes from outside of the unit and would be there at its recomputation anyway."""
        return self._template.ends.get(storage, NEVER) > self._execution.block.last

    def _give(self, rows: CallRows, outputs: Sequence[int], again: Sequence[int]) -> None:
        """The recomputation returns what is held in place of running the operator."""
        template, edits = self._template, self._edits
        edits.deleted.update(rows.recomputed)
        edits.works.update(zip(self._works(rows.recomputed), self._works(rows.forward), strict=True))
        allocated = {row.storage for i in rows.recomputed if type(row := template.rows[i]) is Alloc}
        for old, new in zip(outputs, again, strict=True):
            if old == new or edits.renamed.get(new) == old:
                continue
            if new not in allocated:
                raise NotDerivableError("an operator returns memory that another one allocated")
            allocated.discard(new)
            for forward, repeated in self._everywhere(old, new):
                self._merge(forward, repeated)
        for storage in allocated:
            for (gone,) in self._everywhere(storage):
                for at in (template.begins.get(gone), template.ends.get(gone)):
                    if at is not None:
                        edits.deleted.add(at)

    def _works(self, rows: range) -> list[int]:
        """What a wait in the recomputation waits for is the forward's collective, if that is kept."""
        return [row.work for i in rows if type(row := self._template.rows[i]) is Collective]

    def _everywhere(self, *storages: int) -> Iterable[tuple[int, ...]]:
        """The same storages in the recorded step and in the steps of the prologue."""
        try:
            earlier = [self._template.earlier[storage] for storage in storages]
        except KeyError:
            raise NotDerivableError("the first step allocates other memory than the recorded one") from None
        return [storages, *zip(*earlier, strict=True)]

    def _merge(self, forward: int, repeated: int) -> None:
        """What the forward allocated serves in place of what the recomputation did: it lives until both have ended."""
        template, edits = self._template, self._edits
        edits.deleted.add(template.begins[repeated])
        edits.renamed[repeated] = forward
        first, second = template.ends.get(forward, NEVER), template.ends.get(repeated, NEVER)
        if first != NEVER and second != NEVER:
            edits.deleted.add(min(first, second))
        elif first != second:
            edits.deleted.add(first if second == NEVER else second)

    def _release(self, held: Sequence[int]) -> None:
        """What the recomputation did not come to is let go at its end, last held first."""
        block, template, edits = self._execution.block, self._template, self._edits
        released: list[tuple[int, int]] = []
        for storage in dict.fromkeys(reversed(held)):
            for step, (same,) in enumerate(self._everywhere(storage)):
                end = block.last - 1 if not step else self._earlier_end(step)
                if template.ends.get(same, NEVER) <= end:
                    edits.deleted.add(template.ends[same])
                    released.append((end, same))
        for end, storage in released:
            edits.inserted.setdefault(end, []).append(Free(storage))

    def _earlier_end(self, step: int) -> int:
        """The end of the same recomputation in an earlier step, where exits are not recorded: so many rows after its last
        allocation as in the recorded step.
        """
        template, block = self._template, self._execution.block
        frees = 0
        for i in range(block.last - 1, block.first, -1):
            row = template.rows[i]
            if type(row) is Alloc:
                (_, *earlier) = self._everywhere(row.storage)
                return template.begins[earlier[step - 1][0]] + frees
            frees += type(row) is Free
        raise NotDerivableError("a recomputation allocates nothing")




def _may_write(call: Call) -> bool:
    """Whether an operator may change its arguments; of what is no overload (higher-order operators) nothing is known."""
    return bool(call.writes) or call.op.count(".") < 2
