"""The dispatch mode under which a job runs: real work on the CPU stays real, work on the target device is faked and recorded.

Two targets: the simulated accelerator (CUDA's kernels are what is dispatched, see kernels.py), and ``"cpu"``, where every
tensor is fake and the CPU's own operator sequence is recorded: the same that a real CPU run executes, which makes the CPU
an independent truth for the simulators.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch._higher_order_ops import wrap
from torch._higher_order_ops.wrap import inductor_compiled_code
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils import _pytree as pytree

from autosac.capture.device import exchanged, shadows, values
from autosac.capture.device.cache import CachedCall, DispatchCache
from autosac.capture.device.composed import COMPOSED, is_composed, made_of_others
from autosac.capture.device.device import CUDA, DEVICE_TYPE, called_cuda
from autosac.capture.device.dynamic import OnHost, dynamic, is_dynamic, largest_sizes
from autosac.capture.device.formulas import Formulas
from autosac.capture.device.operators import per_operator
from autosac.capture.device.refusals import refuse
from autosac.integrations.operators.dispatching import called, skipped_by_dynamo

aten = torch.ops.aten
_FILLS = (aten.normal_.default, aten.uniform_.default)  # with other numbers in every layer of some models
_prim_device = torch.ops.prim.device.default
_item = aten._local_scalar_dense.default
_to_copy = aten._to_copy.default
_empty_like = aten.empty_like.default
_pin_memory = aten._pin_memory.default
_record_stream = aten.record_stream.default
_wait_tensor = getattr(getattr(torch.ops._c10d_functional, "wait_tensor", None), "default", None)
_view = aten.view.default
# Views by their schema, copies where a layout or a type asks for it. Callers below autograd
# (tensor subclasses) hand them over whole.
_MAY_COPY = frozenset(
    (
        *(aten.contiguous.default, aten.flatten.using_ints, aten.ravel.default, aten.reshape.default),
        *(aten.reshape_as.default, aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other),
        aten.type_as.default,
    )
)
_META = torch.device("meta")
# C++'s words, and kind, of error: scripts catch it to use `reshape`.
_NOT_COMPATIBLE = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two contiguous "
    "subspaces). Use .reshape(...) instead."
)


def _all_close(x: torch.Tensor, y: torch.Tensor, *tolerance: Any, **named: Any) -> bool:
    return bool(torch.isclose(x, y, *tolerance, **named).all().item())


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool((x == y).all().item())


# What computes for a question whose answer is on the host.
_ANSWERED: dict[Any, Any] = {aten.allclose.default: _all_close, aten.equal.default: _equal}
_plain_dispatch = torch._C._disabled_torch_dispatch_impl


class OperatorLog(Protocol):
    """Listens to every operator on the device (the recorder)."""

    def operator(
        self, func: Any, args: Any, kwargs: Any, out: Any, entry: CachedCall | None, tensors: list[FakeTensor] | None
    ) -> None: ...
    def wrapped(self) -> None: ...
    def host_reads(self) -> None: ...
    def record_stream(self, tensor: torch.Tensor, stream_id: int) -> None: ...


class SimulatedDeviceMode(FakeTensorMode):
    """See the module's docstring. Entered once, for the whole program."""

    supports_higher_order_operators = True

    def __init__(self, target: str, log: OperatorLog) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # DispatchCache stands before it
        self.target = target
        self.log = log
        self.calls = DispatchCache(self)
        self._formulas = Formulas()
        self._depth = 0
        self._composing = 0  # calls of what CUDA composes of others
        # DualPipeV runs forward and backward in two threads.
        self._lock = threading.RLock()

    @property
    def avoid_device_init(self) -> bool:
        """Never run a device-changing operator for real."""
        return True

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Operators inside are faked but are no work of the device (shape propagation)."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Operators of another thread are simulated, too. FakeTensorMode has one list of its places on all stacks."""
        with self._lock:
            self.__enter__()
        try:
            yield
        finally:
            with self._lock:
                self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _prim_device:  # metadata reaches dispatch modes too: half of all calls
            return args[0].device
        if kwargs and self.target == DEVICE_TYPE and called_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device(DEVICE_TYPE, 0)}
        with self._lock:
            return self._handle(func, types, args, kwargs or {})

    def _handle(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        fake = False
        for kind in types:
            if kind is FakeTensor:
                fake = True
            elif kind.__torch_dispatch__ is not _plain_dispatch:
                if not self._depth:
                    self.log.wrapped()
                self._formulas.taken_apart(func)
                return NotImplemented  # DTensor and other subclasses unwrap themselves first
        if not fake and not self._depth and self._stays_real(func, args, kwargs):
            if kwargs.get("pin_memory") and self.target != CUDA:  # scripts have pinned memory
                kwargs = {**kwargs, "pin_memory": False}
            if _is_c10d(func):
                exchanged.exchange_on_host(func, args)
            return called(func, args, kwargs)
        composes = self._composing or not fake
        if not self._depth and (_is_composite(func) if composes else func in _MAY_COPY):
            with self:  # callers below autograd hand over undecomposed operators
                return func.decompose(*args, **kwargs)
        if not self._depth and _is_composite(func) and (kind_of_device := _outside_of_autograd(args, kwargs)):
            whole = made_of_others(func, kind_of_device)
            if whole is not None:
                with self:
                    return whole(*args, **kwargs)
        return self._fake(self._formulas.in_place(func) or func, types, args, kwargs)

    def _stays_real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is None:  # prims of graphs that Inductor did not generate, and `to` in inference mode
            device = next((a for a in args if isinstance(a, torch.device)), None)
        if self.target == "cpu":
            return (device is not None and torch.device(device).type == "meta") or (
                device is None and any(isinstance(a, torch.Tensor) and a.is_meta for a in args)
            )
        if func is _empty_like and args[0].is_meta and device is not None:
            return False  # materialising a meta model, on the host too (CPU offload)
        return device is None or torch.device(device).type != self.target

    def _fake(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _pin_memory:
            return args[0] if self._depth else args[0].clone()
        if func is _record_stream:
            self.log.record_stream(args[0], args[1].stream_id)
            return None
        if func is _item:
            if args[0].fake_device.type == self.target:
                self.log.host_reads()
            return values.item(args[0])
        if func is _wait_tensor and not self._depth:  # returns its input; its shape function makes a new tensor
            return self._observe(func, args, kwargs, args[0], None, None)
        if func is _to_copy:
            out = self._known_on_host(*args, **kwargs)
            if out is None:
                out = self._copy(*args, **kwargs)
            return out if self._depth else self._observe(func, args, kwargs, out, None, None)
        if func is _empty_like and not isinstance(args[0], FakeTensor):
            return self._materialised(func, args, kwargs)
        if func in _ANSWERED or is_composed(func, args):
            self._composing += 1
            try:
                with self:
                    return (_ANSWERED.get(func) or COMPOSED[func])(*args, **kwargs)
            finally:
                self._composing -= 1
        if is_dynamic(func):
            real = dynamic(func, args, kwargs)
            if real is not None:
                out = self._observe(func, args, kwargs, self._with_shadow(real, args), None, None)
                if not kwargs.get("output_size"):  # the size is read from the device
                    self.log.host_reads()
                return out
        if func in _FILLS and type(args[0]) is FakeTensor and args[0].dtype.is_floating_point:
            return args[0] if self._depth else self._observe(func, args, kwargs, args[0], None, None)
        if not self._depth:
            refuse(func, args, kwargs, self.target != "cpu")
        self._depth += 1
        try:
            out, entry, tensors = self.calls.run(func, types, args, kwargs)
        except DynamicOutputShapeException:
            with largest_sizes(args):
                out, entry, tensors = self.calls.run(func, types, args, kwargs)
            self.log.host_reads()
        except ValueError:
            if func is not _view:
                raise
            raise RuntimeError(_NOT_COMPATIBLE) from None
        finally:
            self._depth -= 1
        if out is NotImplemented or self._depth:
            return out
        return self._observe(func, args, kwargs, out, entry, tensors)

    def _observe(
        self, func: Any, args: Any, kwargs: Any, out: Any, entry: CachedCall | None, tensors: list[FakeTensor] | None
    ) -> Any:
        values.propagate(func, args, kwargs, out)
        self.log.operator(func, args, kwargs, out, entry, tensors)
        return out

    def as_fake(self, x: torch.Tensor) -> FakeTensor:
        """A real tensor's shape in its place, without its memory."""
        return self._copy(x)

    def _known_on_host(self, x: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor | None:
        """A copy from the device to the host is real for scripts, if its values are known: they hand it to code in C."""
        if self.target != CUDA or self._depth or device is None or torch.device(device).type != "cpu":
            return None
        known = shadows.shadow(x)
        return None if known is None else known.to(dtype or x.dtype, copy=True)

    def _copy(
        self,
        x: Any,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> FakeTensor:
        """Casts and copies between host and device; FakeTensorMode would decompose them into four primitives."""
        if x.layout not in (torch.strided, torch.jagged):
            raise NotImplementedError(
                "sparse tensors cannot be simulated: their sizes and times depend on their values"
            )
        with in_kernel_invocation_manager(self):
            meta = torch.empty_like(x, dtype=dtype, device="meta", memory_format=memory_format or torch.preserve_format)
        if device is None:
            device = x.fake_device if isinstance(x, FakeTensor) else x.device
        return FakeTensor(self, meta, torch.device(device))

    def _materialised(self, func: Any, args: Any, kwargs: dict[str, Any]) -> FakeTensor:
        """A real tensor's shape on a device: what FakeTensorMode does, without making the real one fake."""
        device = torch.device(kwargs.get("device") or args[0].device)
        with in_kernel_invocation_manager(self):
            meta = func(*args, **{**kwargs, "device": _META, "pin_memory": None})
        out = FakeTensor(self, meta, device)
        return out if self._depth else self._observe(func, args, kwargs, out, None, None)

    def _with_shadow(self, real: Any, args: Any) -> Any:
        if isinstance(real, OnHost):
            return real.tensor
        if isinstance(real, (tuple, list)):
            return type(real)(self._with_shadow(part, args) for part in real)
        device = next(a.fake_device for a in args if isinstance(a, FakeTensor))
        with in_kernel_invocation_manager(self):
            meta = torch.empty_like(real, device="meta")
        out: Any = FakeTensor(self, meta, device)
        out._shadow = None if real.is_meta else real
        return out

    def _higher_order(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with self:
            if func is inductor_compiled_code:  # capture what is inside of a compiled region
                resolve = getattr(wrap, "_resolve_inductor_callable", None)  # PyTorch 2.11 calls the code itself
                code = args[0] if resolve is None else resolve(args[0]).compiled_callable
                return code(args[1])
            if func is run_and_save_rng_state:  # compiled graphs wrap random operators in these two
                return torch.empty(16, dtype=torch.uint8), args[0](*args[1:], **kwargs)
            if func is run_with_rng_state:
                return args[1](*args[2:], **kwargs)
        out = self.dispatch(func, (FakeTensor,), args, kwargs)
        return out if self._depth else self._observe(func, args, kwargs, out, None, None)


@per_operator
def _is_c10d(func: Any) -> bool:
    return getattr(func, "namespace", "") == "c10d"


def _outside_of_autograd(args: Any, kwargs: Any) -> str:
    """Where an operator runs, if PyTorch leaves out autograd: in inference mode, and of tensors that were made in it."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
    if not torch.is_inference_mode_enabled() and not all(x.is_inference() for x in tensors):
        return ""
    return next((x.fake_device.type for x in tensors if x.fake_device.type != "cpu"), "cpu")


@per_operator
def _is_composite(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func._can_decompose()


skipped_by_dynamo(SimulatedDeviceMode)
