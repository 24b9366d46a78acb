"""What captures have found out and later ones need not find out again: the outputs of operators (`device.recipes`) and
DTensor's decisions (`patches.shardings`).

A capture packs what it has found; the process that has forked it, a server or a user's, keeps that and gives it to the
captures that it forks from then on, a user's process to those of the same step. Keys say all that decides, but for the GPU:
processes keep what they know by GPU. A capture's trace is the same with it and without.
"""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import torch.distributed as dist

from autosac.capture.device import recipes
from autosac.capture.patches import shardings
from autosac.files.writing import write_bytes_atomically


def pack() -> bytes:
    """What this process has found since the last time; empty if that is nothing."""
    found = recipes.known.take(), shardings.decisions.take() if dist.is_available() else []
    return pickle.dumps(found, protocol=5) if any(found) else b""


def unpack(packed: bytes) -> None:
    """Use what another process has found. The simulated device has to be there, as it was there."""
    found, decided = pickle.loads(packed)  # a child of this process, or of its parent, has packed it
    recipes.known.receive(found)
    shardings.decisions.receive(decided)


def adopt() -> None:
    """Let the processes that this one forks use what it has found itself."""
    if packed := pack():
        unpack(packed)


def save(path: Path) -> None:
    """Pack into a file, which appears whole; into none if nothing has been found, or it cannot be packed."""
    with contextlib.suppress(Exception):  # then other captures find it out themselves
        if packed := pack():
            write_bytes_atomically(path, packed)


def load(path: Path) -> bytes:
    """What a capture has saved, and remove the file; empty if there is none."""
    try:
        packed = path.read_bytes()
        path.unlink()
    except OSError:
        return b""
    return packed
