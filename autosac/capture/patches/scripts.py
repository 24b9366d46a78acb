"""What scripts do with simulated tensors besides computing: they print them, hand them to NumPy, and write checkpoints.

Installed for scripts only (`autosac.scripts`).
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from autosac.capture.device import values
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.patches import frameworks
from autosac.capture.patches.after_import import after_import
from autosac.capture.patches.tensors import exchange
from autosac.errors import CaptureError

_LARGE = 2**16  # elements of a parameter that need not be real


def install(mode: SimulatedDeviceMode, note: Callable[[str], None], *, checkpoints: bool = False) -> None:
    """All of it. `note` receives what was assumed or left out, once. `checkpoints`: they are written."""
    _weightless_parameters(mode)
    _readable_tensors()
    _data_of_tensors()
    _tensors_of_tensors()
    _other_fake_modes()
    _checkpoints(note, checkpoints)
    _loading(note)
    _profiler(note)
    _spawned()
    frameworks.install(note)


def _weightless_parameters(mode: SimulatedDeviceMode) -> None:
    """Parameters on the host are simulated, too: a model that is built there, to be moved, may be larger than its memory."""
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if (
            type(data) is torch.Tensor
            and data.device.type == "cpu"
            and data.numel() >= _LARGE
            and data.is_floating_point()
        ):
            data = mode.as_fake(data)
        return original(cls, data, requires_grad)

    parameter: Any = torch.nn.Parameter
    parameter.__new__ = new


def _readable_tensors() -> None:
    """Values as far as they are known, else as the value model assumes them (`values.item`)."""

    def known(tensor: torch.Tensor) -> torch.Tensor:
        found = values.shadow(tensor)
        if found is not None:
            return found.to(tensor.dtype)
        return torch.full(tuple(tensor.shape), values.item(tensor), dtype=tensor.dtype)

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if not force and self.device.type != "cpu":
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        if not force and self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with torch._C._DisableTorchDispatch():
            return known(self).numpy()

    def array(self: torch.Tensor, dtype: Any = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    fake: Any = FakeTensor
    shown: Callable[..., str] = fake.__repr__

    def show(self: torch.Tensor, **kwargs: Any) -> str:
        if self.numel() != 1:
            return shown(self, **kwargs)
        value = self.item()
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        ending = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"tensor({'[' * self.dim()}{text}{']' * self.dim()}{device}{ending})"

    def data_ptr(self: torch.Tensor) -> int:
        # one number for one memory
        return int(self.untyped_storage()._cdata + self.storage_offset() * self.element_size())

    def formatted(self: torch.Tensor, specification: str) -> str:
        if self.dim() or not specification:
            return str(object.__format__(self, specification))
        return format(self.item(), specification)

    fake.__format__ = formatted
    fake.data_ptr = data_ptr
    fake.numpy = numpy
    fake.__array__ = array
    fake.__repr__ = show


def _data_of_tensors() -> None:
    """``parameter.data = parameter.data.cuda()``: a tensor gets data of another device, and stays the object that it is."""
    original: Any = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        plain = type(self) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
        if isinstance(new, FakeTensor) and plain and self.device != new.device:
            made = torch.nn.Parameter(new.detach(), self.requires_grad) if _is_parameter(self) else new.detach()
            exchange(self, made)
        else:
            original.__set__(self, new)

    tensor: Any = torch.Tensor
    tensor.data = property(lambda self: original.__get__(self), set_data)


def _tensors_of_tensors() -> None:
    """``torch.tensor([loss_a, loss_b])`` reads its elements below every mode: they are read here."""
    original = torch.tensor
    _device_constructors()  # kept from now on: under ``with torch.device("cuda")`` it must know the original

    def read(data: Any) -> Any:
        if isinstance(data, FakeTensor):
            return data.item() if data.numel() == 1 else data.tolist()
        if isinstance(data, (list, tuple)) and data and isinstance(data[0], (list, tuple, torch.Tensor)):
            return [read(part) for part in data]
        return data

    @functools.wraps(original)
    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        return original(data if isinstance(data, torch.Tensor) else read(data), **kwargs)

    vars(torch)["tensor"] = tensor


def _other_fake_modes() -> None:
    """Inductor's own, in which it traces its patterns: they move constants to ``cuda`` as where PyTorch has no CUDA.

    They ask ``torch.cuda.is_available``, which says yes here, and would then run CUDA's kernels. Without this the first
    compiled graph of a script is not generated, but interpreted with approximate fusion.
    """
    original: Any = FakeTensorMode.avoid_device_init
    fake_mode: Any = FakeTensorMode
    fake_mode.avoid_device_init = property(
        lambda self: original.fget(self) if isinstance(self, SimulatedDeviceMode) else True
    )


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _checkpoints(note: Callable[[str], None], written: bool) -> None:
    """Simulated tensors have no values: nothing is written, or zeros where a file is asked for.

    What a script loads again, because it has saved it before, is a copy of what it saved.
    """
    unwritten: dict[Any, tuple[Any, Any]] = {}

    def writer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if not written:
                note("checkpoints are not written: simulated tensors have no values (--checkpoints writes zeros)")
                return None
            note("checkpoints hold zeros in place of simulated tensors")
            found = pytree.tree_map(_zeros, (args, kwargs))
            with torch._C._DisableTorchDispatch():
                return original(*found[0], **found[1])

        return save

    write, read = writer(torch.save), torch.load

    @functools.wraps(torch.save)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not written:  # with the file, so that no other one gets the identity of a buffer
            unwritten[_place(f)] = f, pytree.tree_map(_Saved.of, obj)
        return write(obj, f, *args, **kwargs)

    @functools.wraps(read)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = unwritten.get(_place(f))
        if found is None:
            return read(f, map_location, *args, **kwargs)
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        return pytree.tree_map(lambda x: x.loaded(device) if isinstance(x, _Saved) else copy.deepcopy(x), found[1])

    vars(torch)["save"] = torch.serialization.save = save
    vars(torch)["load"] = torch.serialization.load = load

    def replace(*names: str) -> Callable[[Any], None]:
        def act(module: Any) -> None:
            for name in names:
                vars(module)[name] = writer(vars(module)[name])

        return act

    after_import("safetensors.torch", replace("save_file", "save_model"))
    after_import("torch.distributed.checkpoint.state_dict_saver", replace("save", "async_save"))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A simulated tensor that was saved: it takes no memory on the device until it is loaded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any) -> Any:
        """Everything else is itself."""
        if not isinstance(value, FakeTensor):
            return value
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)

    def loaded(self, device: Any) -> torch.Tensor:
        """A new tensor like it, on this device or (None) where it was."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


def _place(file: Any) -> Any:
    """Where a file is: its path, however it is given, or the buffer itself."""
    name = getattr(file, "name", file)
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) else id(file)


def _loading(note: Callable[[str], None]) -> None:
    """Data are loaded for real, in no time."""
    loader: Any = torch.utils.data.DataLoader
    iterate = loader.__iter__

    @functools.wraps(iterate)
    def begin(self: Any) -> Any:
        note("the time of loading data is not simulated")
        return iterate(self)

    loader.__iter__ = begin


def _profiler(note: Callable[[str], None]) -> None:
    """PyTorch's profiler sees the host. For kernels, a build without CUDA would try, and fail, once for each operator."""
    module: Any = torch.autograd.profiler
    profiler = module.profile
    original = profiler.__init__

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_device == "cuda":
            note("the script's profiler sees the host only: --trace FILE writes the simulated kernels")
            self.profiler_kind = module.ProfilerState.KINETO
            self.kineto_activities = {module.ProfilerActivity.CPU}

    profiler.__init__ = begin


def _spawned() -> None:
    """A script that starts one process for each GPU: this one is the process of its own rank, and others are not started."""
    import torch.multiprocessing as multiprocessing

    module: Any = importlib.import_module("torch.multiprocessing.spawn")

    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        given = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if nprocs != given:
            raise CaptureError(
                f"the script starts {nprocs} processes, one for each GPU: say how many with --nproc {nprocs}"
            )
        fn(int(os.environ.get("LOCAL_RANK", "0")), *args)

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        start_processes(fn, args, nprocs)

    vars(module).update(start_processes=start_processes, spawn=spawn)
    vars(multiprocessing).update(start_processes=start_processes, spawn=spawn)


def _zeros(value: Any) -> Any:
    """What stands for a simulated tensor in a file."""
    if not isinstance(value, FakeTensor):
        return value
    with torch._C._DisableTorchDispatch():
        return torch.zeros(tuple(value.shape), dtype=value.dtype)
