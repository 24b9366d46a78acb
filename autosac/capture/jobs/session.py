"""One capture in one process: the simulated device, the mode, the recorder and the patches, put together."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

import torch

from autosac.capture.device import device as simulated
from autosac.capture.device import kernels
from autosac.capture.device.device import CUDA, DEVICE_TYPE
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.patches import installing as patches
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.regions import RecomputationPhases
from autosac.integrations.recompute.entries import observer
from autosac.target import TargetGPU

_prepared: list[TargetGPU] = []


def prepare(gpu: TargetGPU, device_type: str = DEVICE_TYPE) -> None:
    """Register the simulated accelerator, if it is not yet. A process can stand for one GPU only."""
    if not _prepared:
        if device_type == CUDA:
            simulated.install_cuda()
        else:
            simulated.hide_cuda()
            simulated.install(gpu)
        kernels.install(gpu, device_type)
        _prepared.append(gpu)
    assert _prepared == [gpu], "one process simulates one kind of GPU"


class CaptureSession:
    """Owns a capture. One per process: the device backend can be registered only once.

    `target` is the simulated accelerator's device type (``"cuda"`` only where `autosac.capture.cuda` has been installed), or
    ``"cpu"``.
    """

    def __init__(
        self,
        gpu: TargetGPU,
        target: str = DEVICE_TYPE,
        before: Callable[[CaptureSession], None] = lambda _: None,
    ) -> None:
        """`before` is called when mode and recorder are made, before the patches are installed (hooks run in order)."""
        self.gpu = gpu
        self.target = target
        if target != "cpu":
            prepare(gpu, target)
        if target != CUDA:
            simulated.hide_cuda()
        if os.environ.get("AUTOSAC_DEBUG") != "1":
            # It logs the traceback of an operator that fails; the capture's error says it in one line.
            logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        self.recorder = Recorder(target)
        self.mode = SimulatedDeviceMode(target, self.recorder)
        before(self)
        patches.install(self.mode, self.recorder)
        observer[0] = RecomputationPhases(self.recorder)  # the program may apply a plan by itself

    @property
    def device(self) -> torch.device:
        """Where the job shall build its tensors."""
        return torch.device(self.target) if self.target == "cpu" else torch.device(self.target, 0)

    @contextlib.contextmanager
    def active(self) -> Iterator[Recorder]:
        """Everything inside runs on the simulated device.

        One autograd thread: a deterministic order, one stack of modes and one current stream, and errors that are not
        swallowed by a device thread.
        """
        simulated.set_log(self.recorder)
        try:
            with self.mode, torch.autograd.set_multithreading_enabled(False):
                yield self.recorder
        finally:
            simulated.set_log(None)
