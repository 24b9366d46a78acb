"""What is changed in TorchTitan, torchao and transformers."""

from __future__ import annotations

import contextlib
import functools
import importlib

from autosac.capture.patches.after_import import after_import
from autosac.target import TargetGPU


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
    """Upon its import torchao (0.15) declares its MXFP8 kernels where it finds a Blackwell GPU.

    Its modules import the functions that they ask by name: before they are imported these answer for the simulated GPU.
    """
    with contextlib.suppress(ImportError):  # the job says so itself
        utils = importlib.import_module("torchao.utils")
        for name, capability in (("89", (8, 9)), ("90", (9, 0)), ("100", (10, 0))):
            answer = gpu.compute_capability >= capability
            setattr(utils, f"is_sm_at_least_{name}", functools.partial(bool, answer))
        setattr(utils, "is_cuda_version_at_least", lambda *_: True)  # noqa: B010 # a module of any kind


def install_transformers() -> None:
    """Version 5 of transformers takes fake tensors for a compiler's, and makes masks that it leaves out in a real step."""
    after_import("transformers.utils.import_utils", lambda module: setattr(module, "is_fake_tensor", lambda _: False))
