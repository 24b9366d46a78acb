"""What `torch.cuda` asks of C++, answered for the simulated GPU.

A build of PyTorch without CUDA has all of `torch.cuda`'s Python, and none of the functions in ``torch._C`` that it calls. They
are put there just before ``torch.cuda`` is imported (`announce`), so that PyTorch's own code runs as on a machine with GPUs;
in a build with CUDA they take the place of the real ones, and the GPUs that are there stay untouched. Streams and events are
those of the simulated accelerator, whose log is the recorder. For torch 2.11 to 2.13.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

from autosac.capture.cuda import shim, surface
from autosac.target import TargetGPU

CUDA_VERSION = "13.0"  # of PyTorch's wheels on PyPI, from 2.11 on
_NCCL_VERSION = (2 << 32) + (28 << 16) + 9  # theirs
_NVTX = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd")
_COUNTERS = ("all", "large_pool", "small_pool")
_STATISTICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


class Count(NamedTuple):
    """What there is of something, was at the most, and has been added in all."""

    present: int = 0
    peak: int = 0
    added: int = 0

    def changed(self, by: int) -> Count:
        """So much has come, or (less than 0) has gone."""
        present = self.present + by
        return Count(present, max(self.peak, present), self.added + max(0, by))

    def reset(self) -> Count:
        """The peak begins anew."""
        return self._replace(peak=self.present)


class DeviceMemory(Protocol):
    """Who knows the memory of the simulated device."""

    def statistics(self) -> Mapping[str, Mapping[str, Count]]:
        """Of everything that `torch.cuda.memory_stats` counts, by its name and pool; what is not counted is missing."""

    def segments(self) -> list[dict[str, Any]]:
        """As `torch.cuda.memory_snapshot` lists them."""

    def retries(self) -> int:
        """How often the allocator has released its cache to serve a request."""

    def free_bytes(self) -> int:
        """What the device has left."""

    def reset_peaks(self) -> None:
        """Peaks begin anew at the present values."""


class _NoMemory:
    """Before the first allocation."""

    def statistics(self) -> Mapping[str, Mapping[str, Count]]:
        return {}

    def segments(self) -> list[dict[str, Any]]:
        return []

    def retries(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 0

    def reset_peaks(self) -> None:
        pass


memory: list[DeviceMemory] = [_NoMemory()]


def answer_from(counters: DeviceMemory) -> None:
    """Memory queries are answered from these counters from now on."""
    memory[0] = counters


def announce(gpu: TargetGPU, device_count: int) -> None:
    """Put the functions into torch._C as soon as torch.cuda is about to be imported."""
    sys.meta_path.insert(0, _BeforeImport("torch.cuda", lambda: _install(gpu, device_count)))


class _BeforeImport(importlib.abc.MetaPathFinder):
    """Calls `action` once, before a module is imported; it finds nothing itself."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """None. See the class."""
        if name == self._name:
            sys.meta_path.remove(self)
            self._action()


def _install(gpu: TargetGPU, device_count: int) -> None:
    import torch._C as C

    for name, function in _functions(gpu, device_count).items():
        setattr(C, name, function)
    C._has_cuda = True


def cuda_version() -> str:
    """Of this build of PyTorch, which torchvision compares with its own; of the usual wheels if the build has none."""
    from torch import version

    return version.cuda or CUDA_VERSION


def compiled_version() -> int:
    """The same as CUDA's own number: 13000 of 13.0."""
    major, minor = cuda_version().split(".")[:2]
    return 1000 * int(major) + 10 * int(minor)


def _functions(gpu: TargetGPU, device_count: int) -> dict[str, Any]:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    def zero(*_: Any, **__: Any) -> int:
        return 0

    return {
        "_cuda_init": lambda: _initialise(gpu, device_count),
        "_cuda_getDeviceCount": lambda: device_count,
        "_cuda_getDevice": shim.current_device,
        "_cuda_setDevice": lambda index: _choose(index, device_count),
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": lambda index: _exchange(index),
        "_cuda_canDeviceAccessPeer": lambda *_: True,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getArchFlags": lambda: "sm_{}{}".format(*gpu.compute_capability),
        "_cuda_getCompiledVersion": compiled_version,
        "_cuda_hasMagma": False,
        "_cuda_synchronize": _synchronise,
        "_cuda_ipc_collect": nothing,
        "_cuda_sleep": nothing,
        "_cuda_set_sync_debug_mode": nothing,
        "_cuda_get_sync_debug_mode": zero,
        "_cuda_getCurrentBlasHandle": zero,
        "_cuda_getCurrentRawStream": zero,
        "_cuda_memoryStats": lambda _: _memory_statistics(),
        "_cuda_resetPeakMemoryStats": lambda _: memory[0].reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": nothing,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": nothing,
        "_cuda_resetAccumulatedHostMemoryStats": nothing,
        "_cuda_emptyCache": _empty_cache,
        "_host_emptyCache": nothing,
        "_cuda_setMemoryFraction": nothing,
        "_cuda_getMemoryFraction": lambda _: 1.0,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_record_memory_history": nothing,
        "_cuda_record_memory_history_legacy": nothing,
        "_cuda_memorySnapshot": lambda *_: {
            "segments": memory[0].segments(),
            "device_traces": [[]],
            "allocator_settings": {},
        },
        "_cuda_clearCublasWorkspaces": nothing,
        "_scatter": _scatter,
        "_broadcast_coalesced": _broadcast,
        "_nccl_version": lambda: _NCCL_VERSION,
        "_nccl_version_suffix": lambda: b"",
        "_cuda_cudaCachingAllocator_enable": nothing,
        "_cuda_getCurrentSolverHandle": zero,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": _empty_cache,
        "_accelerator_emptyHostCache": nothing,
        "_accelerator_getDeviceStats": lambda _: _memory_statistics(),
        "_accelerator_resetAccumulatedStats": nothing,
        "_accelerator_resetPeakStats": lambda _: memory[0].reset_peaks(),
        "_accelerator_getMemoryInfo": lambda _: (memory[0].free_bytes(), gpu.memory_bytes),
        **surface.tuning(),
    }


def _exchange(index: int) -> int:
    before = shim.current_device()
    if index >= 0:
        shim.set_device(index)
    return before


def _initialise(gpu: TargetGPU, device_count: int) -> None:
    """What C++ puts into torch.cuda when CUDA is initialised."""
    import torch

    cuda: Any = torch.cuda
    cuda.default_generators = tuple(torch.Generator(device=f"cuda:{i}") for i in range(device_count))
    cuda._get_device_properties = lambda _: properties(gpu)


def _choose(index: int, device_count: int) -> None:
    import torch

    if index >= device_count:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    torch.cuda.init()  # until then fake tensors take "cuda" for its first device
    shim.set_device(index)


def _scatter(tensor: Any, devices: Sequence[int], *_: Any) -> tuple[Any, ...]:
    """What DataParallel does with a batch: one GPU gets all of it."""
    return (tensor.to(f"cuda:{_single(devices)}"),)


def _broadcast(tensors: Sequence[Any], devices: Sequence[int], *_: Any) -> list[Any]:
    """DataParallel's copies of parameters: one GPU has them."""
    _single(devices)
    return [list(tensors)]


def _single(devices: Sequence[int]) -> int:
    if len(devices) > 1:
        raise NotImplementedError(
            "DataParallel over several GPUs of one process is not simulated: train with DistributedDataParallel, or run the "
            "script with --nproc 1"
        )
    return devices[0]


def _empty_cache() -> None:
    from autosac.capture.device import device

    device.log.emptied_cache()


def _synchronise() -> None:
    from autosac.capture.device import device

    device.log.host_wait(-1, -1, "device")


def _memory_statistics() -> dict[str, Any]:
    """As C++ returns them. Only what the simulated allocator counts is not 0."""
    known = memory[0].statistics()
    found: dict[str, Any] = {}
    for name in _STATISTICS:
        counts = known.get(name, {})
        for pool in _COUNTERS:
            count = counts.get(pool, Count())
            found.setdefault(name, {})[pool] = {
                "current": count.present,
                "peak": count.peak,
                "allocated": count.added,
                "freed": count.added - count.present,
            }
    for name in ("oversize_allocations", "oversize_segments"):
        found[name] = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    found |= {"num_alloc_retries": memory[0].retries(), "num_ooms": 0, "num_sync_all_streams": 0, "max_split_size": -1}
    return found | {"num_device_alloc": 0, "num_device_free": 0}


def properties(gpu: TargetGPU) -> SimpleNamespace:
    """`torch.cuda.get_device_properties`."""
    return SimpleNamespace(
        **gpu.properties(),
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def finish(gpu: TargetGPU) -> None:
    """What is left to do when torch has been imported: streams, events, and what is asked without C++."""
    import torch
    import torch.backends.cudnn as cudnn
    from torch.cuda import memory as cuda_memory

    from autosac.capture.cuda import typed
    from autosac.capture.device import device as simulated

    torch.version.cuda = cuda_version()
    vars(torch.cuda.nvtx)["_nvtx"] = SimpleNamespace(**dict.fromkeys(_NVTX, lambda *_: 0))
    cuda: Any = torch.cuda
    streams: Any = importlib.import_module("torch.cuda.streams")
    cuda._cudart = surface.runtime(lambda: memory[0].free_bytes(), gpu.memory_bytes)
    surface.monitors(cuda, lambda: memory[0].free_bytes(), gpu.memory_bytes)
    surface.attention_queries(gpu)
    surface.nccl()
    typed.install()
    cuda.Stream = streams.Stream = simulated.Stream
    cuda.ExternalStream = streams.ExternalStream = simulated.external_stream
    cuda.get_stream_from_external = simulated.external_stream
    cuda.Event = streams.Event = simulated.Event
    cuda.current_stream, cuda.default_stream = simulated.current_stream, simulated.default_stream
    cuda.set_stream = simulated.set_stream
    cuda.stream = cuda.StreamContext = _StreamContext
    cuda._lazy_new = None
    cuda._check_capability = cuda._check_cubins = lambda: None
    mem_get_info: Any = lambda _=None: (memory[0].free_bytes(), gpu.memory_bytes)  # noqa: E731
    cuda_memory.mem_get_info = cuda.mem_get_info = mem_get_info
    _graphs(cuda)
    torch.compiler.cudagraph_mark_step_begin = lambda: None
    cudnn.version = lambda: 91900
    cudnn.is_available = lambda: True
    cudnn.is_acceptable = lambda tensor: cudnn.enabled and tensor.is_cuda and tensor.dtype in cudnn.CUDNN_TENSOR_DTYPES
    torch.accelerator.current_stream = _current_stream  # Dynamo wants functions of its own here
    torch.accelerator.set_stream = lambda stream: simulated.set_stream(stream)
    torch.accelerator.synchronize = lambda _=None: _synchronise()


def _graphs(cuda: Any) -> None:
    """CUDA graphs and pools of memory. PyTorch's module has taken C++'s functions by name."""
    from torch.cuda import graphs as torch_graphs

    from autosac.capture.cuda import graphs

    torch_graphs.is_current_stream_capturing = cuda.is_current_stream_capturing = graphs.is_capturing
    names: dict[str, Any] = vars(torch_graphs)
    names["_cuda_isCurrentStreamCapturing"], names["_graph_pool_handle"] = graphs.is_capturing, graphs.new_pool
    cuda.CUDAGraph = names["CUDAGraph"] = graphs.CUDAGraph
    cuda.MemPool, cuda.use_mem_pool = graphs.MemPool, graphs.use_mem_pool


def _current_stream(_: Any = None) -> Any:
    from autosac.capture.device import device as simulated

    return simulated.current_stream()


class _StreamContext:
    """`torch.cuda.stream`. The default stream is left alone by None."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)
