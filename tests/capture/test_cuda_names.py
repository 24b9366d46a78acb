"""A step that says ``cuda`` means the simulated GPU; one that uses no GPU is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.errors import CaptureError
from autosac.trace import Alloc, EmptyCache, HostWait, Op, StreamWait, Trace

WIDTH, ROWS = 8, 4
Loss = Callable[[nn.Module, Tensor], Tensor]


def trace_of(loss: Loss, *, place: Any = None) -> Trace:
    """A training step of one linear layer with this loss, on the given device or on another one."""

    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
        model = nn.Linear(WIDTH, WIDTH).to(place or device)
        optimizer = torch.optim.SGD(model.parameters())
        batch = torch.randn(ROWS, WIDTH, device=place or device)

        def step() -> None:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return capture_eager(make_step, EagerRequest())


def dtypes_of_products(trace: Trace) -> list[str]:
    """Of the results of matrix products, in order."""
    names = ("aten.mm.default", "aten.addmm.default")
    signatures = [trace.signatures[event.signature] for event in trace.events if type(event) is Op]
    return [signature.outputs[0].dtype for signature in signatures if signature.name in names]


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean of the output."""
    return model(batch).float().mean()


def by_amp(model: nn.Module, batch: Tensor) -> Tensor:
    """In bfloat16, by autocast's own name of CUDA."""
    with torch.autocast("cuda", torch.bfloat16):
        return plain(model, batch)


def by_cuda_amp(model: nn.Module, batch: Tensor) -> Tensor:
    """In bfloat16, by torch.cuda's autocast."""
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=torch.bfloat16):
        return plain(model, batch)


def by_default_type(model: nn.Module, batch: Tensor) -> Tensor:
    """In the type that CUDA's autocast takes if none is given."""
    with torch.autocast("cuda"):
        return plain(model, batch)


def in_compiled_code(model: nn.Module, batch: Tensor) -> Tensor:
    """In bfloat16, by an autocast that Dynamo traces."""
    return torch.compile(by_amp, backend="aot_eager")(model, batch)


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (plain, "float32"),
        (by_amp, "bfloat16"),
        (by_cuda_amp, "bfloat16"),
        (by_default_type, "float16"),
        (in_compiled_code, "bfloat16"),
    ],
)
def test_autocast_of_cuda(loss: Loss, dtype: str) -> None:
    """Products of forward and backward (the input needs no gradient) have autocast's type."""
    assert dtypes_of_products(trace_of(loss)) == [dtype, dtype]


def test_code_that_asks_for_autocast() -> None:
    """CUDA's autocast is on inside the region of the simulated GPU's, with its type, and nowhere else."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled()
        with torch.autocast(batch.device.type, torch.bfloat16):
            assert torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled()
            assert torch.is_autocast_enabled()
        assert not torch.is_autocast_enabled()
        return plain(model, batch)

    trace_of(loss)


def test_gradient_scaling() -> None:
    """A GradScaler of CUDA scales the loss and unscales the gradients."""

    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
        model = nn.Linear(WIDTH, WIDTH).to(device)
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler()
        batch = torch.randn(ROWS, WIDTH, device=device)

        def step() -> None:
            scaler.scale(by_amp(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return model, step

    names = {signature.name for signature in capture_eager(make_step, EagerRequest()).signatures}
    assert {"aten._amp_foreach_non_finite_check_and_unscale_.default", "aten._amp_update_scale_.default"} <= names


def moved(model: nn.Module, batch: Tensor) -> Tensor:
    """A batch of the host, moved with its device's name."""
    return plain(model, torch.ones(ROWS, WIDTH).to("cuda:0"))


def moved_as_keyword(model: nn.Module, batch: Tensor) -> Tensor:
    """A batch of the host, moved with its device."""
    return plain(model, torch.ones(ROWS, WIDTH).to(device=torch.device("cuda")))


def moved_by_method(model: nn.Module, batch: Tensor) -> Tensor:
    """A batch of the host, moved with `cuda`."""
    return plain(model, torch.ones(ROWS, WIDTH).cuda(non_blocking=True))


@pytest.mark.parametrize("loss", [moved, moved_as_keyword, moved_by_method])
def test_tensors_that_are_moved(loss: Loss) -> None:
    """A batch from the host takes memory on the simulated GPU, and a copy."""
    trace = trace_of(loss)
    copies = [s for s in trace.signatures if s.inputs and s.inputs[0].place == "cpu" and s.outputs[0].place == "device"]
    assert [copy.outputs[0].shape for copy in copies] == [(ROWS, WIDTH)]


def test_tensors_that_are_made() -> None:
    """A factory with CUDA's name makes a tensor on the simulated GPU, which says that it is on CUDA."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        made = torch.ones(ROWS, WIDTH, device="cuda")
        assert made.is_cuda and made.device == batch.device and not torch.ones(1).is_cuda
        return plain(model, made)

    trace = trace_of(loss)
    assert sum(type(event) is Alloc for event in trace.events) > sum(
        type(event) is Alloc for event in trace_of(plain).events
    )


@pytest.mark.parametrize("device", ["cuda", "cuda:0", None])
def test_generators(device: Any) -> None:
    """A step may have generators of its own on the GPU; what they draw is there. Other generators are what they were."""

    def noisy(model: nn.Module, batch: Tensor) -> Tensor:
        generator = torch.Generator(device=device or batch.device)
        generator.manual_seed(3)
        assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
        noise = torch.randn(batch.shape, device=batch.device, generator=generator)
        assert noise.is_cuda and not isinstance(noise, torch.Generator)
        return model(batch + torch.empty_like(noise).uniform_(generator=generator) + noise).mean()

    names = [call.name for call in trace_of(noisy).signatures]
    assert "aten.randn.generator" in names and "aten.uniform_.default" in names


def test_modules_that_are_moved() -> None:
    """`Module.cuda` and ``Module.to("cuda")`` put parameters on the simulated GPU."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        for other in (nn.Linear(WIDTH, WIDTH).cuda(), nn.Linear(WIDTH, WIDTH).to("cuda")):
            assert {parameter.device for parameter in other.parameters()} == {batch.device}
        return plain(model, batch)

    trace_of(loss)


def test_streams_and_waits() -> None:
    """A stream of `torch.cuda` is one of the simulated GPU's, and `synchronize` makes the host wait."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = plain(model, batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return found

    events = trace_of(loss).events
    waits = [(event.stream, event.other) for event in events if type(event) is StreamWait]
    assert waits == [(2, 0), (0, 2)]  # the first step's stream was 1
    assert {event.stream for event in events if type(event) is Op} == {0, 2}
    assert sum(type(event) is HostWait for event in events) == 1
    assert sum(type(event) is EmptyCache for event in events) == 1


def test_a_step_on_the_host() -> None:
    """A step that uses no GPU is an error, not a step of no time."""
    with pytest.raises(
        CaptureError, match=r"^the step put nothing on the simulated GPU: build model and batch on the dev"
    ):
        trace_of(plain, place="cpu")


def test_a_step_on_two_devices() -> None:
    """Tensors of the host among those of the GPU: one line says where to build them."""
    with pytest.raises(
        CaptureError, match=r"mixes tensors of the host with tensors of the simulated GPU: build all of"
    ):
        trace_of(lambda model, batch: plain(model, batch + torch.ones(ROWS, WIDTH)))
