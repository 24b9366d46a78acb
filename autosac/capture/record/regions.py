"""Recording the regions: what a selective checkpointing policy would see in each module that could be checkpointed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autosac.capture.record.recorder import Recorder
from autosac.capture.record.signatures import (
    is_random,
    launches_nothing,
    mutated_arguments,
    scalar_arguments,
    tensor_meta,
)
from autosac.integrations.observe import RegionRecorder
from autosac.integrations.operators.keys import tensors_in
from autosac.integrations.operators.modules import clean_name, unwrapped
from autosac.integrations.recompute.entries import Observer, TracedOperator
from autosac.integrations.recompute.units import can_become
from autosac.plans import GRAPH
from autosac.trace import UNSHARD, Alloc, Call, Free, Op, Region

# Recomputing these is wrong or wasteful: a router's choice must not differ between forward and recomputation, a scaling
# factor is tiny, and a shape that depends on data makes the host wait again. Whether to repeat a collective is a question of
# what it costs on the wire.
_MUST_SAVE = {"aten.topk.default", "aten.max.default", "aten.histc.default"}


def candidate_modules(model: nn.Module) -> list[str]:
    """Names of the modules that could be checkpointed: called, not leaves, with parameters that need gradients.

    The names are clean ones. The root is none (its loss and logits live outside), nor are containers, which are never called,
    nor modules whose class Python does not change.
    """
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    named = ((clean_name(name), module) for name, module in unwrapped(model).named_modules())
    found = [
        name
        for name, module in named
        if name
        and any(True for _ in module.children())
        and not (isinstance(module, containers) and type(module).forward is nn.Module.forward)
        and not isinstance(module, containers[:2])
        and any(p.requires_grad for p in module.parameters())
        and can_become(module)
    ]
    return list(dict.fromkeys(found))  # a wrapper has the name of what it wraps


class RegionLog:
    """Builds the trace's regions from what `autosac.integrations.observe` reports."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionRecorder:
        """One forward of the module begins."""
        return _OpenRegion(self._recorder, fqn, args, kwargs)


class RecomputationPhases(Observer):
    """Tells the operators that units run again from the rest of the backward."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def place(self) -> tuple[int, int]:
        """Module and line of the operator that just ran."""
        return self._recorder.phases.here()

    def begin(self, fqn: str, forward: int) -> None:
        """The recomputation of a unit begins, of its forward of this number."""
        self._recorder.phases.begin_recomputation(fqn)

    def operator(self, place: tuple[int, int], key: tuple[str, int]) -> None:
        """The operator with this key runs again."""
        self._recorder.phases.repeat(place)

    def end(self) -> None:
        """The recomputation has ended."""
        self._recorder.phases.end_recomputation()


class RecomputationLog(RecomputationPhases):
    """Logs the recomputations of a plan's units: each as a region, whose calls are the operators that run again.

    In place of inputs it has the number of the forward that it repeats, counted from the module's first.

    `strictly`: the recorded step follows the plan or stops: it would not be the step that the plan is judged by. Steps before
    it may fill what modules keep for later ones.
    """

    def __init__(self, recorder: Recorder, *, strictly: bool = True) -> None:
        super().__init__(recorder)
        self._strictly = strictly
        self._fqn = ""
        self._first = self._forward = 0
        self._marks: list[tuple[tuple[str, int] | None, int]] = []  # what begins at which row

    def traces(self, fqn: str) -> list[TracedOperator]:
        """The compiler is about to trace a unit, perhaps once more."""
        self._recorder.traced[fqn] = []
        return self._recorder.traced[fqn]

    def begin(self, fqn: str, forward: int) -> None:
        """The recomputation of a unit begins, of its forward of this number."""
        self._forward = forward
        super().begin(fqn, forward)
        self._fqn, self._first, self._marks = fqn, len(self._recorder.log.events) - 1, []

    def operator(self, place: tuple[int, int], key: tuple[str, int]) -> None:
        """The operator with this key runs again."""
        self._mark(key)
        super().operator(place, key)

    def gather(self, module: nn.Module) -> None:
        """FSDP gathers a module's parameters: a call by itself, which belongs to the unit whatever asks for them."""
        modules = self._recorder.phases.modules
        self._mark((UNSHARD, modules.of_object.get(id(module), 0)))
        self._recorder.phases.repeat((modules.names.index(self._fqn), 0))

    def gathered(self) -> None:
        """It has."""
        self._mark(None)

    def ran(self) -> None:
        """All operators have run; what comes are views of their results."""
        self._mark(None)

    def mismatch(self, warning: Warning, is_first: bool) -> None:
        """A unit does not do what its plan says. Compiled code is that of all steps."""
        is_traced = torch._guards.TracingContext.try_get() is not None
        if self._strictly and (self._recorder.log.recording or is_traced):
            raise warning

    def _mark(self, key: tuple[str, int] | None) -> None:
        self._marks.append((key, len(self._recorder.log.events)))

    def end(self) -> None:
        """The recomputation has ended."""
        recorder = self._recorder
        super().end()
        if not recorder.log.recording:
            return
        last = len(recorder.log.events)
        calls = tuple(
            Call(*key, (), first, end, False, False, False, (), (), (), ())
            for (key, first), (_, end) in itertools.pairwise([*self._marks, (None, last)])
            if key is not None and (key[0] != UNSHARD or first < end)
        )
        module = recorder.phases.modules.names.index(self._fqn)
        recorder.regions.append(Region(module, self._first, last, calls, (self._forward,), ()))


class _OpenRegion:
    """One forward execution. Its operators and its end are reported in order; nested regions have their own."""

    def __init__(self, recorder: Recorder, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recorder = recorder
        self._recording = recorder.log.recording
        if not self._recording:
            return
        self._module = recorder.phases.modules.names.index(fqn)
        self._first = len(recorder.log.events)
        self._inputs = recorder.storages.of_all((args, kwargs))
        self._calls: list[Call] = []
        self._op_first = 0
        self._launches = len(self._recorder.launches)  # that are noted, or were launched inside operators
        self._launched: Counter[str] = Counter()

    def op_begin(self) -> None:
        if self._recording:
            self._note_launches()
            self._op_first = len(self._recorder.log.events)

    def _note_launches(self) -> None:
        """Triton kernels that ran since the last operator: nothing is decided about them, but they run again.

        Of those whose source does not say what they write to, it may be all that the module made (see
        `integrations.operators.effects`).
        """
        recorder = self._recorder
        made = {s for call in self._calls for s in call.created}
        for row, name, written in recorder.launches[self._launches :]:
            event = recorder.log.events[row]
            assert type(event) is Op
            reads = tuple(dict.fromkeys(s for s in event.inputs if s >= 0))
            writes = tuple(s for s in reads if s in (made if written is None else written))
            self._launched[name] += 1
            self._calls.append(
                Call(name, -self._launched[name], (), row, row + 1, False, False, False, (), reads, writes, ())
            )
        self._launches = len(recorder.launches)

    def op_end(
        self, op: str, occurrence: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if not self._recording:
            return
        to_host = op == "aten._to_copy.default" and str(kwargs.get("device", "")) == "cpu"
        dynamic = torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) and op != "aten.index.Tensor"
        call = self._ended(op, occurrence, args, kwargs, out)
        self._calls.append(
            call._replace(
                is_view=launches_nothing(func) and not call.created,
                is_random=is_random(func, scalar_arguments(func, args, kwargs)),
                must_save=to_host or dynamic or op in _MUST_SAVE,
                writes=self._writes(func, args, kwargs),
            )
        )

    def graph_end(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: Sequence[torch.Tensor]
    ) -> None:
        """A compiled graph is kept with all that it saved, or runs again as a whole. One that changes arguments is kept."""
        if not self._recording:
            return
        call = self._ended(GRAPH, self._launched[GRAPH], args, kwargs, out)
        self._launched[GRAPH] += 1
        self._calls.append(call._replace(must_save=bool(changed), writes=self._recorder.storages.of_all(changed)))

    def _ended(self, op: str, occurrence: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Call:
        """What began last, as far as its arguments and results tell. What it launched is its own."""
        recorder, returned = self._recorder, tensors_in(out)
        self._launches = len(recorder.launches)
        return Call(
            op=op,
            occurrence=occurrence,
            outputs=tuple(tensor_meta(t, recorder.target) for t in returned),
            first=self._op_first,
            last=len(recorder.log.events),
            is_view=False,
            is_random=False,
            must_save=False,
            created=self._created(),
            reads=recorder.storages.of_all((args, kwargs)),
            writes=(),
            results=tuple(next(iter(recorder.storages.of_all(t)), -1) for t in returned),
        )

    def _created(self) -> tuple[int, ...]:
        """What has been allocated since the operator began, and is still there."""
        created: dict[int, None] = {}
        for event in self._recorder.log.events[self._op_first :]:
            if type(event) is Alloc:
                created[event.storage] = None
            elif type(event) is Free:
                created.pop(event.storage, None)
        return tuple(created)

    def _writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        names = mutated_arguments(func)
        if not names:
            return ()
        schema_names = [argument.name for argument in func._schema.arguments]
        written = [value for name, value in zip(schema_names, args, strict=False) if name in names]
        written += [value for name, value in kwargs.items() if name in names]
        return self._recorder.storages.of_all(written)

    def end(self, out: Any) -> None:
        if not self._recording:
            return
        self._note_launches()
        recorder = self._recorder
        recorder.regions.append(
            Region(
                module=self._module,
                first=self._first,
                last=len(recorder.log.events),
                calls=tuple(self._calls),
                inputs=self._inputs,
                outputs=recorder.storages.of_all(out),
            )
        )
