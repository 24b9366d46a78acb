"""What captures of a server have found out and later ones need not find out again: a capture saves it, the server reads it
before it forks the next one (`recipes`: outputs of operators; `shardings`: DTensor's decisions).

Nothing of it depends on the job: its keys say all that decides. Captures are the same with it and without.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch.distributed as dist

from autosac.capture.device import recipes
from autosac.capture.patches import shardings


def save(path: Path) -> None:
    """Save what this process has found, if it has found anything."""
    found = recipes.known.take(), shardings.decisions.take() if dist.is_available() else []
    if any(found):
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(pickle.dumps(found, protocol=5))
        os.replace(unfinished, path)


def receive(path: Path) -> bool:
    """Take over what another process has saved, and remove the file; whether there was any, and sound."""
    try:
        found, decided = pickle.loads(path.read_bytes())  # noqa: S301 # written by this server's own child
        path.unlink()
    except (OSError, EOFError, pickle.UnpicklingError):
        return False
    recipes.known.receive(found)
    shardings.decisions.receive(decided)
    return True
