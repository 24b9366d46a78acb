"""The recorder: turns what happens on the simulated device into a Trace.

It puts together who knows what: `phases` (where in the job an operator belongs), `storages` (which memory it uses),
`signatures` (what it was called with), `collectives` (what it transfers), and logs the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.nn import Module
from torch.utils import _pytree as pytree

from autosac.capture.device import device as simulated
from autosac.capture.device.cache import CachedCall
from autosac.capture.record.accumulation import EngineAdditions
from autosac.capture.record.collectives import CollectiveCall, describe_collective
from autosac.capture.record.construction import trains
from autosac.capture.record.distinct_values import DistinctValues
from autosac.capture.record.graphs import COMPILED, GraphRecords
from autosac.capture.record.log import EventLog
from autosac.capture.record.phases import OperatorPlace, PhaseTracker
from autosac.capture.record.signatures import SignatureTable, Work, is_attention, operator_name
from autosac.capture.record.storages import StorageTable
from autosac.trace import (
    ALONE,
    Collective,
    EmptyCache,
    EventRecord,
    EventWait,
    Free,
    Group,
    HostWait,
    Label,
    Op,
    Phase,
    RecordStream,
    Region,
    StreamWait,
    Trace,
    TraceInfo,
    WorkWait,
)

_current_node = torch._C._current_autograd_node
_DDP_STEPS = 3
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Extent(NamedTuple):
    """How far a capture has come: how many of each there are. `marks` and `begun` are what the step has recorded so far."""

    rows: int
    storages: int
    works: int
    events: int
    regions: int
    marks: int
    begun: int


class KernelLaunch(NamedTuple):
    """A Triton kernel that the program launched: its row and name, and the storages that it may write to (None: any)."""

    row: int
    name: str
    written: tuple[int, ...] | None


_LOOKS = frozenset(
    {
        torch.ops.aten.as_strided.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.view.dtype,
        torch.ops.aten._conj.default,
        torch.ops.aten._neg_view.default,
    }
)


class Recorder:
    """Collects one rank's prologue and recorded step. Implements DeviceLog and OperatorLog."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.log = EventLog()
        self.phases = PhaseTracker(self.log)
        self.storages = StorageTable(self.log, target)
        self.signatures = SignatureTable(target)
        self.launches: list[KernelLaunch] = []  # of Triton kernels, by the program
        self.graphs = GraphRecords(self.log)
        self.groups: DistinctValues[Group] = DistinctValues()
        self.regions: list[Region] = []
        self.traced: dict[str, list[Any]] = {}  # by units: the operators that the compiler met (`TraceInfo.traced`)
        self.model_parts: list[torch.nn.Module] = []
        self.adopts = True  # the first module that is called to be trained, if nobody has told of a model
        self.optimizers: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
        self.uses_ddp = False
        self.cleared: Callable[[int], None] = lambda first: None
        self._additions: EngineAdditions | None = None
        self._work = 0
        self._batch = ALONE
        self._wrappers = 0  # of the call whose operators come next
        self._work_of_storage: dict[int, int] = {}

    # ---- the job tells what it consists of --------------------------------------------------------------------------

    def add_model(self, model: torch.nn.Module) -> None:
        """A part of the model, unless it is known: its modules get names, its parameters and buffers labels."""
        if not any(model is known for known in self.model_parts):
            self.model_parts.append(model)
            self.phases.modules.add(model)

    def steps(self, count: int) -> Iterator[tuple[int, int]]:
        """The numbers of the steps to run, one by one, each with that of the last, the only one that is recorded.

        DDP sorts its buckets anew in the second step: then the third is the first that is like all that follow.
        """
        number = 0
        while number < count:
            number += 1
            if number == count:
                self.begin_recording()
            else:
                self.begin_step(number)
            yield number, count
            if self.uses_ddp:
                count = max(count, _DDP_STEPS)
        self.end_recording()

    def begin_step(self, step: int) -> None:
        """A step begins that only counts for the prologue."""
        self.phases.begin_step()
        self.log.begin_step(step)

    def begin_recording(self, step: int = 0) -> None:
        """The step to keep begins; `step` is its number, if another one may be kept in its place."""
        self.phases.begin_step()
        self.storages.forget_addition()
        self._label_gradients()  # pipeline stages under FSDP reduce theirs after the engine has run
        self.regions.clear()  # those of a step before
        self.log.begin(step)

    def end_recording(self) -> None:
        """The step to keep has ended."""
        self.phases.leave_backward_modules()
        self.log.end()
        self._label_persistent()

    def enter_module(self, module: torch.nn.Module, args: Any) -> None:
        """A module's forward begins."""
        if self.adopts and not self.model_parts and trains(module):
            self.add_model(module)  # a teacher, or an encoder that is not trained, may have been called before
        if self.phases.enter_module(module):
            self.storages.label_inputs(args)

    def exit_module(self) -> None:
        """The innermost module's forward ends."""
        self.phases.exit_module()

    def run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the autograd engine."""
        additions, self._additions = self._additions, EngineAdditions()
        try:
            return self.phases.run_backward(engine, *args, **kwargs)
        except SystemError as e:
            raise simulated.take_lost_error() or e from None
        finally:
            self._additions = additions
            self._label_gradients()

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """`Optimizer.step` begins."""
        self.optimizers[id(optimizer)] = optimizer
        self.phases.enter_optimizer()

    def exit_optimizer(self) -> None:
        """`Optimizer.step` ends."""
        self.phases.exit_optimizer()

    def _label_gradients(self) -> None:
        for model in self.model_parts:
            leaves = (p for p in Module.parameters(model) if p.is_leaf)  # FSDP's views of its own parameters are none
            self.storages.label([p.grad for p in leaves if p.grad is not None], Label.GRADIENT)

    def _label_persistent(self) -> None:
        self._label_gradients()
        for model in self.model_parts:
            self.storages.label(
                list(Module.parameters(model)), Label.PARAMETER
            )  # Megatron's have attributes of these names
            self.storages.label(list(Module.buffers(model)), Label.BUFFER)
        for optimizer in self.optimizers.values():
            self.storages.label(list(optimizer.state.values()), Label.OPTIMIZER_STATE)

    # ---- OperatorLog ------------------------------------------------------------------------------------------------

    def operator(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        entry: CachedCall | None,
        tensors: Sequence[torch.Tensor] | None,
    ) -> None:
        """Record one operator that ran on the target device."""
        wrappers, self._wrappers = self._wrappers, 0
        if self.phases.is_repeating and func in _LOOKS:
            return  # how a recomputation looks at its results depends on what was kept; it launches nothing
        stream = simulated.current_stream().stream_id
        place = self.phases.locate()
        if tensors is None:
            tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(t, torch.Tensor)]
        inputs = tuple([self.storages.of(t) for t in tensors])
        call = describe_collective(func, args)
        out_tensors = (
            [out]
            if isinstance(out, torch.Tensor)
            else [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor)]
        )
        aside = stream != 0 and not self.graphs.is_open
        label = Label.COMMUNICATION if aside or call is not None else Label.NONE
        if func is _COPIES[0] and inputs == (-1,) and place.phase is Phase.OTHER:
            label = Label.INPUT  # a batch comes from the host
        name = operator_name(func)
        home = self.graphs.memory_of(stream)
        outputs = tuple([self.storages.returned(t, name, home, place, label) for t in out_tensors])
        if self.log.recording:
            signature = self._signature(func, args, kwargs, entry, tensors, out_tensors)
            if wrappers:
                signature = self.signatures.wrapped(signature, wrappers)
            if call is not None:
                nbytes = call.nbytes(tensors, out_tensors)
                self._collective(call, nbytes, signature, stream, place, inputs, outputs)
            else:
                self.log.events.append(Op(signature, stream, place.module, place.phase, place.source, inputs, outputs))
            if func in _COPIES and _host_waits(func, args, kwargs, out):
                self.graphs.refuse_waiting()
                self.log.events.append(HostWait(stream, -1, "stream"))
        if self._additions is not None and place.phase is Phase.BACKWARD:
            self.storages.forget_addition()
            if self._additions.is_one(func, args, out, _current_node()):
                self.storages.expect_addition(args[0], out)

    def _signature(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        entry: CachedCall | None,
        tensors: Sequence[Any],
        out_tensors: Sequence[Any],
    ) -> int:
        if entry is None or is_attention(func):
            return self.signatures.add(func, args, kwargs, tensors, out_tensors)
        if entry.signature < 0:
            entry.signature = self.signatures.add(func, args, kwargs, tensors, out_tensors)
        return entry.signature

    def wrapped(self) -> None:
        """A tensor subclass is about to take a call apart: the first operator that comes of it says so."""
        self._wrappers += 1

    def host_reads(self) -> None:
        """The host reads a value: it waits for the current stream."""
        self.graphs.refuse_waiting()
        self.log.add(HostWait(simulated.current_stream().stream_id, -1, "item"))

    def record_stream(self, tensor: torch.Tensor, stream_id: int) -> None:
        """`Tensor.record_stream`; the prologue keeps these too, for the allocator."""
        storage = self.storages.of(tensor)
        if storage >= 0:
            self.log.events.append(RecordStream(storage, self.graphs.memory_of(stream_id)))

    def emptied_cache(self) -> None:
        """`torch.cuda.empty_cache`; the prologue keeps it, too."""
        self.log.events.append(EmptyCache())

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """The cache of cast weights lets go of what it holds. `cleared` is told from which row on that is logged."""
        events = self.log.events
        first = len(events)
        yield
        self.cleared(first)
        if all(type(row) is Free for row in events[first:]):
            events[first:] = sorted(events[first:])

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """`UntypedStorage.resize_`."""
        if not self.storages.holds(storage, nbytes):
            stream = self.graphs.memory_of(simulated.current_stream().stream_id)
            self.storages.resized(storage, nbytes, stream, self.phases.locate())

    def launch(self, name: str, arguments: Iterable[Any], written: Sequence[Any] | None) -> None:
        """The program launches a Triton kernel by itself, which may write to these of its arguments (None: to any)."""
        self.triton_kernel(name, arguments)
        if self.log.recording:
            storages = None if written is None else self.storages.of_all(written)
            self.launches.append(KernelLaunch(len(self.log.events) - 1, f"triton.{name}", storages))

    def triton_kernel(
        self, name: str, arguments: Iterable[Any], *, written: Sequence[int] = (), work: Work = ()
    ) -> None:
        """A Triton kernel is launched from Python; it writes to the tensors at `written`, and does this `work`."""
        place = self.phases.locate()
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if self.log.recording:
            signature = self.signatures.add_kernel(f"triton.{name}", tensors, written, work)
            stream = simulated.current_stream().stream_id
            inputs = tuple(self.storages.of(t) for t in tensors)
            self.log.events.append(Op(signature, stream, place.module, place.phase, place.source, inputs, ()))

    # ---- DeviceLog --------------------------------------------------------------------------------------------------

    def event_record(self, event: int, stream: int) -> None:
        self.log.marks.add(event)
        self.log.add(EventRecord(event, stream))

    def event_wait(self, event: int, stream: int) -> None:
        self.log.add(EventWait(event, stream))

    def stream_wait(self, stream: int, other: int) -> None:
        self.log.add(StreamWait(stream, other))

    def host_wait(self, stream: int, event: int, reason: str) -> None:
        self.graphs.refuse_waiting()
        self.log.add(HostWait(stream, event, reason))

    def launched_at_once(self) -> AbstractContextManager[None]:
        """What happens inside is a CUDA graph of compiled code; all of these share their memory."""
        return self.graphs.launched(COMPILED)

    def work_wait(self, work: int) -> None:
        """`Work.wait` on the current stream."""
        self.log.add(WorkWait(work, simulated.current_stream().stream_id))

    def begin_batch(self) -> None:
        """The point-to-point transfers until `end_batch` are one."""
        self._work += 1
        self._batch = self._work

    def end_batch(self) -> None:
        self._batch = ALONE

    @property
    def in_batch(self) -> bool:
        """Whether transfers join the one that has begun."""
        return self._batch >= 0

    @property
    def last_work(self) -> int:
        """The work id of the newest collective."""
        return self._work

    # ---- repetition (`repeats`) -------------------------------------------------------------------------------------

    def extent(self) -> Extent:
        """How far the capture has come."""
        return Extent(
            rows=len(self.log.events),
            storages=len(self.storages.storages),
            works=self._work + 1,
            events=simulated.event_numbers.next,
            regions=len(self.regions),
            marks=len(self.log.marks.made),
            begun=len(self.log.works.made),
        )

    @property
    def is_between(self) -> bool:
        """Whether nothing is under way that what comes next would belong to."""
        return not (self.in_batch or self.storages.awaits_addition or self.graphs.is_open)

    def take_works(self, count: int) -> list[int]:
        """So many new works' numbers."""
        first, self._work = self._work + 1, self._work + count
        return list(range(first, first + count))

    # ---- collectives ------------------------------------------------------------------------------------------------

    def _collective(
        self,
        call: CollectiveCall,
        nbytes: int,
        signature: int,
        stream: int,
        place: OperatorPlace,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ) -> None:
        if call.kind == "wait":
            work = self._work_of_storage.get(inputs[0] if inputs else -1)
            if work is not None:
                self.log.events.append(WorkWait(work, stream))
            return
        if self._batch < 0:
            self._work += 1
        work = self._batch if self._batch >= 0 else self._work
        if call.functional:
            for storage in outputs:
                self._work_of_storage[storage] = work
        self.log.works.add(work)
        self.log.events.append(
            Collective(
                kind=call.kind,
                nbytes=nbytes,
                group=self.groups.add(Group.of(call.group_name, call.ranks)),
                stream=stream,
                asynchronous=call.asynchronous,
                work=work,
                peer=call.peer,
                batch=self._batch if self.in_batch else call.alone,
                signature=signature,
                module=place.module,
                phase=place.phase,
                source=place.source,
                inputs=inputs,
                outputs=outputs,
            )
        )

    # ---- the result -------------------------------------------------------------------------------------------------

    def trace(self, info: TraceInfo) -> Trace:
        """The finished Trace."""
        highest = max(self.storages.streams)
        prologue, events = self.log.finished()
        traced = {name: tuple(operators) for name, operators in self.traced.items() if operators}
        return Trace(
            info=replace(info, traced=traced),
            signatures=self.signatures.finished(),
            storages=self.storages.finished(),
            modules=tuple(self.phases.modules.names),
            module_parents=tuple(self.phases.modules.parents),
            module_classes=tuple(self.phases.modules.classes),
            sources=tuple(self.phases.sources.index),
            groups=tuple(self.groups.index),
            streams=("compute", *map(self.graphs.name_of, range(1, highest + 1))),
            prologue=prologue,
            events=events,
            regions=tuple(sorted(self.regions, key=lambda region: (region.first, -region.last))),
        )


def _host_waits(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Copies between host and device block the host unless `non_blocking` is asked for (CUDA's Copy.cu)."""
    source = args[0] if func is _COPIES[0] else args[1]
    blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    return blocking and isinstance(source, torch.Tensor) and source.device.type != out.device.type
