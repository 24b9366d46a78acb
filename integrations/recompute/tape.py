"""What one forward of a unit leaves for its backward: a tape of operators, and holders in place of saved tensors.

While the unit's forward runs, a dispatch mode (`RecordingMode`) notes every operator that computes something, with its
arguments by the memory that they look at (`memories`), and autograd's saved tensors are given to the tape (`Tape.pack`):

- what the unit did not make (`external`), what it returns, what is changed after it was saved, and what the tape cannot make
  again is held as it is, as autograd itself would, with autograd's own check that nobody changes it (`Held`);
- everything else is let go, and a `Holder` remembers which content it was. When the backward asks for the first of them,
  `recomputation` runs the operators that lead to them again, from what the plan keeps and from what was there before.

So no Python code of the module runs a second time: nothing that it reads from outside (attributes, flags, random numbers of
Python, other tensors under the same name) can differ, and nothing that it changes outside is changed twice.

- Memory from outside that the unit changes is copied before the change, if something was computed from it; the recomputation
  works on the copy and changes nothing outside.
- Random operators note the state of their generator.
- What somebody else still holds when the backward asks for it is given as it is, as autograd would: a hook's or an attribute's
  activation may have been changed by then (`.data`, NumPy).
- What is kept serves only as long as it is the content that was kept: a later change in place, inside the unit or after it,
  makes the tape run the operator again in place of returning a wrong value.
- The results of operators of other libraries are always kept: nothing is known of them. So is memory that was only allocated
  and is read although no operator wrote to it: a kernel did that the dispatcher does not know (an extension's, NumPy).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autosac.integrations.operators.dispatching import skipped_by_dynamo, with_conjugates
from autosac.integrations.operators.effects import TritonLaunch, written_by
from autosac.integrations.operators.facts import Facts, facts_of
from autosac.integrations.operators.keys import CountingMode, is_collective, is_random, quiet, tensors_in
from autosac.integrations.recompute import flags
from autosac.integrations.recompute.entries import (
    CompiledPart,
    Held,
    Holder,
    RecomputationError,
    SavedInPart,
    TapeEntry,
    observer,
    views_of,
)
from autosac.integrations.recompute.generators import states_before
from autosac.integrations.recompute.memories import (
    PLAIN,
    Memory,
    References,
    View,
    Wrapped,
    alias,
    all_tensors,
    has_storage,
    looked_at,
    own,
    plain_in,
    plain_tensors,
    version_of,
    view_of,
    whole_copy,
)
from autosac.integrations.recompute.offload import Offloader, Parcel
from autosac.integrations.recompute.policy import UnitDecisions
from autosac.integrations.recompute.recomputation import prune, recompute
from autosac.integrations.recompute.sharding import Gathering
from autosac.plans import ANY_SIZE, GRAPH, Decision


class GraphObserver(Protocol):
    """Is told of compiled graphs, whose operators it does not see."""

    def run_graph(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the graph and return what it returns."""


class _Present(threading.local):
    """The tape that this thread is writing at present, or who observes the unit that it runs."""

    tape: Tape | None = None
    observer: GraphObserver | None = None


present = _Present()


class Tape:
    """See the module's docstring. One for each forward of a unit."""

    def __init__(self, policy: UnitDecisions, offloader: Offloader | None, *, forward: int, audited: bool) -> None:
        self.policy = policy
        self.fqn = policy.fqn
        self.forward = forward
        self.entries: list[TapeEntry] = []
        self.memories: list[Memory] = []
        self.audited = audited
        self.is_busy = False  # recomputing in the middle of its own forward
        self.part: CompiledPart | None = None  # the compiled graph that is running
        self.offloader = offloader
        self.offloaded: list[Memory] = []
        self.flags = flags.Course(policy, audited=audited)
        self.gathering: Gathering | None = None
        self.needs_kept = False  # whether what is kept cannot be made again, because what it is made of cannot
        self.launched: Counter[str] = Counter()  # Triton kernels by name, and compiled graphs
        self.previous: weakref.ref[Any] | None = None
        self.lock = threading.RLock()
        self._numbers: dict[int, int] = {}  # memories by the addresses of their storages
        self.storages = References()  # of the memories
        self._holders: list[weakref.ref[Holder]] = []

    # ---- autograd's saved tensors -------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Held | Holder:
        """In place of a saved tensor."""
        view = self._internal(tensor)
        if self.part is not None:
            number, self.part.packed = self.part.packed, self.part.packed + 1
            if view is None and self._is_new(tensor):
                view = SavedInPart(len(self.entries), number)
        if view is None:
            return Held(tensor)
        holder = Holder(self, view, tensor)
        if isinstance(view, SavedInPart) and self.part is not None:
            self.part.saved.append((holder, tensor))
        reference = weakref.ref(holder)
        self._holders.append(reference)
        for plain in views_of(view):
            memory = self.memories[plain.memory]
            if memory.holders is None:
                memory.holders = [reference]
            else:
                if memory.kept is None and type(view) is View:
                    self._look_again(tensor, memory.holders[-1]())
                memory.holders.append(reference)
        return holder

    def unpack(self, packed: Held | Holder) -> torch.Tensor:
        """The saved tensor, for the backward."""
        if isinstance(packed, Held):
            return packed.unpack(self.fqn)
        if packed.held is not None:
            return packed.held.unpack(self.fqn)
        with self.lock:
            if not packed.has_value():
                recompute(self)
            return packed.give()

    def holders(self) -> list[Holder]:
        """Those whose tensors the backward can still ask for, in the order in which they were saved."""
        alive = [holder for reference in self._holders if (holder := reference()) is not None]
        return [holder for holder in alive if holder.held is None]

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether the compiled graph that is running made the tensor."""
        plain = plain_tensors(tensor)
        return all(
            has_storage(t) and t.untyped_storage()._cdata not in self._numbers for t in plain
        ) and not isinstance(tensor, torch.nn.Parameter)

    def _internal(self, tensor: torch.Tensor) -> Any:
        """The view for a saved tensor that can be made again; None if it has to be held."""
        if type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor):
            if not has_storage(tensor):
                return None
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is None:
                return None
            memory = self.memories[number]
            memory.filled_unseen()
            return view_of(tensor, number, memory) if memory.external is None else None
        names, context = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        inner = [self._internal(part) if isinstance(part, torch.Tensor) else part for part in parts]
        if any(view is None for view in inner):
            return None
        return Wrapped(type(tensor), tuple(names), context, tuple(inner), tensor.size(), tensor.stride())

    def changed_by(self, entry: TapeEntry, tensors: list[torch.Tensor]) -> None:
        """A compiled graph has changed what it was given: it cannot run again."""
        entry.is_forced = True
        entry.changed = self._changed(tensors)
        entry.writes = tuple(number for number, _ in entry.changed)

    # ---- the forward --------------------------------------------------------------------------------------------------

    def begin(self, func: Any, facts: Facts, args: Any, kwargs: Any, occurrence: int = -1) -> TapeEntry:
        """An operator is about to run: note what it needs, and save what it changes."""
        reads: list[View] = []
        described = self._described(args, reads), self._described(kwargs, reads) if kwargs else kwargs
        entry = TapeEntry(func, facts, *described, reads, (facts.name, occurrence))
        entry.flags = self.flags.inside()
        if facts.may_write:
            self._about_to_write(entry, args, kwargs)
        else:
            for view in reads:
                self._is_read(view)
        if facts.is_foreign and tensors_in((args, kwargs)):
            entry.is_forced = True
        elif facts.may_draw and is_random(func, args, kwargs):
            entry.random = states_before(args, kwargs)
        return entry

    def _is_read(self, view: View, written: Collection[int] = ()) -> None:
        memory = self.memories[view.memory]
        memory.read_epoch = view.epoch
        if memory.blank is not None and view.memory not in written:
            memory.filled_unseen()

    def _about_to_write(self, entry: TapeEntry, args: Any, kwargs: Any) -> None:
        if isinstance(entry.func, TritonLaunch):
            known = entry.func.written(args, kwargs)
            written = [t for t in tensors_in((args, kwargs) if known is None else known) if has_storage(t)]
            if known is None:
                written = [t for t in written if self.memories[self._number(t)].external is None]
        else:
            written = [t for value in written_by(entry.func, args, kwargs) for t in tensors_in(value)]
        entry.changed = self._changed(written)
        # What is changed, and nothing else made of it, is read only to be changed.
        only = {number for number, _ in entry.changed} if entry.facts.only_changes else ()
        for number in () if entry.facts.overwrites else only:
            self.memories[number].filled_unseen()
        for view in entry.reads:
            if view.memory not in only:
                self._is_read(view, written={number for number, _ in entry.changed})
        if entry.changed:
            entry.writes = self._before_write(entry.changed)

    def end(self, entry: TapeEntry, out: Any, decision: Decision | None) -> None:
        """It has run: note what it made, and keep it if that is decided."""
        position = len(self.entries)
        keeps = entry.is_forced or (decision is not None and decision.keep)
        if isinstance(entry.func, TritonLaunch):  # nothing is decided about it: it goes with what it writes to
            keeps = all(self.memories[number].kept is not None for number in entry.writes)
        for number in entry.writes:
            memory = self.memories[number]
            memory.blank = None
            memory.epoch += 1
            memory.writers.append(position)
            if memory.kept is not None and not keeps:
                memory.kept = None
        numbers: list[int] = []
        made: list[tuple[Memory, torch.Tensor]] = []
        for tensor in plain_in(out):
            number = -1
            if has_storage(tensor):
                storage = tensor.untyped_storage()
                found = self._numbers.get(storage._cdata)
                if found is None:
                    number = self._add(storage, position, None)
                    made.append((self.memories[number], tensor))
                else:
                    number = found
            numbers.append(number)
        if entry.facts.only_allocates:
            for memory, tensor in made:
                memory.blank = alias(tensor)
        if entry.changed:
            made += [(self.memories[number], tensor) for number, tensor in entry.changed]
            entry.changed = ()
        if not numbers and not entry.writes:
            return  # a question about a tensor (its value, whether it equals another one)
        entry.outputs = tuple(numbers)
        entry.place = observer[0].place()
        self.entries.append(entry)
        if entry.facts.is_wait:
            for number in numbers:
                if number >= 0:
                    self.memories[number].wait = position
        if keeps:
            self._keep(entry, made, decision)

    def _keep(self, entry: TapeEntry, made: list[tuple[Memory, torch.Tensor]], decision: Decision | None) -> None:
        for memory, tensor in made:
            if memory.external is not None:
                continue
            if memory.kept is None:
                memory.kept = alias(tensor)
            memory.kept_epoch = memory.epoch
            memory.is_forced = entry.is_forced
            if decision is not None and decision.offload and _may_leave(entry.func, decision):
                self.offloaded.append(memory)

    def _changed(self, written: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """The memories that an operator is about to change, each with a tensor that looks at it."""
        found: dict[int, torch.Tensor] = {}
        for tensor in written:
            for plain in plain_tensors(tensor):
                if has_storage(plain):
                    found.setdefault(self._number(plain), plain)
        return list(found.items())

    def _before_write(self, changed: Sequence[tuple[int, torch.Tensor]]) -> tuple[int, ...]:
        """Save what is about to be lost: saved tensors, and contents from outside that something was computed from."""
        for number, tensor in changed:
            memory = self.memories[number]
            if memory.holders:
                self._hold(memory, tensor)
            if memory.external is not None and memory.read_epoch == memory.epoch:
                with torch.no_grad():
                    memory.snapshots = {**memory.snapshots, memory.epoch: whole_copy(alias(tensor))}
        return tuple(number for number, _ in changed)

    def _hold(self, memory: Memory, tensor: torch.Tensor) -> None:
        """What was saved of this memory, which `tensor` looks at, is held as it is from now on."""
        holders, memory.holders = memory.holders, None
        for reference in holders or ():
            holder = reference()
            if holder is None or holder.held is not None:
                continue
            with torch.no_grad():
                if isinstance(holder.view, View):
                    holder.held = Held(looked_at(alias(tensor), holder.view), holder.counter, holder.version)
                elif len(views_of(holder.view)) == 1:
                    inner = [looked_at(alias(tensor), v) if isinstance(v, View) else v for v in holder.view.inner]
                    holder.held = Held(holder.view.around(inner))
                else:
                    raise RecomputationError(
                        f"the module {self.fqn} changes a {holder.view.kind.__name__} that it has saved for its backward: "
                        "leave the module out of the plan"
                    )

    def complete(self, out: Any) -> None:
        """The forward has ended and returns `out`."""
        for tensor in all_tensors(out):
            for plain in plain_tensors(tensor):
                if has_storage(plain) and (number := self._numbers.get(plain.untyped_storage()._cdata)) is not None:
                    memory = self.memories[number]
                    if memory.holders and plain is tensor:
                        self._hold(memory, plain)
        self._numbers = {}
        for memory in self.memories:
            memory.holders = memory.blank = None
            if memory.kept is not None:
                if memory.kept_epoch == memory.epoch:
                    memory.kept_version = version_of(memory.kept)
                else:
                    memory.kept = None
        if not self.holders():  # nothing can be asked for
            self.entries, self.memories, self.offloaded, self.storages = [], [], [], References()
            return
        prune(self)

    # ---- memories -----------------------------------------------------------------------------------------------------

    def _add(self, storage: torch.UntypedStorage, creator: int, external: torch.Tensor | None) -> int:
        number = self._numbers[storage._cdata] = len(self.memories)
        self.storages.add(storage)
        self.memories.append(Memory(creator, external))
        return number

    def _number(self, tensor: torch.Tensor) -> int:
        """The memory that a plain tensor looks at; one that was not met before is external."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            number = self._add(tensor.untyped_storage(), -1, own(tensor))
            self.memories[number].version = version_of(tensor)
        return number

    def _described(self, value: Any, reads: list[View]) -> Any:
        """Arguments with views in place of tensors; what is read is added to `reads`."""
        kind = type(value)
        if kind in PLAIN:
            return self._describe_plain(value, reads)
        if kind is tuple or kind is list:
            return kind([self._described(item, reads) for item in value])
        if kind is dict:
            return {key: self._described(item, reads) for key, item in value.items()}
        if isinstance(value, torch.Tensor):
            return self._describe(value, reads)
        return value

    def _describe(self, tensor: torch.Tensor, reads: list[View]) -> Any:
        if type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor):
            return self._describe_plain(tensor, reads)
        names, context = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        inner = tuple(self._describe(part, reads) if isinstance(part, torch.Tensor) else part for part in parts)
        return Wrapped(type(tensor), tuple(names), context, inner, tensor.size(), tensor.stride())

    def _describe_plain(self, tensor: torch.Tensor, reads: list[View]) -> Any:
        if not has_storage(tensor):
            return own(tensor)
        number = self._number(tensor)
        memory = self.memories[number]
        view = view_of(tensor, number, memory)
        reads.append(view)
        if memory.external is not None and memory.epoch:
            memory.version = version_of(memory.external)  # for a derivative that the module takes before it ends
        elif memory.external is not None and version_of(memory.external) != memory.version:
            self._changed_unseen(tensor)
        elif memory.holders and memory.kept is None:
            self._look_again(tensor, memory.holders[-1]())
        return view

    def _look_again(self, tensor: torch.Tensor, saved: Holder | None) -> None:
        """RecomputationError if what was saved of the tensor's memory is not on it any more: autograd would see the change."""
        if saved is not None and saved.is_changed(tensor):
            self._changed_unseen(tensor)

    def _changed_unseen(self, tensor: torch.Tensor) -> None:
        raise RecomputationError(
            f"the module {self.fqn} reads a tensor ({tensor.dtype} {list(tensor.shape)}) before and after it is "
            "changed out of sight of the module's operators: leave the module out of the plan"
        )

    def gather(self, parameter: torch.Tensor) -> bool:
        """Fill a parameter that FSDP has let go of; False if that cannot be done."""
        return self.gathering is not None and self.gathering.gather(parameter, observer[0])

    # ---- offloading (`offload.Offloadable`) --------------------------------------------------------

    def offload(self) -> None:
        """Begin to copy to the host what the plan offloads."""
        assert self.offloader is not None
        for memory in self.offloaded:
            if memory.kept is not None:
                memory.kept = self.offloader.send(memory.kept)

    def parcels(self) -> Any:
        """What is offloaded and has not been given yet."""
        return [memory.kept for memory in self.offloaded if isinstance(memory.kept, Parcel)]

    def forget(self) -> None:
        """What is offloaded was changed while it was copied: it is computed again."""
        for memory in self.offloaded:
            memory.kept = None


class RecordingMode(CountingMode):
    """Writes the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._calls: dict[Facts, int] = {}  # of every operator that counts
        self._outer: Tape | None = None
        self._running = ""  # the operator, as long as it runs

    def __enter__(self) -> RecordingMode:
        """Begin to write."""
        self._outer, present.tape = present.tape, self._tape
        super().__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Write no more."""
        super().__exit__(kind, value, traceback)
        present.tape = self._outer
        policy = self._tape.policy
        if self._running and value is not None:
            value.add_note(f"raised by {self._running} in the module {policy.fqn}, which runs under an AutoSAC plan")
        ran = sum(calls for facts, calls in self._calls.items() if not facts.is_wait) + self._tape.launched[GRAPH]
        planned = policy.size - policy.waits
        if kind is None and policy.size and ran != planned:
            policy.warn(f"ran {ran} operators; the plan has {planned}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note it."""
        kwargs = kwargs or {}
        tape = self._tape
        facts = facts_of(func)
        if facts.is_passed or tape.is_busy or tape.part is not None or quiet.depth:
            return func(*args, **kwargs)
        occurrence = self._calls.get(facts, 0) if facts.is_counted else -1
        entry = None if facts.only_metadata else tape.begin(func, facts, args, kwargs, occurrence)
        self._running = facts.name
        is_complex = entry is not None and any(view.dtype.is_complex for view in entry.reads)
        out = with_conjugates(func, args, kwargs) if is_complex else func(*args, **kwargs)
        self._running = ""
        if occurrence >= 0:  # an operator that raises does not count: the module may catch that
            self._calls[facts] = occurrence + 1
        if entry is not None:
            decision = tape.policy.decision(facts, occurrence, out) if occurrence >= 0 and tape.policy.size else None
            tape.end(entry, out, decision)
        return out


skipped_by_dynamo(RecordingMode)


def _may_leave(func: Any, decision: Decision) -> bool:
    """Whether a result may be copied when its unit has ended, to a buffer that the next step can use again."""
    return not is_collective(func) and not any(ANY_SIZE in shape for shape, _ in decision.outputs)
