"""What is recorded of streams, waits, random operators, autocast and values, on toy programs derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autosac.capture.device.device import new_stream_number
from autosac.trace import (
    EventRecord,
    EventWait,
    HostWait,
    Label,
    Op,
    RecordStream,
    StreamWait,
)

Capture = Callable[..., Any]
FLOAT = 4  # bytes


# ---- streams and waits ----------------------------------------------------------------------------------------------


def make_streams(device: torch.device) -> Any:
    """A side stream that waits for the compute stream, is waited for by an event, and leaves a tensor to it."""
    module = torch.get_device_module(device)

    def step() -> None:
        a = torch.zeros(16, device=device)
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            b = a + 1
            ready = module.Event()
            ready.record()
        module.current_stream().wait_event(ready)
        b.record_stream(module.current_stream())
        b + a
        ready.synchronize()
        side.synchronize()
        module.synchronize()

    return step


def test_streams_and_events(capture: Capture) -> None:
    """Streams, events and waits of the device's module are recorded where they happen."""
    reading = capture(make_streams)
    on_side, on_compute = reading.operators("add")
    side = on_side.stream
    assert on_compute.stream == 0 < side and len(reading.trace.streams) == side + 1
    record = reading.of(EventRecord)[0]
    assert record == EventRecord(record.event, side)
    assert reading.trace.storages[on_side.outputs[0]].stream == side
    kinds = (Op, StreamWait, EventRecord, EventWait, RecordStream, HostWait)
    assert list(map(repr, reading.of(*kinds)[1:])) == [
        repr(event)
        for event in (  # events of two types may be equal
            StreamWait(side, 0),
            on_side,
            record,
            EventWait(record.event, 0),
            RecordStream(on_side.outputs[0], 0),
            on_compute,
            HostWait(-1, record.event, "event"),
            HostWait(side, -1, "stream"),
            HostWait(-1, -1, "device"),
        )
    ]


def test_numbers_of_streams_begin_with_the_capture(capture: Capture) -> None:
    """Stream 0 is the default stream, also where the process that asks for a capture has taken numbers before."""
    new_stream_number()
    reading = capture(make_streams)
    on_side, on_compute = reading.operators("add")
    assert (on_compute.stream, on_side.stream) == (0, 2)  # the first step's stream was 1


def make_host_waits(device: torch.device) -> Any:
    """Everything that makes the host wait for values, and what does not."""
    host = torch.zeros(4)

    def step() -> None:
        x = host.to(device)  # waits
        host.to(device, non_blocking=True)
        x.to("cpu", non_blocking=True)
        x.cpu()  # waits
        x.copy_(host)  # waits
        x.copy_(host, non_blocking=True)
        x.to(torch.bfloat16)
        x.sum().item()  # waits
        mask = torch.tensor([True, False, True], device=device)  # waits: copied from the host
        mask.nonzero()  # waits
        host.sum().item()

    return step


def test_host_waits(capture: Capture) -> None:
    """Reads and copies that CUDA blocks for make the host wait for the current stream; the others do not."""
    reading = capture(make_host_waits)
    found = [
        (reading.name(before), wait.reason)
        for before, wait in zip(
            [e for e in reading.trace.events if type(e) in (Op, HostWait)],
            [e for e in reading.trace.events if type(e) in (Op, HostWait)][1:],
            strict=False,
        )
        if type(wait) is HostWait
    ]
    assert found == [
        ("_to_copy", "stream"),
        ("_to_copy", "stream"),
        ("copy_", "stream"),
        ("sum", "item"),
        ("_to_copy", "stream"),
        ("nonzero", "item"),
    ]
    assert all(wait.stream == 0 for wait in reading.of(HostWait))


# ---- random operators and attention ---------------------------------------------------------------------------------


def make_random(device: torch.device) -> Any:
    """Dropout, and attention with and without dropout."""
    q = torch.zeros(1, 2, 16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        F.dropout(q, 0.1)
        torch.randn(4, device=device)
        torch.zeros(4, device=device).uniform_()
        for dropout in (0.0, 0.5):
            F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)

    return step


def test_random_operators(capture: Capture) -> None:
    """What draws from the device's generator is marked; attention only with dropout."""
    reading = capture(make_random)
    flagged = [(reading.name(o), reading.signature(o).is_random) for o in reading.operators()]
    attention = "_scaled_dot_product_cudnn_attention"
    assert flagged == [
        ("native_dropout", True),
        ("randn", True),
        ("zeros", False),
        ("uniform_", True),
        (attention, False),
        (attention, True),
    ]
    uniform = reading.operators("uniform_")[0]
    assert reading.signature(uniform).mutates == (0,) and uniform.outputs == uniform.inputs


# ---- autocast -------------------------------------------------------------------------------------------------------


def make_autocast(device: torch.device) -> Any:
    """One layer twice in an autocast region, a norm and a loss in it, and the layer once more in a second region."""
    with device:
        model, x = nn.Linear(8, 8, bias=False), torch.zeros(2, 8)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            y = model(model(x))
            F.layer_norm(y, (8,))
            F.log_softmax(y, -1).sum()
            del y  # the graph needed the cast weight, too
            torch.zeros(3, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            model(x)

    return model, step


def test_autocast(capture: Capture) -> None:
    """The weight is cast once a region and its copy dies with the region; norms and softmax run in float32."""
    reading = capture(make_autocast)
    weight = next(s for s in reading.trace.residents() if reading.trace.storages[s].label is Label.PARAMETER)
    casts = [o for o in reading.operators("_to_copy") if o.inputs == (weight,)]
    first, second = casts
    assert reading.trace.storages[first.outputs[0]].nbytes == 8 * 8 * 2
    users = [o for o in reading.operators("mm") if first.outputs[0] in o.inputs]
    assert len(users) == 2
    release = reading.life(first.outputs[0])[1]
    assert reading.trace.events.index(reading.operators("zeros")[0]) < release < reading.trace.events.index(second)
    for name in ("native_layer_norm", "_log_softmax", "sum"):
        assert {meta.dtype for meta in reading.signature(reading.operators(name)[0]).inputs} == {"float32"}


def test_half_softmax_into_float32_needs_no_copy(capture: Capture) -> None:
    """CUDA's softmax reads a float16 and writes float32 in one kernel; bfloat16 is cast first."""

    def make_step(device: torch.device) -> Any:
        half = torch.zeros(2, 8, device=device, dtype=torch.float16)
        brain = torch.zeros(2, 8, device=device, dtype=torch.bfloat16)

        def step() -> None:
            F.log_softmax(half, -1, dtype=torch.float32)
            F.log_softmax(brain, -1, dtype=torch.float32)

        return step

    reading = capture(make_step)
    assert [reading.name(o) for o in reading.operators()] == ["_log_softmax", "_to_copy", "_log_softmax"]
    assert [meta.dtype for o in reading.operators("_log_softmax") for meta in reading.signature(o).inputs] == [
        "float16",
        "float32",
    ]


# ---- values ---------------------------------------------------------------------------------------------------------


def make_values(device: torch.device) -> Any:
    """Questions about data, whose answers are sizes of tensors (in the order of the test below)."""
    scores = torch.zeros(6, 4, device=device)

    def step() -> None:
        def tell(value: Any) -> None:
            torch.empty(int(value), dtype=torch.uint8, device=device)

        _, experts = scores.topk(2, dim=-1)
        for count in torch.bincount(experts.flatten(), minlength=4).tolist():
            tell(count)
        tell(torch.tensor([3, 4], device=device).sum().item())
        tell((torch.arange(10, device=device) < 7).nonzero().shape[0])
        tell(1 + scores.sum().to(torch.int64).item())
        tell(1 + int((scores > 0).any().item()))
        counts = torch.ones(5, dtype=torch.int64, device=device)
        counts[:2].zero_()
        tell(counts.sum().item())
        counts[3:] += 4
        tell(counts.sum().item())
        counts[0].copy_(scores[0, 0])
        tell(1 + counts.sum().item())

    return step


def test_values(capture: Capture) -> None:
    """Routing is balanced, integers follow from their inputs through views, what is unknown is 1 or False."""
    reading = capture(make_values)
    told = [
        reading.signature(event).outputs[0].shape[0]
        for _, event in reading.trace.operators()
        if reading.name(event) == "empty" and reading.signature(event).outputs[0].dtype == "uint8"
    ]
    balanced, known, unknown = [3, 3, 3, 3], [7, 7], [2, 1]
    assert told == [*balanced, *known, *unknown, 3, 11, 2]


def test_attention_under_autograd(capture: Capture) -> None:
    """Attention's forward and backward are the kernels that CUDA would run; a head of 20 is padded to 24 for flash."""

    def make_step(device: torch.device) -> Any:
        def step() -> None:
            for dtype, head in ((torch.float32, 64), (torch.bfloat16, 20), (torch.float64, 64)):
                q = torch.zeros(1, 2, 16, head, device=device, dtype=dtype, requires_grad=True)
                F.scaled_dot_product_attention(q, q, q).sum().backward()

        return step

    reading = capture(make_step)
    kernels = [reading.name(o) for o in reading.operators() if "scaled_dot" in reading.name(o)]
    assert kernels == [
        f"_scaled_dot_product_{kind}_attention{suffix}"
        for kind in ("efficient", "flash")
        for suffix in ("", "_backward")
    ]
    flash = reading.operators("_scaled_dot_product_flash_attention")[0]
    assert {meta.shape[-1] for meta in reading.signature(flash).inputs} == {24}
    math = [o for o in reading.operators("bmm") if reading.signature(o).outputs[0].dtype == "float64"]
    assert len(math) == 2 + 4  # two products forward, four backward


def test_boolean_masks_become_additive_in_the_dtype_of_the_query(capture: Capture) -> None:
    """The efficient kernel's mask is made in one operator, as large as the mask in the query's dtype."""

    def make_step(device: torch.device) -> Any:
        q = torch.zeros(1, 2, 16, 64, device=device, dtype=torch.bfloat16)
        mask = torch.zeros(16, 16, device=device, dtype=torch.bool)
        return lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    reading = capture(make_step)
    (where,) = reading.operators("where")
    assert reading.trace.storages[where.outputs[0]].nbytes == 16 * 16 * 2
    assert not reading.operators("_to_copy")
