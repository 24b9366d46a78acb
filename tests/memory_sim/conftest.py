"""A builder of small traces, for the tests of memory_sim."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from autosac.trace import (
    Alloc,
    Event,
    Free,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    RecordStream,
    Signature,
    StepBegin,
    Storage,
    Trace,
    TraceInfo,
)

MODULES = ("", "layers", "layers.0", "layers.0.attention", "layers.1", "head")
PARENTS = (-1, 0, 1, 2, 1, 0)


class TraceBuilder:
    """Collects events; `phase`, `module` (name) and `stream` are those of what is added next."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.signatures: list[Signature] = []
        self.prologue: list[Event] = []
        self.events: list[Event] = []
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
        module = MODULES.index(self.module)
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
        module = MODULES.index(self.module)
        return self.add(Op(index, self.stream, module, self.phase, -1, tuple(inputs), tuple(outputs)))

    def enter(self, module: str) -> int:
        """ModuleEnter in the current phase."""
        self.module = module
        return self.add(ModuleEnter(MODULES.index(module), self.phase))

    def leave(self, module: str) -> int:
        """ModuleExit in the current phase; the parent becomes the current module."""
        self.module = MODULES[max(PARENTS[MODULES.index(module)], 0)]
        return self.add(ModuleExit(MODULES.index(module), self.phase))

    def step(self, number: int) -> None:
        """StepBegin, in the prologue."""
        self.prologue.append(StepBegin(number))

    def build(self) -> Trace:
        """The trace."""
        return Trace(
            info=TraceInfo(),
            signatures=tuple(self.signatures),
            storages=tuple(self.storages),
            modules=MODULES,
            module_parents=PARENTS,
            module_classes=("Model", "ModuleList", "Block", "Attention", "Block", "Linear"),
            sources=tuple(self.sources),
            groups=(),
            prologue=tuple(self.prologue),
            events=tuple(self.events),
            streams=("compute", "all_gather", "reduce_scatter"),
        )


@pytest.fixture(scope="session")
def builder() -> type[TraceBuilder]:
    """The builder class."""
    return TraceBuilder
