"""Reads what PyTorch's profiler wrote (`prof.export_chrome_trace`): host events, kernels and the launches between them.

Only what later steps need is kept: operators and a few annotations, launches, kernels, copies and memory sets. Python
frames, memory events and arrows are dropped as they stream by. Names of categories changed over the years; both kinds
are read.

Times are microseconds of the profiler's clock.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autosac.display.printable import printable
from autosac.errors import UsageError
from autosac.files.documents import DocumentError
from autosac.kineto.stream import members

_OPERATOR = ("cpu_op", "operator")
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "set", "memset": "set"}
_LAUNCH = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime", "driver")
_ANNOTATION = ("nccl:", "rccl:", "Optimizer.", "ProfilerStep#")
_MOST_EVENTS = 50_000_000
# What of an operator's notes is kept: the rest (call stacks, module names) would fill the memory.
_KEPT = (
    *("External id", "Input Dims", "Input dims", "Input type", "Input Strides", "Concrete Inputs"),
    *("Sequence number", "Fwd thread id", "Collective name", "In msg nelems", "Out msg nelems", "dtype"),
    *("Group size", "Process Group Ranks"),
)


class HostEvent(NamedTuple):
    """An operator, or an annotation, on a host thread. `args` is what the profiler noted of its inputs."""

    name: str
    thread: int
    begin_us: float
    end_us: float
    args: Mapping[str, Any]


class Launch(NamedTuple):
    """A call of the runtime or the driver."""

    name: str
    thread: int
    begin_us: float


class Kernel(NamedTuple):
    """Work of the device. `kind`: "kernel", "copy" or "set"; `correlation`: of its launch; `external`: its operator; or -1."""

    name: str
    kind: str
    begin_us: float
    us: float
    stream: int
    correlation: int
    external: int
    args: Mapping[str, Any]

    @property
    def end_us(self) -> float:
        """When it ends."""
        return self.begin_us + self.us


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one rank's file holds. `devices`: the properties of its GPUs, `device` the index of the one that was used."""

    path: str
    operators: tuple[HostEvent, ...]
    annotations: tuple[HostEvent, ...]
    launches: Mapping[int, Launch]
    kernels: tuple[Kernel, ...]
    devices: tuple[Mapping[str, Any], ...] = ()
    device: int = 0
    rank: int = 0
    world_size: int = 1
    with_shapes: bool = True
    with_strides: bool = True
    with_stack: bool = False
    damaged: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gpu(self) -> Mapping[str, Any]:
        """The properties of the GPU; empty where the file does not tell."""
        return next((d for d in self.devices if d.get("id") == self.device), self.devices[0] if self.devices else {})


def read_profile(path: str | Path) -> Profile:
    """Read a profiler's trace. UsageError, on one line, if the file cannot be read or is none."""
    found = Collector()
    try:
        for key, value in members(Path(path), "traceEvents"):
            if key == "traceEvents":
                found.add(value)
            else:
                found.header[key] = value
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}") from e
    except DocumentError as e:
        raise UsageError(f"{path} is not a trace of PyTorch's profiler: {printable(str(e))}") from e
    if not found.events:
        raise UsageError(f"{path} is not a trace of PyTorch's profiler: it holds no traceEvents")
    if not found.kernels:
        raise UsageError(f"{path} holds no kernels: was the profiler started with ProfilerActivity.CUDA?")
    return found.finished(str(path))


class Collector:
    """Takes events as they come."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.events = self.damaged = 0
        self.operators: list[HostEvent] = []
        self.annotations: list[HostEvent] = []
        self.launches: dict[int, Launch] = {}
        self.kernels: list[Kernel] = []
        self._threads: dict[tuple[Any, Any], int] = {}
        self._devices: dict[int, float] = {}

    def add(self, event: Any) -> None:
        """Keep an event if it is of use. DocumentError if there are too many."""
        self.events += 1
        if self.events > _MOST_EVENTS:
            raise DocumentError(f"it holds more than {_MOST_EVENTS:,} events")
        if not isinstance(event, dict):
            self.damaged += 1
            return
        if event.get("ph") != "X" or not isinstance(event.get("cat"), str):
            return
        category = event["cat"].lower()
        if category in _OPERATOR or category in _DEVICE or category in _LAUNCH or category == "user_annotation":
            try:
                self._keep(category, event)
            except (KeyError, TypeError, ValueError, OverflowError):
                self.damaged += 1

    def _keep(self, category: str, event: dict[str, Any]) -> None:
        name, begin, us = str(event["name"]), float(event["ts"]), float(event.get("dur", 0.0))
        if not (math.isfinite(begin) and 0 <= us < math.inf):
            raise ValueError("a time is not a number")
        args = event.get("args") or {}
        if not isinstance(args, dict):
            raise TypeError("args is not an object")
        if category in _DEVICE:
            correlation, external = int(args.get("correlation", -1)), int(args.get("External id", -1))
            kept = _kept(args) if "Collective name" in args else {}
            stream = int(args.get("stream", -1))
            self.kernels.append(
                Kernel(sys.intern(name), _DEVICE[category], begin, us, stream, correlation, external, kept)
            )
            device = int(args.get("device", 0))
            self._devices[device] = self._devices.get(device, 0.0) + us
            return
        thread = self._threads.setdefault((event.get("pid"), event.get("tid")), len(self._threads))
        name = sys.intern(name)
        if category in _LAUNCH:
            if "correlation" in args:
                self.launches[int(args["correlation"])] = Launch(name, thread, begin)
        elif category in _OPERATOR:
            self.operators.append(HostEvent(name, thread, begin, begin + us, _kept(args)))
        elif name.startswith(_ANNOTATION):
            self.annotations.append(HostEvent(name, thread, begin, begin + us, _kept(args)))

    def finished(self, path: str) -> Profile:
        header, distributed = self.header, self.header.get("distributedInfo")
        distributed = distributed if isinstance(distributed, dict) else {}
        devices = header.get("deviceProperties")
        used = {k.correlation for k in self.kernels}
        return Profile(
            path=path,
            operators=tuple(self.operators),
            annotations=tuple(self.annotations),
            launches={key: launch for key, launch in self.launches.items() if key in used},
            kernels=tuple(sorted(self.kernels, key=lambda kernel: kernel.begin_us)),
            devices=tuple(d for d in devices if isinstance(d, dict)) if isinstance(devices, list) else (),
            device=max(self._devices, key=lambda device: self._devices[device]),
            rank=_whole(distributed.get("rank"), 0),
            world_size=max(1, _whole(distributed.get("world_size"), 1)),
            with_shapes=any("Input Dims" in op.args for op in self.operators),
            with_strides=any("Input Strides" in op.args for op in self.operators),
            with_stack=bool(header.get("with_stack")),
            damaged=self.damaged,
            info={k: v for k, v in header.items() if isinstance(v, str | int | float)},
        )


def _kept(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: args[name] for name in _KEPT if name in args}


def _whole(value: Any, default: int) -> int:
    return value if type(value) is int and value >= 0 else default
