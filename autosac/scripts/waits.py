"""Who of a script's ranks waits for whom: a rank writes it into a file (``waits-R``), and the launcher reads it."""

from __future__ import annotations

from pathlib import Path

PATIENCE_S = 2.0  # how long a rank that waits is waited for


def marker(folder: Path, rank: int) -> Path:
    """The file that is there while a rank waits."""
    return folder / f"waits-{rank}"


def write(place: Path, sender: int, path: Path) -> None:
    """Whoever has this marker waits for a rank's file."""
    place.write_text(f"{sender} {path.name}")


def awaited(folder: Path, rank: int) -> int | None:
    """The rank for whose file a rank waits, which is not there yet; None if it does not wait."""
    try:
        sender, name = marker(folder, rank).read_text().split()
    except (OSError, ValueError):
        return None
    return None if (folder / name).exists() else int(sender)
