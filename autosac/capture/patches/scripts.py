"""What scripts do with simulated tensors besides computing: they print them, and hand them to NumPy.

Installed for scripts only (`autosac.scripts`).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.jit._builtins import _register_builtin
from torch.utils._device import _device_constructors

from autosac.capture.device import shadows, values
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.patches import frameworks, lazy, saving, sharded_states, threads
from autosac.capture.patches.after_import import after_import
from autosac.capture.patches.tensors import exchange
from autosac.errors import CaptureError

_LARGE = 2**16  # elements of a parameter that need not be real


def install(
    mode: SimulatedDeviceMode,
    note: Callable[[str], None],
    *,
    checkpoints: bool = False,
    shared: Path | None = None,
) -> None:
    """All of it. `note` receives what was assumed or left out, once. `checkpoints`: they are written. `shared`: a folder in
    which other ranks find what this one has saved.
    """
    _weightless_parameters(mode)
    _readable_tensors()
    _data_of_tensors()
    _tensors_of_tensors()
    _other_fake_modes()
    saving.install(note, checkpoints, shared)
    lazy.install()
    _loading(note)
    _spawned()
    threads.install(mode)
    frameworks.install(note)
    sharded_states.install()


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
        found = shadows.shadow(tensor)
        if found is not None:
            return found.to(tensor.dtype)
        return torch.full(tuple(tensor.shape), values.item(tensor), dtype=tensor.dtype, device="cpu")

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
        own: Any = self
        mode = own.fake_mode
        # PyTorch asks for it within shape functions too, when an overload does not match.
        if self.numel() != 1 or not isinstance(mode, SimulatedDeviceMode) or mode.in_kernel_invocation:
            return shown(self, **kwargs)
        value = self.item()
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        ending = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"tensor({'[' * self.dim()}{text}{']' * self.dim()}{device}{ending})"

    def formatted(self: torch.Tensor, specification: str) -> str:
        if self.dim() or not specification:
            return str(object.__format__(self, specification))
        return format(self.item(), specification)

    fake.__format__ = formatted
    fake.numpy = numpy
    fake.__array__ = array
    fake.__repr__ = show


def _data_of_tensors() -> None:
    """``parameter.data = parameter.data.cuda()``: a tensor gets data of another device, and stays the object that it is."""
    original: Any = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
        if type(self) not in plain or type(new) not in plain or self.device == new.device:
            original.__set__(self, new)
        elif type(self) is FakeTensor:  # it stays the leaf that gradients come to: a graph may know it
            target: Any = self
            data: Any = new if isinstance(new, FakeTensor) else target.fake_mode.as_fake(new)
            original.__set__(self, data)
            target.fake_device = data.fake_device
        elif isinstance(new, FakeTensor):
            made = torch.nn.Parameter(new.detach(), self.requires_grad) if _is_parameter(self) else new.detach()
            own = vars(self)
            exchange(self, made)
            vars(self).update({name: value for name, value in own.items() if name not in vars(self)})
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
    _register_builtin(tensor, "aten::tensor")  # for what torch.jit compiles


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


def _loading(note: Callable[[str], None]) -> None:
    """Data are loaded for real, in no time."""
    loader: Any = torch.utils.data.DataLoader
    iterate = loader.__iter__

    @functools.wraps(iterate)
    def begin(self: Any) -> Any:
        note("the time of loading data is not simulated")
        return iterate(self)

    loader.__iter__ = begin


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

    def launch(self: Any, *args: Any) -> dict[int, Any]:
        if not callable(self._entrypoint):
            raise CaptureError(
                f"the script starts {' '.join(map(str, (self._entrypoint, *args)))} for each GPU: run that script with "
                f"--nproc {self._config.nproc_per_node}"
            )
        results: dict[int, Any] = {}
        start_processes(lambda rank: results.update({rank: self._entrypoint(*args)}), (), self._config.nproc_per_node)
        return results

    after_import(
        "torch.distributed.launcher.api", lambda launcher: setattr(launcher.elastic_launch, "__call__", launch)
    )
    vars(module).update(start_processes=start_processes, spawn=spawn)
    vars(multiprocessing).update(start_processes=start_processes, spawn=spawn)
