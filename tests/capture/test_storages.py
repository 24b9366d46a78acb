"""The table of allocations, driven tensor by tensor (on fake CPU tensors; "cpu" plays the device)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autosac.capture.record.log import EventLog
from autosac.capture.record.phases import OperatorPlace
from autosac.capture.record.storages import StorageTable
from autosac.trace import Alloc, Free, Label, Op, Phase, Storage

SETUP, FORWARD = OperatorPlace(Phase.SETUP, 0, 0), OperatorPlace(Phase.FORWARD, 2, 7)


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    """Makes fake tensors."""
    with FakeTensorMode() as found:
        yield found


@pytest.fixture
def log() -> EventLog:
    """An empty log, in the prologue."""
    return EventLog()


@pytest.fixture
def table(log: EventLog) -> StorageTable:
    """An empty table that writes to the log."""
    return StorageTable(log, "cpu")


def returned(table: StorageTable, tensor: torch.Tensor, place: OperatorPlace = FORWARD, **more: object) -> int:
    """An operator returns the tensor, by default on stream 0 and without a label."""
    return table.returned(tensor, "aten.mm.default", int(more.get("stream", 0)), place, Label(more.get("label", 0)))


def test_a_storage_lives_to_its_last_reference(mode: FakeTensorMode, log: EventLog, table: StorageTable) -> None:
    """From its first return on; a view is in the same allocation and keeps it alive; 10 floats are 40 bytes."""
    tensor = torch.empty(10)
    view = tensor.view(2, 5)
    assert returned(table, tensor) == returned(table, view) == table.of(view) == 0
    assert table.storages == [Storage(40, 0, Label.NONE, Phase.FORWARD, 2, 7, "aten.mm.default")]
    del tensor
    assert log.events == [Alloc(0)]
    del view
    assert log.events == [Alloc(0), Free(0)]


def test_what_is_not_on_the_device_is_no_allocation(mode: FakeTensorMode, log: EventLog, table: StorageTable) -> None:
    """Real tensors, those of another device and those that no operator returned have none; empty ones take no memory."""
    meta, unknown, nothing = torch.empty(4, device="meta"), torch.empty(4), torch.empty(0)
    assert returned(table, meta) == -1 and table.of(unknown) == -1 and returned(table, 3) == -1  # type: ignore[arg-type]
    assert returned(table, nothing) == table.of(nothing) == -1
    del nothing
    assert log.events == [] and table.storages == []


def test_streams_that_allocate_are_known(mode: FakeTensorMode, table: StorageTable) -> None:
    """Stream 0 always is."""
    assert table.streams == {0}
    kept = torch.empty(1)
    returned(table, kept, stream=3)
    assert table.streams == {0, 3} and table.storages[0].stream == 3


def test_resizing_is_an_end_and_a_begin(mode: FakeTensorMode, log: EventLog, table: StorageTable) -> None:
    """To nothing and back, as FSDP does: two allocations; in the step the second is an unsharded parameter."""
    tensor = torch.empty(10)
    returned(table, tensor)
    storage = tensor.untyped_storage()
    assert table.holds(storage, 40) and not table.holds(storage, 0)
    table.resized(storage, 0, 0, FORWARD)
    assert table.of(tensor) == -1 and table.holds(storage, 0) and not table.holds(storage, 40)
    table.resized(storage, 80, 1, FORWARD)
    table.resized(storage, 8, 0, SETUP)
    assert table.of(tensor) == 2
    assert log.events == [Alloc(0), Free(0), Alloc(1), Free(1), Alloc(2)]
    assert [(s.nbytes, s.stream, s.label, s.op) for s in table.storages[1:]] == [
        (80, 1, Label.UNSHARDED_PARAMETER, "resize_"),
        (8, 0, Label.NONE, "resize_"),
    ]
    assert table.holds(torch.empty(3).untyped_storage(), 99)  # nobody's: to resize it changes nothing


def test_the_first_label_counts(mode: FakeTensorMode, table: StorageTable) -> None:
    """A tensor that is a parameter and later a gradient stays a parameter; trees are opened."""
    a, b = torch.empty(1), torch.empty(2)
    returned(table, a)
    returned(table, b, label=Label.COMMUNICATION)
    table.label([a], Label.PARAMETER)
    table.label({"x": (a, b), "y": None}, Label.GRADIENT)
    assert table.of_all([b, (a, b)]) == (1, 0)
    assert [s.label for s in table.finished()] == [Label.PARAMETER, Label.GRADIENT]
    assert [s.label for s in table.storages] == [Label.NONE, Label.COMMUNICATION]


def test_inputs_are_what_no_model_has_made(mode: FakeTensorMode, table: StorageTable) -> None:
    """What a forward made, or what has a label, is no input of the model that is called with it."""
    tensors = [torch.empty(1) for _ in range(4)]
    places = (SETUP, OperatorPlace(Phase.OTHER, 0, 0), FORWARD, SETUP)
    for tensor, place, label in zip(tensors, places, (0, 0, 0, Label.COMMUNICATION), strict=True):
        returned(table, tensor, place, label=label)
    table.label_inputs(tensors)
    assert [s.label for s in table.finished()] == [Label.INPUT, Label.INPUT, Label.NONE, Label.COMMUNICATION]


def added(
    log: EventLog, table: StorageTable, *, between: bool = False, forgotten: bool = False
) -> tuple[torch.Tensor, weakref.ref[object]]:
    """A sum of two gradients, whose first summand then dies, perhaps after something else has happened."""
    first, second = torch.empty(10), torch.empty(10)
    returned(table, first)
    returned(table, second)
    total = torch.empty(10)
    returned(table, total)
    log.events.append(Op(0, 0, 0, Phase.BACKWARD, 0, (0, 1), (2,)))
    table.expect_addition(first, total)
    if between:
        log.events.append(Op(1, 0, 0, Phase.BACKWARD, 0, (), ()))
    if forgotten:
        table.forget_addition()
    gone = weakref.ref(first)
    del first
    return total, gone


def test_an_addition_of_gradients_in_place(mode: FakeTensorMode, log: EventLog, table: StorageTable) -> None:
    """The sum is in the first summand's memory: no allocation of its own, no end of the summand until the sum dies."""
    log.begin()
    total, gone = added(log, table)
    assert gone() is None and table.of(total) == 0
    assert log.events == [Alloc(0), Alloc(1), Op(0, 0, 0, Phase.BACKWARD, 0, (0, 1), (0,)), Free(1)]
    del total
    assert log.events[-1] == Free(0)


@pytest.mark.parametrize("change", ["between", "forgotten"])
def test_other_additions_make_new_memory(mode: FakeTensorMode, log: EventLog, table: StorageTable, change: str) -> None:
    """If anything happens before the summand dies, or another operator comes, the sum has an allocation of its own."""
    log.begin()
    total, _ = added(log, table, **{change: True})
    assert table.of(total) == 2
    assert log.events[:4] == [Alloc(0), Alloc(1), Alloc(2), Op(0, 0, 0, Phase.BACKWARD, 0, (0, 1), (2,))]
    assert set(log.events[-2:]) == {Free(0), Free(1)}
