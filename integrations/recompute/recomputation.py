"""Making a unit's saved tensors again from its tape.

`recompute` finds the operators that lead to the tensors that can still be asked for (`_Need`), beginning from what is kept and
what was there before, runs these and no others in the order of the forward, and lets go of each result with its last use.
They run without gradients, autocast, function transforms around the backward and the hooks of tensor subclasses: what these
did in the forward is on the tape already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from autosac.integrations.recompute import flags, witness
from autosac.integrations.recompute.entries import (
    CompiledPart,
    Holder,
    RecomputationError,
    SavedInPart,
    TapeEntry,
    observer,
    views_of,
)
from autosac.integrations.recompute.memories import (
    Memory,
    View,
    Wrapped,
    alias,
    has_storage,
    looked_at,
    plain_in,
    version_of,
    whole_copy,
)
from autosac.integrations.recompute.offload import Parcel
from autosac.integrations.recompute.sharding import is_empty

if TYPE_CHECKING:
    from autosac.integrations.recompute.tape import Tape

# Memory from outside that a unit changes is copied for the recomputation up to this size; a larger one may not change later.
COPIED_BYTES = 2**24


def prune(tape: Tape) -> None:
    """After the forward: let go of what is kept and of copies that no recomputation will need."""
    holders = tape.holders()
    need = _Need(tape, holders, use_kept=False)
    asked, forced = need.contents, need.kept
    if any(memory.kept is not None for memory in tape.memories):
        need = _Need(tape, holders, use_kept=True)
    tape.needs_kept = not forced <= need.kept
    for number, memory in enumerate(tape.memories):
        if memory.kept is not None and number not in need.kept:
            memory.kept = None
        if memory.is_written and memory.external is not None:
            _settle(memory, {epoch for epoch in range(memory.epoch + 1) if (number, epoch) in asked})
        elif (number, 0) not in asked:
            memory.external = None


def _settle(memory: Memory, asked: set[int]) -> None:
    """Hold of an external memory that was written what a recomputation can ask for: the contents of these epochs."""
    assert memory.external is not None
    is_asked = memory.epoch in asked
    snapshots = {epoch: copy for epoch, copy in memory.snapshots.items() if epoch in asked}
    if is_asked and memory.external.nbytes <= COPIED_BYTES:
        with torch.no_grad():
            snapshots.setdefault(memory.epoch, whole_copy(alias(memory.external)))
    else:
        memory.version = version_of(memory.external)
    memory.snapshots = snapshots
    if not is_asked or memory.epoch in memory.snapshots:
        memory.external = None


def recompute(tape: Tape) -> None:
    """Give every holder its tensor. RecomputationError if that cannot be done as it was."""
    _Recomputation(tape).run()


class _Need:
    """Which operators have to run again for these holders (`entries`, in order), and which memories are read for that.

    Contents are asked for backwards from the holders: one that is kept (`kept`), or was there before (`contents`), is there;
    another one needs the operator that wrote it, and all that this operator read. An operator stands on the tape after those
    that it needs, so one walk from the end to the beginning finds all.
    """

    def __init__(self, tape: Tape, holders: Iterable[Holder], *, use_kept: bool) -> None:
        self._memories = tape.memories
        self._use_kept = use_kept
        self._is_needed = bytearray(len(tape.entries))
        self.contents: set[tuple[int, int]] = set()
        self.kept: set[int] = set()
        self.entries: list[int] = []
        for holder in holders:
            if isinstance(holder.view, SavedInPart):
                self._is_needed[holder.view.entry] = True
            else:
                self._ask(views_of(holder.view))
        for position in range(len(tape.entries) - 1, -1, -1):
            if self._is_needed[position]:
                self.entries.append(position)
                self._ask(tape.entries[position].reads)
        self.entries.reverse()

    def _ask(self, views: Iterable[View]) -> None:
        """These contents are needed, and so are the operators that make them."""
        for view in views:
            memory = self._memories[view.memory]
            if memory.kept is not None and (self._use_kept or memory.is_forced) and is_kept(memory, view.epoch):
                self.kept.add(view.memory)
            elif memory.writers[0] < 0:  # it was there before, or has been copied
                self.contents.add((view.memory, view.epoch))
            else:
                self._is_needed[memory.writers[view.epoch]] = True
                if view.wait >= 0:
                    self._is_needed[view.wait] = True


def is_kept(memory: Memory, epoch: int) -> bool:
    """Whether this content is kept, and is still what was kept."""
    if memory.kept is None or memory.kept_epoch != epoch:
        return False
    if isinstance(memory.kept, Parcel):
        return not memory.kept.is_changed()
    if is_empty(memory.kept):  # its owner has let go of the memory itself, as Megatron-Core's discarded outputs
        return False
    return memory.kept_version is None or version_of(memory.kept) == memory.kept_version


class _Recomputation:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._holders = [holder for holder in tape.holders() if not holder.has_value()]
        if tape.offloader is not None:
            tape.offloader.backward_begins(tape)
        need = _Need(tape, self._holders, use_kept=True)
        self._order = need.entries
        # What is kept, and what is made again, by memory.
        self._kept: dict[int, Any] = {number: tape.memories[number].kept for number in need.kept}
        self._made: dict[int, torch.Tensor] = {}
        self._saved: dict[SavedInPart, torch.Tensor] = {}
        self._is_compared = any(holder.witness is not None for holder in self._holders)
        # Memories and saved tensors that no kernel has written all of, or that are made of such, if anything is compared.
        self._undefined: set[int | SavedInPart] = set()
        self._flags = tape.flags.before
        self._done = self._last_uses()

    def _last_uses(self) -> dict[int, list[int]]:
        """For every operator, the memories that no holder waits for and that no later operator reads."""
        seen = {view.memory for holder in self._holders for view in views_of(holder.view)}
        done: dict[int, list[int]] = {}
        for position in reversed(self._order):
            entry = self._tape.entries[position]
            # In the order in which they were made, whatever the operator's: derived steps free them so.
            last = sorted({view.memory for view in entry.reads}.union(entry.outputs) - seen)
            if last:
                done[position] = last
                seen.update(last)
        return done

    def run(self) -> None:
        tape = self._tape
        # Another backward may come, and find what only leads to what is kept gone for good.
        stays = tape.needs_kept and torch._C._autograd._get_current_graph_task_keep_graph()
        for number in () if stays else self._kept:
            if not tape.memories[number].is_forced:
                tape.memories[number].kept = None
        busy, tape.is_busy = tape.is_busy, True
        observer[0].begin(tape.fqn, tape.forward)
        try:
            with flags.restored(tape.flags.before), flags.outside_transforms(), _bare():
                for position in self._order:
                    self._run(position, tape.entries[position])
                observer[0].ran()
                for holder in self._holders:
                    if isinstance(holder.view, SavedInPart):
                        holder.value = self._saved[holder.view]
                    else:
                        holder.value = self._tensor(holder.view)
                present = {holder for holder in self._holders if self._is_given_as_it_is(holder)}
        finally:
            observer[0].end()
            tape.is_busy = busy
        for holder in self._holders:
            assert holder.value is not None
            if (
                holder not in present
                and not self._is_undefined(holder)
                and witness.differs(holder.value, holder.witness)
            ):
                raise RecomputationError(
                    f"the module {tape.fqn} does not give the same values when it is recomputed ({holder.value.dtype} "
                    f"{list(holder.value.shape)}, made by {self._maker(holder)}): something in it has hidden state, or "
                    "writes to tensors without PyTorch noticing; leave the module out of the plan"
                )

    def _is_given_as_it_is(self, holder: Holder) -> bool:
        """Whether somebody still holds the saved tensor's memory (the tape, if it is kept), and no change of it was counted.

        Then the holder gets the tensor on it, which may have been changed out of sight.
        """
        views = views_of(holder.view)
        storages = {view.memory: self._tape.storages[view.memory] for view in views}
        if not views or any(s is None or not s.nbytes() or s.device.type == "meta" for s in storages.values()):
            return False
        if holder.counter is not None and version_of(holder.counter) != holder.version:
            return False
        if not storages.keys() <= self._kept.keys():
            holder.value = _on(storages, holder.view)
        return True

    def _is_undefined(self, holder: Holder) -> bool:
        if isinstance(holder.view, SavedInPart):
            return holder.view in self._undefined
        views = views_of(holder.view)
        return bool(views) and self._undefined.issuperset(view.memory for view in views)

    def _maker(self, holder: Holder) -> str:
        if isinstance(holder.view, SavedInPart):
            return "a compiled part"
        names = []
        for view in views_of(holder.view):
            writer = self._tape.memories[view.memory].writers[view.epoch]
            names.append(self._tape.entries[writer].key[0] if writer >= 0 else "nobody")
        return ", ".join(names)

    def _run(self, position: int, entry: TapeEntry) -> None:
        if entry.is_forced:
            raise RecomputationError(
                f"the module {self._tape.fqn} changes in place what the operator {entry.key[0]} returned, which "
                "cannot run again: leave the module out of the plan"
            )
        for view in entry.reads:
            self._gather(view)
        observer[0].operator(entry.place, entry.key)
        args = self._resolved(entry.args, entry.writes)
        kwargs = self._resolved(entry.kwargs, entry.writes) if entry.kwargs else entry.kwargs
        wanted = entry.flags or self._tape.flags.before
        if wanted != self._flags:  # `flags.restored` sets them back
            flags.change(self._flags, wanted)
            self._flags = wanted
        if torch.get_default_dtype() is not entry.dtype:
            torch.set_default_dtype(entry.dtype)
        is_made_of_it = bool(self._undefined) and any(view.memory in self._undefined for view in entry.reads)
        with entry.random.restored() if entry.random is not None else contextlib.nullcontext():
            if isinstance(entry.func, CompiledPart):
                out, unwritten = self._run_part(position, entry.func, args, kwargs, is_made_of_it)
            else:
                out, unwritten = self._called(entry, args, kwargs), set()
                if self._is_compared:
                    unwritten = {id(tensor) for tensor in witness.undefined(entry.func, args, kwargs or {}, out)}
        if entry.facts.may_write:
            _wait(out)
        if is_made_of_it:
            self._undefined.update(entry.writes)
        del args, kwargs
        plain = plain_in(out)
        if len(plain) != len(entry.outputs):
            raise RecomputationError(
                f"{entry.key[0]} of the module {self._tape.fqn} returns {len(plain)} tensors when it is recomputed and "
                f"returned {len(entry.outputs)} in the forward: leave the module out of the plan"
            )
        for number, tensor in zip(entry.outputs, plain, strict=True):
            if number >= 0 and number not in self._made and has_storage(tensor):
                self._made[number] = tensor
            if is_made_of_it or id(tensor) in unwritten:
                self._undefined.add(number)
        del out, plain
        for number in self._done.get(position, ()):
            self._made.pop(number, None)
            self._kept.pop(number, None)

    def _gather(self, view: View) -> None:
        """Let FSDP fill what it has let go of, if the tensor is needed as it is. FSDP's work is not the operator's."""
        memory = self._tape.memories[view.memory]
        if memory.external is None or view.memory in self._made or view.memory in self._kept:
            return
        if is_empty(memory.external):
            self._tape.gather(memory.external)

    def _called(self, entry: TapeEntry, args: Any, kwargs: Any) -> Any:
        if not entry.with_gradients:
            return entry.func(*args, **kwargs)
        # oneDNN's recurrent layers return their workspace if gradients are enabled. Below autograd nothing is recorded.
        with torch._C._AutoDispatchBelowAutograd():
            torch._C._set_grad_enabled(True)
            try:
                return entry.func(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(False)

    def _run_part(
        self, position: int, part: CompiledPart, args: Any, kwargs: Any, is_undefined: bool
    ) -> tuple[Any, set[int]]:
        """Call a compiled graph again, and take what it saves. Its results, and which of them (by id) are not to be compared:
        where `is_undefined`, or where some kernel may leave a part of its rows unwritten, all of them.
        """
        flags = iter(part.needs_gradient)
        args, kwargs = _tree_map(lambda t: t.detach().requires_grad_(next(flags)), (args, kwargs))
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            saved.append(tensor)
            return len(saved) - 1

        watch = witness.Watch() if self._is_compared else contextlib.nullcontext(None)
        with torch.enable_grad(), part.autocast(), watch as seen:
            with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
                out = part.call(*args, **kwargs)
        if not part.packed:  # hooks of the user's own, a checkpoint's, took what it saved
            saved.clear()
        if len(saved) != part.packed:
            raise RecomputationError(
                f"a compiled part of the module {self._tape.fqn} saves {len(saved)} tensors when it runs again and saved "
                f"{part.packed} in the forward: leave the module out of the plan"
            )
        self._saved.update((SavedInPart(position, n), tensor) for n, tensor in enumerate(saved))
        out = _tree_map(torch.Tensor.detach, out)
        if seen is None:
            return out, set()
        says_nothing = is_undefined or part.leaves_unwritten
        self._undefined.update(
            SavedInPart(position, n) for n, t in enumerate(saved) if says_nothing or seen.has_left(t)
        )
        return out, {id(t) for t in plain_in(out) if says_nothing or seen.has_left(t)}

    def _resolved(self, value: Any, writes: Collection[int]) -> Any:
        kind = type(value)
        if kind is View or kind is Wrapped:
            return self._tensor(value, writes)
        if kind is tuple or kind is list:
            return kind([self._resolved(item, writes) for item in value])
        if kind is dict:
            return {key: self._resolved(item, writes) for key, item in value.items()}
        return value

    def _tensor(self, view: Any, writes: Collection[int] = ()) -> torch.Tensor:
        if type(view) is View:
            return looked_at(self._base(view, view.memory in writes), view)
        if type(view) is Wrapped:
            made: torch.Tensor = view.around([self._tensor(inner, writes) for inner in view.inner])
            return made
        whole: torch.Tensor = view  # what has no storage stands for itself
        return whole

    def _base(self, view: View, is_written: bool) -> torch.Tensor:
        """A tensor on the memory that a view looks at, with the view's content; a copy if what is from outside is written."""
        number = view.memory
        memory = self._tape.memories[number]
        if number in self._kept and memory.kept_epoch == view.epoch:
            kept = self._kept[number]
            if isinstance(kept, Parcel):
                kept = self._kept[number] = kept.tensor()
            tensor: torch.Tensor = kept
            return tensor
        if number in self._made:
            return self._made[number]
        if view.epoch in memory.snapshots:
            copy = memory.snapshots[view.epoch]
            return copy.clone() if is_written else copy
        assert memory.external is not None
        if version_of(memory.external) != memory.version or view.epoch != memory.epoch:
            raise RecomputationError(
                f"the module {self._tape.fqn} cannot be recomputed: a tensor that it reads ({memory.external.dtype} "
                f"{list(memory.external.shape)}) was changed in place after its forward; leave the module out of the plan, or "
                "do not change the tensor before the backward"
            )
        if is_empty(memory.external) and not self._tape.gather(memory.external):
            raise RecomputationError(
                f"the module {self._tape.fqn} cannot be recomputed: a parameter ({memory.external.dtype} "
                f"{list(memory.external.shape)}) was freed by its sharding; leave the module out of the plan"
            )
        return memory.external


def _on(storages: Mapping[int, torch.UntypedStorage | None], view: Any) -> Any:
    """A saved tensor on the memory that it was saved on; what is no tensor inside of one as it is."""
    if type(view) is View:
        storage = storages[view.memory]
        assert storage is not None
        tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
        tensor.set_(storage, view.offset, view.size, view.stride)
        return looked_at(tensor, view)
    return view.around([_on(storages, inner) for inner in view.inner]) if type(view) is Wrapped else view


def _wait(out: Any) -> None:
    """Wait for communication in place, which returns a handle beside its tensors: the module has waited in Python."""
    for item in out if isinstance(out, tuple) else (out,):
        if isinstance(item, torch.ScriptObject):
            work: Any = item
            work.wait()


def _tree_map(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with its tensors exchanged, in order."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_tree_map(function, item) for item in tree])
    if type(tree) is dict:
        return {key: _tree_map(function, item) for key, item in tree.items()}
    return tree


@contextlib.contextmanager
def _bare() -> Iterator[None]:
    """Operators run as they are on the tape."""
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
        yield
