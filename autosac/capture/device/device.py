"""The simulated accelerator: a PrivateUse1 backend in Python whose streams, events and memory calls are recorded.

The backend is registered under the name ``simcuda``, because TorchTitan 0.2's selective checkpointing tests
``"cuda" in str(device)``. It must be installed before torchtitan is imported (torchtitan picks its device type then),
and it can be installed once per process: that is why capture runs in a child process.

Built with PyTorch's means for backends in Python (`torch.utils.backend_registration._setup_privateuseone_for_python_backend`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils import backend_registration

from autosac.target import TargetGPU

DEVICE_TYPE = "simcuda"
CUDA = "cuda"  # the simulated accelerator under CUDA's own name, for scripts (autosac.capture.cuda)


def key_of(device_type: str) -> str:
    """The dispatch key, and PyTorch's name, of a simulated device type."""
    return "CUDA" if device_type == CUDA else "PrivateUse1"


def device_type() -> str:
    """What the simulated accelerator is called in this process."""
    return _installed[0] if _installed else DEVICE_TYPE


def called_cuda(device: Any) -> bool:
    """Whether code names CUDA with this device, or text."""
    if isinstance(device, str):
        return device.partition(":")[0] == CUDA
    return isinstance(device, torch.device) and device.type == CUDA


def stand_for(gpu: TargetGPU) -> None:
    """The simulated accelerator stands for this GPU (`stood_for`)."""
    global stood_for
    stood_for = gpu


stood_for = TargetGPU()


class DeviceLog(Protocol):
    """Listens to what the host asks of the device (the recorder)."""

    def event_record(self, event: int, stream: int) -> None: ...
    def event_wait(self, event: int, stream: int) -> None: ...
    def stream_wait(self, stream: int, other: int) -> None: ...
    def host_wait(self, stream: int, event: int, reason: str) -> None: ...
    def emptied_cache(self) -> None: ...
    def launched_at_once(self) -> contextlib.AbstractContextManager[None]: ...


class DeviceClock(Protocol):
    """Who knows when the device comes to an event."""

    def mark(self, stream: int) -> Any: ...
    def elapsed_ms(self, first: Any, second: Any) -> float: ...


class _Stopped:
    def mark(self, stream: int) -> Any:
        return None

    def elapsed_ms(self, first: Any, second: Any) -> float:
        return 0.0


class Silence:
    """A `DeviceLog` that writes nothing down."""

    def event_record(self, event: int, stream: int) -> None:
        pass

    def event_wait(self, event: int, stream: int) -> None:
        pass

    def stream_wait(self, stream: int, other: int) -> None:
        pass

    def host_wait(self, stream: int, event: int, reason: str) -> None:
        pass

    def emptied_cache(self) -> None:
        pass

    def launched_at_once(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _State(threading.local):
    stream: Stream | None = None


log: DeviceLog = Silence()
clock: DeviceClock = _Stopped()
_state = _State()


class Numbers:
    """Numbers that are given out one after the other; `next` comes next."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int = 1) -> int:
        """The first of so many numbers that follow each other."""
        first = self.next
        self.next += count
        return first


event_numbers, _stream_numbers = Numbers(), Numbers()


class StreamPool:
    """PyTorch's streams: so many of each priority, which it shares out in turn (CUDAStream.cpp, kStreamsPerPool).

    Each keeps memory of its own, and a step may use others than the step before.
    """

    SIZE = 32

    def __init__(self) -> None:
        self._numbers: dict[bool, list[int]] = {}
        self._turns: dict[bool, int] = {}

    def take(self, priority: int) -> int:
        """The next stream's number."""
        kind = priority < 0
        turn = self._turns[kind] = self._turns.get(kind, -1) + 1
        numbers = self._numbers.setdefault(kind, [])
        if len(numbers) < self.SIZE:
            numbers.append(_stream_numbers.take())
        return numbers[turn % self.SIZE]


pools = [StreamPool()]  # of this process


def set_log(new: DeviceLog | None) -> None:
    """Send the device's log to `new` from now on; None stops it."""
    global log
    log = new or Silence()


def set_clock(new: DeviceClock) -> None:
    """Ask `new` for the time between events from now on."""
    global clock
    clock = new


def new_stream_number() -> int:
    """The number of a stream that nobody has: it stands for memory of its own."""
    return _stream_numbers.take()


class Stream(torch.Stream):
    """The part of torch.cuda.Stream that PyTorch's and TorchTitan's code use. A torch.Stream, as record_stream wants it.

    Without a priority it is none of PyTorch's pool.
    """

    def __new__(cls, device: Any = None, priority: int | None = 0, **_: Any) -> Stream:
        kind: Any = getattr(torch._C._autograd.DeviceType, key_of(device_type()))
        number = _stream_numbers.take() if priority is None else pools[0].take(priority)
        stream: Stream = super().__new__(cls, stream_id=number, device_index=0, device_type=int(kind))
        stream.priority = priority or 0
        _streams[stream.stream_id] = stream
        return stream

    priority: int

    def __init__(self, *_: Any, **__: Any) -> None:
        self._previous: Stream | None = None

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority of a GPU's streams."""
        return 0, -5

    @property
    def cuda_stream(self) -> int:
        """What kernels of other libraries get: 0 is the default stream."""
        return int(self.stream_id)

    def wait_stream(self, other: torch.Stream) -> None:
        log.stream_wait(self.stream_id, other.stream_id)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        log.host_wait(self.stream_id, -1, "stream")

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._previous = current_stream()
        _state.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        assert self._previous is not None
        _state.stream = self._previous

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def __repr__(self) -> str:
        return f"<simulated stream {self.stream_id}>"


_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


def external_stream(pointer: int, device: Any = None) -> Stream:
    """The stream whose `cuda_stream` this is, or a new one for a stream that another library has made."""
    known = _streams.get(pointer) or _external.get(pointer)
    if known is None:
        known = _external[pointer] = Stream(device, None)
    return known


_external: dict[int, Stream] = {}


class Event:
    """The part of torch.cuda.Event that PyTorch's and TorchTitan's code use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.event_id = event_numbers.take()
        self._mark: Any = None

    def record(self, stream: Stream | None = None) -> None:
        number = (stream or current_stream()).stream_id
        log.event_record(self.event_id, number)
        self._mark = clock.mark(number)

    def wait(self, stream: Stream | None = None) -> None:
        log.event_wait(self.event_id, (stream or current_stream()).stream_id)

    def synchronize(self) -> None:
        log.host_wait(-1, self.event_id, "event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return clock.elapsed_ms(self._mark, other._mark)


Pool: TypeAlias = tuple[int, int]  # the handle of a CUDA graph's memory
_installed: list[str] = []  # the device type that this process simulates
_default: list[Stream] = []


def default_stream(device: Any = None) -> Stream:
    """The device's default stream, with the number 0."""
    if not _default:
        _default.append(Stream(priority=None))
    return _default[0]


def current_stream(device: Any = None) -> Stream:
    """The stream of this thread."""
    return _state.stream or default_stream()


def set_stream(stream: Any) -> None:
    """Make it the stream of this thread."""
    _state.stream = stream


class SimulatedDeviceModule(backend_registration._DummyBackendModule):
    """What `torch.get_device_module("simcuda")` returns. Memory queries answer zero: memory is simulated afterwards."""

    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)

    def __init__(self, gpu: TargetGPU) -> None:
        self.gpu = gpu

    default_stream = staticmethod(default_stream)
    set_stream = staticmethod(set_stream)

    def stream(self, stream: Any) -> Any:
        return stream if stream is not None else contextlib.nullcontext()

    def set_device(self, _: Any) -> None:
        pass

    @contextlib.contextmanager
    def device(self, _: Any) -> Iterator[None]:
        yield

    def synchronize(self, _: Any = None) -> None:
        log.host_wait(-1, -1, "device")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self.gpu.has_bfloat16

    # A generator state is opaque to its users; random operators draw nothing here.
    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None:
        pass

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, _: Any) -> None:
        pass

    def manual_seed(self, _: int) -> None:
        pass

    def seed(self) -> None:
        pass

    def initial_seed(self) -> int:
        return 0

    def _lazy_call(self, _: Any) -> None:
        pass

    def _is_compiled(self) -> bool:
        return True

    def get_device_properties(self, _: Any = None) -> SimpleNamespace:
        return SimpleNamespace(**self.gpu.properties())

    def get_device_name(self, _: Any = None) -> str:
        return self.gpu.name

    def get_device_capability(self, _: Any = None) -> tuple[int, int]:
        return self.gpu.compute_capability

    def mem_get_info(self, _: Any = None) -> tuple[int, int]:
        return self.gpu.memory_bytes, self.gpu.memory_bytes

    def memory_stats(self, _: Any = None) -> dict[str, int]:
        return {}

    def memory_allocated(self, _: Any = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, _: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        log.emptied_cache()

    def ipc_collect(self) -> None:
        pass


class _DeviceGuard(backend_registration._DummyDeviceGuard):
    """Asked for its type, too, where autograd's stream guards end because a Python hook or operator has raised an error.

    A call of Python while an error is pending ends the process. So the error is taken here; `take_lost_error` gives it back
    when the engine has ended.
    """

    def type_(self) -> Any:
        try:
            _raise_pending_error()
        except BaseException as error:
            _lost_errors.append(error)
        return torch._C._autograd.DeviceType.PrivateUse1


_lost_errors: list[BaseException] = []
_raise_pending_error = ctypes.pythonapi.PyErr_Occurred  # ctypes raises an error that is set after a call
_raise_pending_error.restype = ctypes.c_void_p


def take_lost_error() -> BaseException | None:
    """The first error that a stream guard has taken from the autograd engine, if any; it is forgotten with this call."""
    first = _lost_errors[0] if _lost_errors else None
    _lost_errors.clear()
    return first


def hide_cuda() -> None:
    """A GPU that is there stays untouched: in this process there is no CUDA from now on, as on a laptop."""

    def refuse() -> None:
        raise RuntimeError("the job uses CUDA directly, but a capture has only the simulated GPU")

    torch.cuda._lazy_init = refuse
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def install(gpu: TargetGPU) -> SimulatedDeviceModule:
    """Register the simulated accelerator with PyTorch. Once per process."""
    _installed.append(DEVICE_TYPE)
    module = SimulatedDeviceModule(gpu)
    backend_registration._setup_privateuseone_for_python_backend(
        DEVICE_TYPE, backend_module=module, device_guard=_DeviceGuard()
    )
    # C++ would answer with a stream of a device that is not there; TorchTitan's DualPipeV asks it.
    torch.accelerator.current_stream = current_stream
    _lift_on_cpu()
    return module


def install_cuda() -> None:
    """The simulated accelerator is called ``cuda`` in this process (autosac.capture.cuda has made it one)."""
    _installed.append(CUDA)
    _lift_on_cpu()


def _lift_on_cpu() -> None:
    """torch.tensor(..., device=simulated) must be made on the CPU and copied, so that the dispatch mode sees it."""
    torch._C._set_only_lift_cpu_tensors(True)
    _stream_numbers.next = 0  # whatever a process took before it had a device
    pools[0] = StreamPool()
    default_stream()
