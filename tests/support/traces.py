"""Hand-made traces for the tests: `trace_of` fills in what a test does not care for, `TraceBuilder` numbers storages.

Test modules import this as ``traces`` (see `pythonpath` in pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autosac.trace import (
    Alloc,
    Call,
    Event,
    Free,
    Group,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    RecordStream,
    Region,
    Signature,
    StepBegin,
    Storage,
    Trace,
    TraceInfo,
)


def trace_of(
    events: Iterable[Event] = (),
    *,
    prologue: Iterable[Event] = (),
    signatures: Iterable[Signature] = (),
    storages: Iterable[Storage] = (),
    modules: Sequence[str] = ("",),
    classes: Sequence[str] = (),
    sources: Sequence[str] = ("",),
    groups: Iterable[Group] = (),
    regions: Iterable[Region] = (),
    streams: Sequence[str] = ("compute",),
    **info: Any,
) -> Trace:
    """A trace with these rows; a module's parent is the closest one whose name it continues, `info` what the trace is of."""
    return Trace(
        info=TraceInfo(**info),
        signatures=tuple(signatures),
        storages=tuple(storages),
        modules=tuple(modules),
        module_parents=tuple(_parent(modules, i) for i in range(len(modules))),
        module_classes=tuple(classes) or ("Module",) * len(modules),
        sources=tuple(sources),
        groups=tuple(groups),
        prologue=tuple(prologue),
        events=tuple(events),
        regions=tuple(regions),
        streams=tuple(streams),
    )


def _parent(modules: Sequence[str], module: int) -> int:
    name = modules[module]
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            return modules.index(name)
    return -1


class TraceBuilder:
    """Collects events; `phase`, `module` (name) and `stream` are those of what is added next."""

    def __init__(
        self,
        modules: Sequence[str] = ("", "layers", "layers.0", "layers.0.attention", "layers.1", "head"),
        classes: Sequence[str] = ("Model", "ModuleList", "Block", "Attention", "Block", "Linear"),
    ) -> None:
        self.modules = tuple(modules)
        self.classes = tuple(classes) if len(classes) == len(modules) else ()
        self.storages: list[Storage] = []
        self.signatures: list[Signature] = []
        self.prologue: list[Event] = []
        self.events: list[Event] = []
        self.regions: list[Region] = []
        self.sources: list[str] = []
        self.phase = Phase.FORWARD
        self.module = ""
        self.stream = 0
        self.in_prologue = False

    def add(self, event: Event) -> int:
        """Append an event and return its index."""
        events = self.prologue if self.in_prologue else self.events
        events.append(event)
        return len(events) - 1

    def alloc(self, nbytes: int, label: Label = Label.NONE, op: str = "aten.empty.default") -> int:
        """A new storage with its Alloc; its id."""
        self.sources.append(f"model.py:{len(self.storages)}")
        module = self.modules.index(self.module)
        source = len(self.sources) - 1
        self.storages.append(Storage(nbytes, self.stream, label, self.phase, module, source, op))
        self.add(Alloc(len(self.storages) - 1))
        return len(self.storages) - 1

    def free(self, *storages: int) -> None:
        """Free storages in order."""
        for storage in storages:
            self.add(Free(storage))

    def record_stream(self, storage: int, stream: int) -> None:
        """`Tensor.record_stream`."""
        self.add(RecordStream(storage, stream))

    def op(self, name: str | Signature, inputs: Iterable[int] = (), outputs: Iterable[int] = ()) -> int:
        """An operator; its event index."""
        signature = name if isinstance(name, Signature) else Signature(name, (), ())
        if signature not in self.signatures:
            self.signatures.append(signature)
        index = self.signatures.index(signature)
        module = self.modules.index(self.module)
        return self.add(Op(index, self.stream, module, self.phase, -1, tuple(inputs), tuple(outputs)))

    def enter(self, module: str) -> int:
        """ModuleEnter in the current phase."""
        self.module = module
        return self.add(ModuleEnter(self.modules.index(module), self.phase))

    def leave(self, module: str) -> int:
        """ModuleExit in the current phase; the parent becomes the current module."""
        position = self.modules.index(module)
        self.module = self.modules[max(_parent(self.modules, position), 0)]
        return self.add(ModuleExit(position, self.phase))

    def step(self, number: int) -> None:
        """StepBegin, in the prologue."""
        self.prologue.append(StepBegin(number))

    def call(self, name: str, first: int, created: Iterable[int] = ()) -> Call:
        """What a policy sees of ``events[first:]`` so far: an operator that made these storages."""
        return Call(
            f"aten.{name}.default", 0, (), first, len(self.events), False, False, False, tuple(created), (), (), ()
        )

    def region(
        self,
        module: str,
        first: int,
        inputs: Iterable[int] = (),
        outputs: Iterable[int] = (),
        calls: Iterable[Call] = (),
    ) -> None:
        """An observed forward of a module, from event `first` to here."""
        number = self.modules.index(module)
        self.regions.append(Region(number, first, len(self.events), tuple(calls), tuple(inputs), tuple(outputs)))

    def build(self, **info: Any) -> Trace:
        """The trace."""
        return trace_of(
            self.events,
            prologue=self.prologue,
            signatures=self.signatures,
            storages=self.storages,
            modules=self.modules,
            classes=self.classes,
            sources=self.sources,
            regions=self.regions,
            streams=("compute", "all_gather", "reduce_scatter"),
            **info,
        )
