"""The rows of a template that change where a unit keeps some of its results, by the rules of the package's docstring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autosac.derivation.gathers import Gather
from autosac.derivation.steps import DETACH, NEVER, CapturedSteps, NotDerivableError
from autosac.derivation.unit_executions import CallRows, Need, UnitExecution
from autosac.integrations.operators.names import is_foreign_name
from autosac.plans import GRAPH, Decision
from autosac.trace import Alloc, Collective, Event, Free, HostWait, Op, Signature, Storage, TensorMeta


@dataclass(kw_only=True)
class StepEdits:
    """What is to be changed in the template: rows that go, what comes after a row, other names of storages, more storages."""

    deleted: set[int] = field(default_factory=set)
    inserted: dict[int, list[Event]] = field(default_factory=dict)
    renamed: dict[int, int] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)  # new ones


class KeptResults:
    """The edits for one execution of a unit under its decisions."""

    def __init__(
        self,
        template: CapturedSteps,
        execution: UnitExecution,
        roots: frozenset[int],
        decisions: Sequence[Decision],
        edits: StepEdits,
        signatures: dict[Signature, int],
    ) -> None:
        self._template = template
        self._execution = execution
        self._edits = edits
        self._signatures = signatures
        self._roots = roots
        counted = [(c, rows) for c, rows in enumerate(execution.calls) if rows.call.occurrence >= 0]
        if [(d.op, d.occurrence) for d in decisions] != [(rows.call.op, rows.call.occurrence) for _, rows in counted]:
            raise NotDerivableError("the plan decides about other operators than the module runs")
        self._keeping = {
            c: rows
            for (c, rows), decision in zip(counted, decisions, strict=True)
            if decision.keep and not is_foreign_name(rows.call.op)
        }
        self._kept = self._kept_storages()
        self._need = Need(execution, roots, self._kept, frozenset(self._keeping))

    def _kept_storages(self) -> frozenset[int]:
        """What the plan keeps. What is changed in place is kept by all that write to it, or by none."""
        kept: dict[int, bool] = {}
        for c, rows in enumerate(self._execution.calls):
            for s in rows.call.created:
                kept[s] = c in self._keeping
            own = [s for s in rows.call.writes if s in kept]
            is_kept = c in self._keeping or (rows.call.occurrence < 0 and all(kept[s] for s in own))
            for s in own:
                if kept[s] != is_kept:
                    raise NotDerivableError("the plan keeps what is changed in place")
        return frozenset(s for s, keep in kept.items() if keep)

    def apply(self) -> None:
        """Add the edits."""
        for rows in self._keeping.values():
            if not rows.forward:
                continue  # it ran on the host, as its alias does
            if rows.made or (not rows.call.writes and any(map(_has_no_storage, rows.call.outputs))):
                self._detach(rows)
        last = self._last_uses()
        for c, rows in enumerate(self._execution.calls):
            if rows.recomputed and c not in self._need.calls:
                self._edits.deleted.update(rows.recomputed)
                self._forget_temporaries(rows)
        ends: dict[int, list[tuple[int, int]]] = {}
        for rows in self._execution.calls:
            for s, (forward, again) in rows.made.items():
                self._place(s, forward, again, last, ends)
        for c, storages in ends.items():
            end = self._end_of(c)
            for _, storage in sorted(storages):
                self._free(storage, end)
        for gather in self._execution.gathers:
            if gather.is_moved(self._need.calls):
                self._move(gather)

    def _forget_temporaries(self, rows: CallRows) -> None:
        """What an operator allocates and frees inside, as flex attention does, is gone from the earlier steps too."""
        made = {again for _, again in rows.made.values()}
        for i in rows.recomputed:
            row = self._template.rows[i]
            if type(row) is Alloc and row.storage not in made:
                self._forget(row.storage)

    def _move(self, gather: Gather) -> None:
        """FSDP gathers before another operator, or in its hook."""
        edits, reader = self._edits, gather.first_reader(self._need.calls)
        if reader is None:
            numbers = {}
            for storage, description in gather.hook.storages.items():
                for (same,) in self._everywhere(storage):
                    numbers[same] = len(self._template.trace.storages) + len(edits.storages)
                    edits.storages.append(description)
            edits.renamed.update(numbers)
            changes = gather.by_hook(numbers, edits.deleted)
        else:
            before = [c for c in self._need.calls if c < reader]
            after = self._end_of(max(before)) if before else self._execution.block.first
            changes = gather.moved(after, edits.deleted)
        for change in list(changes):
            edits.deleted.update(change.gone)
            edits.inserted.setdefault(change.after, []).extend(change.rows)

    def _detach(self, rows: CallRows) -> None:
        """A detached alias of every tensor that an operator returned in memory of its own."""
        template = self._template
        own = {forward for forward, _ in rows.made.values()}
        last = next(template.rows[i] for i in reversed(rows.forward) if type(template.rows[i]) in (Op, Collective))
        made: list[Event] = []
        for old, meta in self._outputs(rows):
            if old not in own and not _has_no_storage(meta):
                continue
            own.discard(old)
            signature = Signature(DETACH, (meta,), (meta,), is_view=True)
            number = self._signatures.setdefault(signature, len(self._signatures))
            alias = Op(number, last.stream, last.module, last.phase, last.source, (old,), (old,))
            made += [alias] * (2 if _is_seen_twice(template.trace.signatures[last.signature]) else 1)
        if own and rows.call.op != GRAPH:  # which keeps what it has saved, too
            raise NotDerivableError("the plan keeps an operator whose result is not known")
        self._edits.inserted.setdefault(rows.forward[-1], []).extend(made)

    def _outputs(self, rows: CallRows) -> list[tuple[int, TensorMeta]]:
        """Storage and metadata of an operator's results: those of its last row, if it has made all of them; else those that
        the policy saw (kernels of compiled code return nothing, and a graph's last kernel may make something else).
        """
        made = {forward for forward, _ in rows.made.values()}
        for i in reversed(rows.forward if rows.call.op != GRAPH else ()):
            row = self._template.rows[i]
            if type(row) is Op or type(row) is Collective:
                if made <= set(row.outputs):
                    metas = self._template.trace.signatures[row.signature].outputs
                    return list(zip(row.outputs, metas, strict=True))
                break
            if type(row) is not Free and type(row) is not Alloc and type(row) is not HostWait:
                break
        results = zip(rows.call.results, rows.call.outputs, strict=True)
        return [(rows.made[s][0] if s in rows.made else -1, meta) for s, meta in results]

    def _last_uses(self) -> dict[int, int]:
        """For every storage that the recomputation makes or reads, its last operator that does."""
        last: dict[int, int] = {}
        for c in sorted(self._need.calls):
            call = self._execution.calls[c].call
            for s in (*call.created, *call.reads, *call.writes):
                last[s] = c
        return last

    def _place(
        self, s: int, forward: int, again: int, last: Mapping[int, int], ends: dict[int, list[tuple[int, int]]]
    ) -> None:
        """Where a storage begins and ends, given that it is kept or not, and asked for or not."""
        if s in self._kept:
            if s not in self._need.kept:
                self._release(forward)
                if again >= 0:
                    self._forget(again)
            elif s in self._roots:
                self._merge(forward, again)
            else:
                self._serve(s, forward, again, last, ends)
        elif again >= 0 and s not in self._roots:
            if s in last:
                self._move_end(again)
                ends.setdefault(last[s], []).append((forward, again))
            else:
                self._forget(again)

    def _everywhere(self, *storages: int) -> Iterable[tuple[int, ...]]:
        """The same storages in the recorded step and in the steps of the prologue, as far as these have all of them."""
        try:
            earlier = [self._template.earlier[storage] for storage in storages]
        except KeyError:
            raise NotDerivableError("the first step allocates other memory than the recorded one") from None
        return [storages, *zip(*earlier, strict=False)]

    def _forget(self, storage: int) -> None:
        """It does not exist."""
        for (gone,) in self._everywhere(storage):
            for at in (self._template.begins.get(gone), self._template.ends.get(gone)):
                if at is not None:
                    self._edits.deleted.add(at)

    def _move_end(self, storage: int) -> None:
        for (moved,) in self._everywhere(storage):
            if moved in self._template.ends:
                self._edits.deleted.add(self._template.ends[moved])

    def _merge(self, forward: int, repeated: int) -> None:
        """What the forward allocated serves in place of what the recomputation did: it lives until both have ended."""
        template, edits = self._template, self._edits
        for here, again in self._everywhere(forward, repeated):
            edits.deleted.add(template.begins[again])
            edits.renamed[again] = here
            first, second = template.ends.get(here, NEVER), template.ends.get(again, NEVER)
            if first != NEVER and second != NEVER:
                edits.deleted.add(min(first, second))
            elif first != second:
                edits.deleted.add(first if second == NEVER else second)

    def _serve(
        self, s: int, forward: int, again: int, last: Mapping[int, int], ends: dict[int, list[tuple[int, int]]]
    ) -> None:
        """It serves the recomputation and ends with its last use there, if nothing else holds it."""
        if again >= 0:
            self._forget(again)
            for here, gone in self._everywhere(forward, again):
                self._edits.renamed[gone] = here
        if self._template.ends.get(forward, NEVER) < self._execution.block.last:
            self._move_end(forward)
            ends.setdefault(last[s], []).append((forward, forward))

    def _release(self, forward: int) -> None:
        """It is held to the end of the forward, and then let go because nothing needs it."""
        completed = self._execution.completed
        if self._template.ends.get(forward, NEVER) <= completed:
            self._move_end(forward)
            self._free(forward, completed)

    def _end_of(self, c: int) -> int:
        """The last row of an operator in the recomputation."""
        recomputed = self._execution.calls[c].recomputed
        return recomputed[-1] if recomputed else self._execution.block.first

    def _free(self, storage: int, after: int) -> None:
        """The storage ends after this row of the recorded step, and after the same one of the earlier steps."""
        for step, (same,) in enumerate(self._everywhere(storage)):
            at = after if not step else self._same_place(after, step - 1)
            self._edits.inserted.setdefault(at, []).append(Free(same))

    def _same_place(self, after: int, step: int) -> int:
        """The row of an earlier step, of which only allocations and ends are recorded: that of the last allocation before."""
        template = self._template
        for i in range(after, template.split - 1, -1):
            row = template.rows[i]
            if (
                type(row) is Alloc
                and i not in self._edits.deleted
                and len(template.earlier.get(row.storage, ())) > step
            ):
                return template.begins[template.earlier[row.storage][step]]
        raise NotDerivableError("nothing is allocated before")


def _is_seen_twice(signature: Signature) -> bool:
    """Whether the `detach` of a result is recorded once more: above autograd, where operators run that want sizes only, but
    for methods of tensors. They are told in full what to make, whether in pinned memory, too. What is empty is held already,
    until something is written to it.
    """
    told = any(name == "pin_memory" for name, _ in signature.arguments)
    return told and not signature.name.startswith(("aten.empty", "aten.new_"))


def _has_no_storage(result: TensorMeta) -> bool:
    """Whether no storage stands for a result: it is in host memory, or empty."""
    return result.place == "cpu" or 0 in result.shape
