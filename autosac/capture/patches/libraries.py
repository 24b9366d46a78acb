"""What is changed in TorchTitan, torchao and transformers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch

from autosac.capture.device.device import CUDA, DEVICE_TYPE
from autosac.capture.patches.after_import import after_import, around_imports
from autosac.target import TargetGPU

_CUTE = "torchao.prototype.moe_training.kernels.mxfp8.cute_utils"
_KERNELS = ("torchao.prototype.mx_formats", "torchao.prototype.moe_training")


def install_torchtitan(gpu: TargetGPU) -> None:
    """TorchTitan asks torch.cuda directly for the capability (float8, grouped mm); models import the function by name.

    So the function's code is replaced, not its name. torchtitan 0.2.2.
    """
    import torchtitan.tools.utils as utils

    utils._autosac_capability = gpu.compute_capability

    def has_cuda_capability(major: int, minor: int) -> bool:
        return bool(_autosac_capability >= (major, minor))  # type: ignore[name-defined] # noqa: F821

    utils.has_cuda_capability.__code__ = has_cuda_capability.__code__


def install_torchao(gpu: TargetGPU) -> None:
    """Upon its import torchao (0.15 to 0.18) declares kernels of MXFP8 and NVFP4 where it finds a Blackwell GPU.

    Its modules import the functions that they ask by name: before they are imported these answer for the simulated GPU.
    """
    after_import("torchao.utils", functools.partial(_answer_for, gpu))
    after_import(_CUTE, _need_no_compiler)
    for package in _KERNELS:
        around_imports(package, functools.partial(found_gpu, gpu))


def _answer_for(gpu: TargetGPU, utils: ModuleType) -> None:
    for name, capability in (("89", (8, 9)), ("90", (9, 0)), ("100", (10, 0))):
        answer = gpu.compute_capability >= capability
        setattr(utils, f"is_sm_at_least_{name}", functools.partial(bool, answer))
    setattr(utils, "is_cuda_version_at_least", lambda *_: True)  # noqa: B010 # a module of any kind


def _need_no_compiler(cute_utils: ModuleType) -> None:
    """Kernels of CuTe are operators with shape functions (torchao 0.18). What compiles them is only asked for."""
    setattr(cute_utils, "_cutedsl_runtime_available", lambda: True)  # noqa: B010 # a module of any kind


@contextlib.contextmanager
def found_gpu(gpu: TargetGPU) -> Iterator[None]:
    """PyTorch, asked for its GPU, has the simulated one and Triton for it (torchao 0.18)."""
    from torch.utils import _triton

    capability = gpu.compute_capability
    with (
        mock.patch.multiple(torch.cuda, is_available=lambda: True, get_device_capability=lambda *_: capability),
        mock.patch.object(_triton, "has_triton", lambda: True),
    ):
        yield


def install_muon() -> None:
    """TorchTitan's DistMuon (0.3) compares the device's name with CUDA's."""
    after_import("torchtitan.distributed.flex_shard.dist_muon", rename_device)


def rename_device(module: ModuleType) -> None:
    """DistMuon's check asks for the simulated device's name."""
    function = module.DistMuon._validate_parameter_storage
    code = function.__code__
    names = tuple(DEVICE_TYPE if constant == CUDA else constant for constant in code.co_consts)
    function.__code__ = code.replace(co_consts=names)


def install_transformers() -> None:
    """Version 5 of transformers takes fake tensors for a compiler's, and makes masks that it leaves out in a real step."""
    after_import("transformers.utils.import_utils", lambda module: setattr(module, "is_fake_tensor", lambda _: False))
