"""Kept results that wait in host memory between the forward and the backward of their unit.

Time runs to the right, every row is a stream, and what is copied are the results of unit k that its plan offloads::

    compute         | forward k | forward k+1 |w| ...   | recompute and backward k+1 | recompute k w ...
    device to host              | copies of k |
    host to device                                      | copies of k |

1. When the forward of k has ended, its results are copied to buffers of pinned memory (`Offloader.forward_ended`).
2. When the next unit's forward has ended, the compute stream waits for these copies, and the results are let go (`settle`).
   Then nothing that takes their memory can be earlier than the end of the copies: the caching allocator needs no
   `record_stream`, and memory is the same in every step.
3. When the backward of the next unit begins, new memory is taken and the copies back begin (`backward_begins`); the compute
   stream waits for each where the recomputation asks for it (`Parcel.tensor`).

A result whose backward comes before it has been let go is given as it is. One that is changed in place while it is copied
is computed again, as kept ones are. What is no plain dense tensor, is small, or is communicated, is kept on the device.
On the CPU, whose streams do nothing, the same code copies from memory to memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autosac.plans import SMALLEST_OFFLOAD_BYTES

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class _Link:
    """Between one device and the host: a stream for each direction, and the buffers that nobody uses at present.

    Copies back that were begun before may still read a buffer that is used again: the copy into it waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = torch.get_device_module(device)
        self._out, self._back = self._streams.Stream(device), self._streams.Stream(device)
        self._free: dict[_Layout, list[torch.Tensor]] = {}

    def current(self) -> Any:
        """The stream that the device's work is issued to now."""
        return self._streams.current_stream(self.device)

    @torch.no_grad()
    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to copy to the host: the buffer, and the event of the end."""
        try:
            buffer = self._free[_layout(tensor)].pop()
            self._out.wait_stream(self._back)
        except (KeyError, IndexError):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=self.device.type != "cpu")
        return buffer, self._copy(self._out, buffer, tensor)

    @torch.no_grad()
    def fetch(self, buffer: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to copy to the device: the tensor, in memory of the current stream, and the event of the end."""
        tensor = torch.empty_like(buffer, device=self.device, pin_memory=False)
        arrived = self._copy(self._back, tensor, buffer)
        self.give_back(buffer)
        return tensor, arrived

    def give_back(self, buffer: torch.Tensor) -> None:
        """The buffer may be used again after what has been begun."""
        self._free.setdefault(_layout(buffer), []).append(buffer)

    def _copy(self, stream: Any, into: torch.Tensor, tensor: torch.Tensor) -> Any:
        stream.wait_stream(self.current())
        with self._streams.stream(stream):
            into.copy_(tensor, non_blocking=True)
            return stream.record_event()


class Parcel:
    """One result: on its way to the host, there, or on its way back. `tensor` gives it, once.

    If it is dropped before, whoever takes the memory of a copy under way has to wait for its end.
    """

    def __init__(self, link: _Link, tensor: torch.Tensor) -> None:
        self._link = link
        self._back: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None
        self._source: torch.Tensor | None = tensor
        self._versions = _versions(tensor)
        self._kind: Any = type(tensor)
        self._spec: Any = getattr(tensor, "_spec") if _local(tensor) is not tensor else None  # noqa: B009 # of a DTensor
        self._buffer, self._sent = link.send(_local(tensor))
        self._arrived: Any = None
        self._stream: Any = None

    @property
    def has_left(self) -> bool:
        """Whether the result is no longer where it was on the device."""
        return self._source is None

    @property
    def is_fetched(self) -> bool:
        """Whether a copy back to the device has begun."""
        return self._back is not None

    def is_changed(self) -> bool:
        """Whether the result has been changed in place while it was copied."""
        return self._source is not None and _versions(self._source) != self._versions

    def leave(self) -> None:
        """Wait for the copy, and let go of the result on the device."""
        if self._source is not None:
            self._link.current().wait_event(self._sent)
            self._source = None

    def fetch(self) -> None:
        """Begin to copy it back, unless that has begun or it has never left."""
        if self._source is None and self._back is None and self._buffer is not None:
            self._stream = self._link.current()
            self._back, self._arrived = self._link.fetch(self._buffer)

    def tensor(self) -> torch.Tensor:
        """The result, on the device."""
        self.fetch()
        if self._back is None:
            assert self._source is not None
            return self._source
        current = self._link.current()
        current.wait_event(self._arrived)
        if current == self._stream:
            self._stream = None
        if self._spec is None:
            return self._back
        whole: torch.Tensor = self._kind(self._back, self._spec, requires_grad=False)
        return whole

    def __del__(self) -> None:
        if self._back is not None:
            if self._stream is not None:
                self._stream.wait_event(self._arrived)
        elif self._buffer is not None:
            self._link.give_back(self._buffer)


class Offloadable(Protocol):
    """One execution of a unit (`autosac.integrations.recompute.tape.Tape`). `previous`: the one whose forward ended before."""

    previous: weakref.ref[Any] | None

    def offload(self) -> None:
        """Begin to copy to the host what the plan offloads (`Offloader.send`)."""

    def parcels(self) -> Iterator[Parcel]:
        """What is offloaded and has not been given yet."""

    def forget(self) -> None:
        """What is offloaded was changed while it was copied: it has to be computed again."""


class Offloader:
    """Moves the results of all units of one model. See the module's docstring."""

    def __init__(self) -> None:
        self._links: dict[torch.device, _Link] = {}
        # Weak: when a graph is thrown away, so is what its executions hold.
        self._last: weakref.ref[Any] | None = None

    def send(self, value: Any) -> Any:
        """Begin to copy a tensor to the host: its Parcel. What is small or no plain dense tensor stays as it is."""
        if not isinstance(value, torch.Tensor) or not _is_plain(_local(value)):
            return value
        device = _local(value).device
        link = self._links.get(device)
        if link is None:
            link = self._links.setdefault(device, _Link(device))
        return Parcel(link, value)

    def forward_ended(self, execution: Offloadable) -> None:
        """The forward of a unit has ended: let go of the last one's results, begin to copy its own."""
        self.settle()
        execution.offload()
        execution.previous, self._last = self._last, weakref.ref(execution)

    def settle(self) -> None:
        """Wait for the copies of the last unit's results to the host, and let go of these."""
        last = _alive(self._last)
        if last is None:
            return
        parcels = list(last.parcels())
        if any(parcel.is_changed() for parcel in parcels):
            last.forget()
            return
        for parcel in parcels:
            parcel.leave()

    def backward_begins(self, execution: Offloadable) -> None:
        """The backward of a unit begins: copy back what it has on the host, and what the unit has that comes next."""
        for one in (execution, _alive(execution.previous)):
            if one is not None:
                for parcel in one.parcels():
                    parcel.fetch()


def _alive(reference: weakref.ref[Any] | None) -> Offloadable | None:
    return reference() if reference is not None else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a DTensor; any other tensor itself."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        inside: torch.Tensor = tensor._local_tensor
        return inside
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a copy in memory of its own is the same tensor."""
    return (
        not is_traceable_wrapper_subclass(tensor)
        and tensor.layout is torch.strided
        and tensor.nbytes >= max(1, SMALLEST_OFFLOAD_BYTES)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill a stretch of memory, in any order."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, _local(tensor)._version


def _layout(tensor: torch.Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
