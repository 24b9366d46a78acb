"""Installing all patches, once a process."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import torch.distributed as dist

from autosac.capture.compiler import partition as compiled
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.patches import communication, cuda_names, ddp, kernels, libraries, speedups, steps, tensors
from autosac.capture.patches.registry import PATCHES, install_all
from autosac.capture.record.recorder import Recorder

# Importing these registers their patches.
assert PATCHES and all((communication, cuda_names, ddp, kernels, steps, tensors))


def import_patched() -> None:
    """Import what `install` will patch: a process that forks captures pays for it once (1.2 of a small capture's 1.6 s)."""
    names = ["torch._dynamo", "torch._dynamo.config", "torch.nn.attention.flex_attention"]
    if dist.is_available():
        names += ["torch.distributed.pipelining._backward", "torch.distributed.tensor", "torch.nn.parallel.distributed"]
    if importlib.util.find_spec("triton") is not None:
        names += ["triton.runtime.autotuner", "triton.runtime.jit"]
    for name in names:
        importlib.import_module(name)


def install(mode: SimulatedDeviceMode, recorder: Recorder) -> None:
    """Patches that every capture needs. CaptureError in one line if this torch lacks what one of them needs."""
    install_all(mode, recorder)
    speedups.install(recorder)
    libraries.install_transformers()
    # Of the hooks that say which module is running: not the job's, and they do not fire for what compile wraps.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
    compiled.install(mode.target)
