"""The registry of what is changed in PyTorch while a capture runs.

Each patch names what it replaces or relies on (`targets`) and says why in its docstring. They are installed in the capture
process only, never in a training process. No patch asks for torch's version: each probes for what it needs. Before one is
installed its targets are looked up, so that a torch which has changed them ends in one line and not in a wrong trace.
tests/capture checks that each takes effect, and ``make test-matrix`` does so with every torch of `autosac.torch_version`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.record.recorder import Recorder
from autosac.errors import CaptureError
from autosac.torch_version import tested_range


class Patched(NamedTuple):
    """What patches are installed for: one capture's dispatch mode and recorder."""

    mode: SimulatedDeviceMode
    recorder: Recorder


Install: TypeAlias = Callable[[Patched], None]


@dataclass(frozen=True)
class Patch:
    """One change. `targets`: ``"package.module:attribute.attribute"``; `distributed`: only where torch.distributed is."""

    install: Install
    targets: tuple[str, ...]
    distributed: bool = False

    @property
    def name(self) -> str:
        """Its function's name, in words."""
        return self.install.__name__.strip("_").replace("_", " ")

    @property
    def reason(self) -> str:
        """Why it is needed: the first paragraph of its function's docstring."""
        return " ".join((self.install.__doc__ or "").split("\n\n")[0].split())

    def missing(self) -> str | None:
        """The first target that the installed torch has not."""
        return next((target for target in self.targets if resolve(target) is None), None)


PATCHES: list[Patch] = []


def patch(*targets: str, distributed: bool = False) -> Callable[[Install], Install]:
    """Register a function that changes or needs these targets."""

    def register(install: Install) -> Install:
        PATCHES.append(Patch(install, targets, distributed))
        return install

    return register


def install_all(mode: SimulatedDeviceMode, recorder: Recorder) -> None:
    """Install every registered patch. CaptureError in one line if this torch lacks a target."""
    for each in PATCHES:
        if each.distributed and not dist.is_available():
            continue
        target = each.missing()
        if target is not None:
            raise CaptureError(
                f"torch {torch.__version__} has no {target.replace(':', '.')}, which captures need ({each.name}): "
                f"install torch {tested_range()}"
            )
        each.install(Patched(mode, recorder))


def resolve(target: str) -> Any:
    """What a target names; None if there is nothing."""
    module, _, attributes = target.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        return None
    return value
