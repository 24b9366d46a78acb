"""The recorder: turns what happens on the simulated device into a Trace.

- **Storages** live from the operator that first returns them to the death of their last reference (a weakref on the
  storage object), and through `UntypedStorage.resize_`, with which FSDP2 frees and re-allocates its unsharded parameters:
  every such allocation is a storage of its own in the trace.
- **Phases**: forward from the first module call, backward inside the autograd engine, recompute where a module's forward
  runs inside of it, optimizer inside `Optimizer.step`, other elsewhere in the step.
- **Modules**: by global module hooks in the forward; in the backward by autograd's sequence number: a node belongs to the
  module (and source line) that was running when the node was made.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture import device as simulated
from autosac.capture.accumulation import EngineAdditions
from autosac.capture.cache import Entry
from autosac.capture.collectives import CollectiveCall, describe_collective
from autosac.capture.signatures import SignatureTable
from autosac.capture.sources import calling_line
from autosac.integrations.modules import clean_name, unwrapped
from autosac.trace import (
    Alloc,
    Collective,
    Event,
    EventRecord,
    EventWait,
    Free,
    Group,
    HostWait,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    RecordStream,
    Region,
    StepBegin,
    Storage,
    StreamWait,
    Trace,
    WorkWait,
)

_get_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_ROOT = 0


class _Live:
    """A storage object that is alive now, and the id of its present allocation (-1 while it is empty)."""

    __slots__ = ("reference", "storage")

    def __init__(self) -> None:
        self.reference: weakref.ref[Any] | None = None
        self.storage = -1


_T = TypeVar("_T")


class Table(Generic[_T]):
    """Distinct values in order of appearance."""

    def __init__(self) -> None:
        self.index: dict[_T, int] = {}

    def add(self, value: _T) -> int:
        """The index of `value`."""
        return self.index.setdefault(value, len(self.index))


class Recorder:
    """Collects one rank's prologue and recorded step. Implements DeviceLog and OperatorLog."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.signatures = SignatureTable(target)
        self.storages: list[Storage] = []
        self.labels: dict[int, Label] = {}
        self.sources: Table[str] = Table()
        self.sources.add("")
        self.groups: Table[Group] = Table()
        self.streams: set[int] = {0}
        self.module_names: list[str] = [""]
        self.module_parents: list[int] = [-1]
        self.module_classes: list[str] = [""]
        self.regions: list[Region] = []
        self.prologue: list[Event] = []
        self.events: list[Event] = self.prologue
        self.recording = False
        self.phase = Phase.SETUP
        self.model_parts: list[torch.nn.Module] = []
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._live: dict[int, _Live] = {}
        self._module_ids: dict[int, int] = {}
        self._stack: list[int] = [_ROOT]
        self._backward_module = _ROOT
        self._additions: EngineAdditions | None = None
        # An addition that was in place if its first summand dies next: (summand's key, its output's key, events so far).
        self._addition: tuple[int, int, int] | None = None
        # (sequence number after the operator, module, source), ascending: who made which autograd nodes.
        self._node_numbers: list[int] = []
        self._node_owners: list[tuple[int, int]] = []
        self._work = 0
        self._batch = -1
        self._work_of_storage: dict[int, int] = {}

    # ---- the job tells what it consists of --------------------------------------------------------------------------

    def add_model(self, model: torch.nn.Module) -> None:
        """Name the modules of a model part; names of wrappers are left out."""
        self.model_parts.append(model)
        by_name = {name: i for i, name in enumerate(self.module_names)}
        for raw_name, module in unwrapped(model).named_modules():
            name = clean_name(raw_name)
            if name not in by_name:
                parent = by_name[name.rpartition(".")[0]] if name else -1
                by_name[name] = len(self.module_names)
                self.module_names.append(name)
                self.module_parents.append(parent)
                self.module_classes.append("")
            position = by_name[name]
            self.module_classes[position] = type(module).__name__  # the innermost wrapper comes last
            self._module_ids[id(module)] = position

    def begin_step(self, step: int) -> None:
        """A step begins that only counts for the prologue."""
        self.phase = Phase.OTHER
        self.prologue.append(StepBegin(step))

    def begin_recording(self) -> None:
        """The step to keep begins."""
        self.phase = Phase.OTHER
        self.events = []
        self.recording = True

    def end_recording(self) -> None:
        """The step to keep has ended."""
        self._leave_backward_modules(_ROOT)
        self.recording = False
        self._label_persistent()

    # ---- OperatorLog ------------------------------------------------------------------------------------------------

    def operator(
        self, func: Any, args: Any, kwargs: Any, out: Any, entry: Entry | None, tensors: list[FakeTensor] | None
    ) -> None:
        """Record one operator that ran on the target device."""
        stream = simulated.current_stream().stream_id
        module, source = self._locate()
        if tensors is None:
            tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(t, torch.Tensor)]
        inputs = tuple([self._storage_of(t) for t in tensors])
        call = describe_collective(func, args)
        out_tensors = [out] if isinstance(out, torch.Tensor) else [
            o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor)
        ]  # fmt: skip
        outputs = tuple([self._output(o, func, stream, module, source, call is not None) for o in out_tensors])
        if self.phase is Phase.BACKWARD and self._additions is not None:
            self._watch_addition(func, args, out)
        if not self.recording:
            return
        if entry is not None:
            if entry.signature < 0:
                entry.signature = self.signatures.add(func, args, kwargs, tensors, out_tensors)
            signature = entry.signature
        else:
            signature = self.signatures.add(func, args, kwargs, tensors, out_tensors)
        if call is not None:
            self._collective(call, signature, stream, module, source, inputs, outputs, tensors, out_tensors)
        else:
            self.events.append(Op(signature, stream, module, self.phase, source, inputs, outputs))
        if self._addition is not None:
            self._addition = (*self._addition[:2], len(self.events))

    def _watch_addition(self, func: Any, args: Any, out: Any) -> None:
        self._addition = None
        assert self._additions is not None
        if self._additions.is_one(func, args, out, _current_node()):
            keys = id(args[0].untyped_storage()), id(out.untyped_storage())
            if keys[0] in self._live and keys[1] in self._live:
                self._addition = (*keys, len(self.events))

    def _added_in_place(self, summand: _Live, total: _Live) -> None:
        """The engine's addition wrote into its first summand: its allocation lives on, there was no new one."""
        allocation = self.events.index(Alloc(total.storage), max(0, len(self.events) - 4))
        del self.events[allocation]
        if self.recording:
            operator = self.events[-1]
            assert type(operator) is Op
            self.events[-1] = operator._replace(outputs=(summand.storage,))
        total.storage, summand.storage = summand.storage, -1

    def item_read(self) -> None:
        """The host reads a value: it waits for the current stream."""
        self._event(HostWait(simulated.current_stream().stream_id, -1, "item"))

    def record_stream(self, tensor: torch.Tensor, stream_id: int) -> None:
        """`Tensor.record_stream`; the prologue keeps these too, for the allocator."""
        storage = self._storage_of(tensor)
        if storage >= 0:
            self.events.append(RecordStream(storage, stream_id))

    def triton_kernel(self, name: str, arguments: Iterable[Any]) -> None:
        """A Triton kernel is launched from Python."""
        stream = simulated.current_stream().stream_id
        module, source = self._locate()
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if self.recording:
            signature = self.signatures.add_kernel(f"triton.{name}", tensors)
            inputs = tuple(self._storage_of(t) for t in tensors)
            self.events.append(Op(signature, stream, module, self.phase, source, inputs, ()))

    # ---- DeviceLog --------------------------------------------------------------------------------------------------

    def event_record(self, event: int, stream: int) -> None:
        self._event(EventRecord(event, stream))

    def event_wait(self, event: int, stream: int) -> None:
        self._event(EventWait(event, stream))

    def stream_wait(self, stream: int, other: int) -> None:
        self._event(StreamWait(stream, other))

    def host_wait(self, stream: int, event: int, reason: str) -> None:
        self._event(HostWait(stream, event, reason))

    def work_wait(self, work: int) -> None:
        """`Work.wait` on the current stream."""
        self._event(WorkWait(work, simulated.current_stream().stream_id))

    def begin_batch(self) -> None:
        """The point-to-point transfers until `end_batch` are one."""
        self._work += 1
        self._batch = self._work

    def end_batch(self) -> None:
        self._batch = -1

    @property
    def last_work(self) -> int:
        """The work id of the newest collective."""
        return self._work

    def _event(self, event: Event) -> None:
        if self.recording:
            self.events.append(event)

    # ---- phases and modules -----------------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward begins. Unknown modules count as the one around them."""
        if not self.model_parts:
            self.add_model(module)
        position = self._module_ids.get(id(module), self._stack[-1])
        if self.phase is Phase.OTHER:
            self.phase = Phase.FORWARD
        elif self.phase is Phase.BACKWARD:
            self.phase = Phase.RECOMPUTE
            self._stack.append(-1)  # marks where recomputation began
        if position != self._stack[-1]:
            self._event(ModuleEnter(position, self.phase))
        self._stack.append(position)

    def exit_module(self) -> None:
        """The innermost module's forward ends."""
        position = self._stack.pop()
        if position != self._stack[-1]:
            self._event(ModuleExit(position, self.phase))
        if self._stack[-1] == -1:
            self._stack.pop()
            self.phase = Phase.BACKWARD

    def run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the autograd engine. Re-entrant backwards stay in the phase that they are in."""
        before, depth = self.phase, len(self._stack)
        additions, self._additions = self._additions, EngineAdditions()
        outer_module, self._backward_module = self._backward_module, _ROOT
        self.phase = Phase.BACKWARD
        try:
            return engine(*args, **kwargs)
        finally:
            self._additions = additions
            del self._stack[depth:]  # an exception that stops recomputation early leaves its modules open
            self._leave_backward_modules(_ROOT)
            self._backward_module = outer_module
            self.phase = Phase.OTHER if before in (Phase.FORWARD, Phase.OTHER) else before
            self._label_gradients()

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers[id(optimizer)] = optimizer
        self.phase = Phase.OPTIMIZER

    def exit_optimizer(self) -> None:
        self.phase = Phase.OTHER

    def unwind(self, depth: int) -> None:
        """Close the modules that an exception (early stop of recomputation) has left open."""
        while len(self._stack) > depth:
            if self._stack[-1] == -1:
                self._stack.pop()
                self.phase = Phase.BACKWARD
            else:
                self.exit_module()

    @property
    def depth(self) -> int:
        """How many modules are open."""
        return len(self._stack)

    def _locate(self) -> tuple[int, int]:
        """(module, source) that the operator belongs to."""
        if self.phase is Phase.BACKWARD:
            node = _current_node()
            number = node._sequence_nr() if node is not None else None
            if number is not None and self._node_numbers:
                position = bisect.bisect_right(self._node_numbers, number)
                if position < len(self._node_owners):
                    module, source = self._node_owners[position]
                    if module != self._backward_module:
                        self._move_backward(module)
                    return module, source
            return self._backward_module, 0
        module = self._stack[-1]
        source = self.sources.add(calling_line())
        number = _get_sequence_number()
        if not self._node_numbers or number > self._node_numbers[-1]:
            self._node_numbers.append(number)
            self._node_owners.append((module, source))
        return module, source

    def _ancestors(self, module: int) -> list[int]:
        chain = []
        while module > _ROOT:
            chain.append(module)
            module = self.module_parents[module]
        return chain[::-1]

    def _move_backward(self, module: int) -> None:
        """Emit the module exits and entries on the way from the present backward module to `module`."""
        present, new = self._ancestors(self._backward_module), self._ancestors(module)
        common = 0
        while common < min(len(present), len(new)) and present[common] == new[common]:
            common += 1
        for position in reversed(present[common:]):
            self._event(ModuleExit(position, Phase.BACKWARD))
        for position in new[common:]:
            self._event(ModuleEnter(position, Phase.BACKWARD))
        self._backward_module = module

    def _leave_backward_modules(self, module: int) -> None:
        if self._backward_module != module:
            self._move_backward(module)

    # ---- storages ---------------------------------------------------------------------------------------------------

    def _storage_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        live = self._live.get(id(storage))
        return live.storage if live is not None and live.reference is not None and live.reference() is storage else -1

    def _output(self, tensor: Any, func: Any, stream: int, module: int, source: int, collective: bool) -> int:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != self.target:
            return -1
        storage = tensor.untyped_storage()
        key = id(storage)
        live = self._live.get(key)
        if live is not None and live.reference is not None and live.reference() is storage:
            return live.storage
        live = _Live()
        nbytes = storage.nbytes()
        if nbytes:
            label = Label.NONE
            if stream != 0 or collective:
                label = Label.COMMUNICATION
            live.storage = self._allocate(nbytes, stream, module, source, str(func), label)
        live.reference = weakref.ref(storage, lambda _: self._died(key, live))
        self._live[key] = live
        return live.storage

    def _allocate(self, nbytes: int, stream: int, module: int, source: int, name: str, label: Label) -> int:
        position = len(self.storages)
        if stream not in self.streams:
            self.streams.add(stream)
        self.storages.append(Storage(nbytes, stream, label, self.phase, module, source, name))
        self.events.append(Alloc(position))
        return position

    def _died(self, key: int, live: _Live) -> None:
        if self._addition is not None:
            summand, total, position = self._addition
            self._addition = None
            if key == summand and position == len(self.events):
                self._added_in_place(live, self._live[total])
        if live.storage >= 0:
            self.events.append(Free(live.storage))
            live.storage = -1
        if self._live.get(key) is live:
            del self._live[key]

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """`UntypedStorage.resize_`: the old allocation ends, a new one begins."""
        live = self._live.get(id(storage))
        if live is None or live.reference is None or live.reference() is not storage:
            return
        if live.storage >= 0 and self.storages[live.storage].nbytes == nbytes:
            return
        if live.storage >= 0:
            self.events.append(Free(live.storage))
            live.storage = -1
        if nbytes:
            module, source = self._locate()
            stream = simulated.current_stream().stream_id
            label = Label.NONE if self.phase is Phase.SETUP else Label.UNSHARDED_PARAMETER
            live.storage = self._allocate(nbytes, stream, module, source, "resize_", label)

    def storages_in(self, tree: Any) -> tuple[int, ...]:
        """The storages (distinct, in order) of all tensors in a tree, tensor subclasses opened."""
        found: dict[int, None] = {}
        for leaf in pytree.tree_leaves(tree):
            for tensor in _plain_tensors(leaf):
                storage = self._storage_of(tensor)
                if storage >= 0:
                    found[storage] = None
        return tuple(found)

    def _label(self, tree: Any, label: Label) -> None:
        for storage in self.storages_in(tree):
            self.labels.setdefault(storage, label)

    def _label_gradients(self) -> None:
        for model in self.model_parts:
            self._label([p.grad for p in model.parameters() if p.grad is not None], Label.GRADIENT)

    def _label_persistent(self) -> None:
        self._label_gradients()
        for model in self.model_parts:
            self._label(list(model.parameters()), Label.PARAMETER)
            self._label(list(model.buffers()), Label.BUFFER)
        for optimizer in self.optimizers.values():
            self._label(list(optimizer.state.values()), Label.OPTIMIZER_STATE)

    # ---- collectives ------------------------------------------------------------------------------------------------

    def _collective(
        self,
        call: CollectiveCall,
        signature: int,
        stream: int,
        module: int,
        source: int,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        tensors: list[Any],
        out_tensors: list[Any],
    ) -> None:
        if call.kind == "wait":
            work = self._work_of_storage.get(inputs[0] if inputs else -1)
            if work is not None:
                self.events.append(WorkWait(work, stream))
            return
        if self._batch < 0:
            self._work += 1
        work = self._batch if self._batch >= 0 else self._work
        group = self.groups.add(Group.of(call.group_name, call.ranks))
        nbytes = call.nbytes(tensors, out_tensors)
        if call.functional:
            for storage in outputs:
                self._work_of_storage[storage] = work
        self.events.append(
            Collective(
                call.kind,
                nbytes,
                group,
                stream,
                call.asynchronous,
                work,
                call.peer,
                self._batch,
                signature,
                module,
                self.phase,
                source,
                inputs,
                outputs,
            )
        )

    # ---- the result -------------------------------------------------------------------------------------------------

    def trace(self, info: dict[str, Any]) -> Trace:
        """The finished Trace."""
        storages = tuple(
            s._replace(label=self.labels.get(i, s.label)) if i in self.labels else s
            for i, s in enumerate(self.storages)
        )
        highest = max(self.streams)
        return Trace(
            info=info,
            signatures=self.signatures.finished(),
            storages=storages,
            modules=tuple(self.module_names),
            module_parents=tuple(self.module_parents),
            module_classes=tuple(self.module_classes),
            sources=tuple(self.sources.index),
            groups=tuple(self.groups.index),
            streams=("compute", *(f"stream {i}" for i in range(1, highest + 1))),
            prologue=tuple(self.prologue),
            events=tuple(self.events),
            regions=tuple(sorted(self.regions, key=lambda region: (region.first, -region.last))),
        )


def _plain_tensors(value: Any) -> list[torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        return []
    if isinstance(value, FakeTensor) or not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [tensor for name in names for tensor in _plain_tensors(getattr(value, name))]
