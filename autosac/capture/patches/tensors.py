"""Tensors and storages of the simulated device where PyTorch asks for more than the dispatcher shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.patches.registry import Patched, patch
from autosac.integrations.recompute.constructors import prepare
from autosac.integrations.recompute.memories import has_storage, whole_copy


@patch(
    "torch:UntypedStorage.resize_",
)
def storage_resize(capture: Patched) -> None:
    """FSDP2 frees and re-allocates unsharded parameters by resizing their storage, below every dispatch mode."""
    storage: Any = torch.UntypedStorage
    original = storage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        capture.recorder.resized(self, size)
        return result

    storage.resize_ = resize_


@patch(
    "torch:Tensor.__new__",
)
def constructors(_: Patched) -> None:
    """A subclass's inherited constructor that is given sizes fails under modes."""
    prepare()


def exchange(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` without its checks.

    It minds weak references: those to fake tensors are their mode's, which has no more use for them.
    """
    t1.__class__, t2.__class__ = t2.__class__, t1.__class__
    t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
    torch._C._swap_tensor_impl(t1, t2)


@patch(
    "torch.utils:swap_tensors",
    "torch.__future__:set_swap_module_params_on_conversion",
)
def module_conversions(_: Patched) -> None:
    """`Module.to` gives real parameters new data, and they stay the objects that they are; fake ones must be swapped for that.

    A parameter that comes from the CPU to the simulated GPU would be replaced by another object, and tied parameters would
    be two. Where both are fake and on one device, which is swapping for torch 2.13, weak references forbid it: new data do.
    """
    torch.__future__.set_swap_module_params_on_conversion(True)
    import torch.utils as utils
    from torch._subclasses.fake_tensor import FakeTensor

    original: Callable[[torch.Tensor, torch.Tensor], None] = utils.swap_tensors

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if isinstance(t1, FakeTensor) and isinstance(t2, FakeTensor) and t1.device == t2.device:
            t1.data = t2.data
        elif isinstance(t2, FakeTensor):
            exchange(t1, t2)
        else:
            original(t1, t2)

    utils.swap_tensors = swap_tensors


@patch("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.reset_sharded_param", distributed=True)
def replaced_parameters(_: Patched) -> None:
    """FSDP takes up a parameter that another one has replaced since (tied again by an initialisation), unless conversions
    swap: they do here, for another reason (`module_conversions`), so FSDP is not to know.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    kind: Any = _fsdp_param.FSDPParam
    original = kind.reset_sharded_param

    def reset_sharded_param(self: Any) -> None:
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            original(self)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(True)

    kind.reset_sharded_param = reset_sharded_param


@patch(
    "torch._subclasses.fake_tensor:FakeTensor",
)
def deep_copies(_: Patched) -> None:
    """Copies of modules (`nn.Transformer` makes its layers so): a simulated tensor is copied by an operator, as a real one is.

    Python would copy its mode as well, which cannot be copied. As in PyTorch, a parameter is copied by itself and without its
    gradient, any other tensor with its gradient and with all of its memory, which the copies of other views of it share.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    def deep_copy(self: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only tensors that the user made can be copied deeply (leaves of the graph)")
            with torch.no_grad():
                if isinstance(self, torch.nn.Parameter):
                    made: torch.Tensor = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
                else:
                    made = _copy_with_memory(self.detach(), memo.setdefault("torch", {}))
                    made.requires_grad_(self.requires_grad)
                    if self.grad is not None:
                        made.grad = deep_copy(self.grad, memo)
            memo[id(self)] = made
        found: torch.Tensor = memo[id(self)]
        return found

    fake: Any = FakeTensor
    fake.__deepcopy__ = deep_copy


def _copy_with_memory(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """The same look at a copy of the tensor's memory; `copies` has those that were made, by the address of the memory."""
    if not has_storage(tensor) or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    memory = tensor.untyped_storage()._cdata
    if memory not in copies:
        copies[memory] = whole_copy(tensor)
        if copies[memory].shape == tensor.shape:
            return copies[memory]
    flat = copies[memory].view(-1).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).data


@patch(
    "torch._subclasses.fake_tensor:FakeTensor",
)
def recorded_streams(capture: Patched) -> None:
    """FullyShardedDataParallel calls `Tensor.record_stream` below every dispatch mode."""
    from torch._subclasses.fake_tensor import FakeTensor

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        capture.mode.log.record_stream(self, stream.stream_id)

    fake: Any = FakeTensor
    fake.record_stream = record_stream


@patch()
def convolution_layout(capture: Patched) -> None:
    """On CUDA, cuDNN returns channels-last for channels-last (`cudnn_conv_suggest_memory_format`); here is no cuDNN.

    FakeTensorMode asks for the layout of a convolution's outputs and gradients here.
    """
    if capture.mode.target == "cpu" or not hasattr(torch._C, "_conv_determine_backend_memory_format"):
        return
    from torch._prims_common import suggest_memory_format

    def determine(input: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.memory_format:
        wide = torch.float64 in (input.dtype, weight.dtype)
        for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if weight.dim() == dimensions and not wide:
                suggested = suggest_memory_format(input), suggest_memory_format(weight)
                return layout if layout in suggested else torch.contiguous_format
        return torch.contiguous_format

    core: Any = torch._C
    core._conv_determine_backend_memory_format = determine


@patch(
    "torch:UntypedStorage.data_ptr",
    "torch._subclasses.fake_tensor:FakeTensor",
)
def storage_pointers(_: Patched) -> None:
    """Jobs compare storages and tensors by their pointers (torchao's parameters under FSDP2, TorchTitan's DistMuon), or ask
    whether they have memory (FullyShardedDataParallel). Those of fake tensors have none.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    storage: Any = torch.UntypedStorage
    original: Callable[[torch.UntypedStorage], int] = storage.data_ptr

    def data_ptr(self: torch.UntypedStorage) -> int:
        if self.device.type != "meta":
            return original(self)
        return int(self._cdata) if self.nbytes() else 0

    def address(self: torch.Tensor) -> int:
        # one number for one memory
        return int(self.untyped_storage()._cdata + self.storage_offset() * self.element_size())

    storage.data_ptr = data_ptr
    fake: Any = FakeTensor
    fake.data_ptr = address


@patch(
    "torch._subclasses.fake_tensor:FakeTensor.get_nested_int",
    "torch.nested._internal.nested_int:NestedIntNode",
)
def ragged_sizes(_: Patched) -> None:
    """The ragged dimension of a jagged tensor is a symbol for a compiler's fake tensors, and a number in a real step.

    It is that of the offsets, as for real tensors: tensors with the same offsets have the same size.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.nested._internal.nested_int import NestedIntNode

    fake: Any = FakeTensor
    symbolic = fake.get_nested_int
    known: Any = WeakTensorKeyDictionary()
    numbers = itertools.count()

    def get_nested_int(self: Any, *, coeff: Any = 1) -> Any:
        if not isinstance(self.fake_mode, SimulatedDeviceMode):
            return symbolic(self, coeff=coeff)
        found = known.get(self)
        if found is None:
            found = known[self] = torch.SymInt(NestedIntNode(next(numbers), coeff))
        return found

    fake.get_nested_int = get_nested_int
