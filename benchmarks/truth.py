"""Where measured figures lie that are no part of this repository: what `--truth` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def truth_folder(kind: str) -> Callable[[str], Path]:
    """What argparse makes of the option: the folder of this kind (`truth`, `traces`) in the given one, else that one."""

    def found(text: str) -> Path:
        inside = Path(text) / kind
        return inside if inside.is_dir() else Path(text)

    return found
