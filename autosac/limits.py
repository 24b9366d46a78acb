"""Bounds of the whole numbers that people give, on the command line, in files and in the environment."""

from __future__ import annotations

import os
import re

from autosac.errors import UsageError

MOST_GPUS = 2**17
"""The largest world: as large as the largest machines that there are. Its process groups take minutes to build."""
MOST_BUDGETS = 64
MOST_DRAWS = 256
MOST_BATCH = 2**20
MOST_LOSS_CHUNKS = 1024
# What optimizers work on at once where they work in slices: kernels are much longer than their launch, and temporaries small
# beside a GPU's memory.
OPTIMIZER_SLICE_BYTES = 2**28
_WHOLE = re.compile(r"[0-9]{1,18}")


def parse_whole(text: str, least: int, most: int) -> int | None:
    """The whole number, in ASCII digits, if it is within the bounds."""
    value = int(text) if _WHOLE.fullmatch(text) else -1
    return value if least <= value <= most else None


def whole_from_environment(name: str, default: int, least: int, most: int, instead: str = "") -> int:
    """The whole number in an environment variable. UsageError, which tells what to give `instead`, for anything else."""
    text = os.environ.get(name)
    if text is None:
        return default
    value = parse_whole(text, least, most)
    if value is None:
        hint = f"; {instead}" if instead else ""
        raise UsageError(
            f"the environment variable {name} is {text!r}: expected a whole number from {least} to {most}{hint}"
        )
    return value


def world_size_of_environment() -> int:
    """How many GPUs the environment variable NGPU says, as TorchTitan's launcher takes it; 1 if it says nothing."""
    return whole_from_environment("NGPU", 1, 1, MOST_GPUS, "correct it or give --world-size")
