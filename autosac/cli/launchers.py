"""Programs that start one process for each GPU. ``autosac run`` does that by itself, and gets the script from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_PROGRAMS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate launch",
    "accelerate-launch": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}
_GPUS = re.compile(r"--(?:nproc[_-]per[_-]node|num[_-]processes|num[_-]gpus)")
_NODES = re.compile(r"--(?:nnodes|num[_-]machines|num[_-]nodes)")
_ENVIRONMENT = (
    "; what accelerate reads from its options and its configuration, say in environment variables "
    "(ACCELERATE_MIXED_PRECISION=bf16, ACCELERATE_USE_FSDP=true)"
)


def refusal(launcher: str, arguments: Sequence[str]) -> str:
    """How to run what such a program (a script or a module) would start; empty if it is none."""
    program = _PROGRAMS.get(PurePath(launcher).name, "")
    if not program:
        return ""
    nodes = _number(_NODES, arguments) or 1
    gpus = _number(_GPUS, arguments)
    if gpus and program.startswith("accelerate"):
        gpus = max(1, gpus // nodes)  # it counts those of all machines
    words = ["autosac run", _started(arguments), f"--nproc {gpus or 'N'}", f"--nodes {nodes}" if nodes > 1 else ""]
    environment = _ENVIRONMENT if program.startswith("accelerate") else ""
    command = " ".join(filter(None, words))
    return f"{program} starts a process for each GPU, as autosac run does by itself: {command} ...{environment}"


def _number(option: re.Pattern[str], arguments: Sequence[str]) -> int | None:
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if option.fullmatch(name):
            value = value or (arguments[position + 1] if position + 1 < len(arguments) else "")
            return int(value) if value.isdecimal() else None
    return None


def _started(arguments: Sequence[str]) -> str:
    """The script, or the module, and how `autosac run` is told of it."""
    for position, argument in enumerate(arguments):
        if argument.endswith(".py"):
            return argument
        if argument in ("-m", "--module") and position + 1 < len(arguments):
            return f"-m {arguments[position + 1]}"
    return "SCRIPT"
