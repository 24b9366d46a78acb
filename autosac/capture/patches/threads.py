"""Threads of a script use the simulated GPU as its main thread does: they prefetch batches, or copy checkpoints.

Dispatch modes, and whether autograd uses threads of its own, hold for one thread each.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from autosac.capture.device.mode import SimulatedDeviceMode


def install(mode: SimulatedDeviceMode) -> None:
    """For all threads that start from now on."""
    thread: Any = threading.Thread
    begin = thread._bootstrap_inner

    def begun(self: Any) -> None:
        run = self.run  # a subclass may have its own

        def run_simulated() -> None:
            with mode.on_this_thread(), torch.autograd.set_multithreading_enabled(False):
                run()

        self.run = run_simulated
        begin(self)

    thread._bootstrap_inner = begun
