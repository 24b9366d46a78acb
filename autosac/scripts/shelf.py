"""Keys and values that ranks of a script share through their stores (`stores.Shelf`): files in the folder of their messages.

A file holds the rank that has set the key, the length of the key, the key and the value. A rank that runs once more, for a
plan, finds what others have set, and not what it has set itself before.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from pathlib import Path

from autosac.scripts import waits
from autosac.scripts.exchange import POLL_S

_HEAD = struct.Struct("<qq")


class SharedShelf:
    """A rank's view of it. `shown`: the rank that always runs, and that others wait for."""

    def __init__(self, folder: Path, rank: int, shown: int) -> None:
        self._folder = folder
        self._rank = rank
        self._shown = shown
        self._own: set[tuple[str, str]] = set()

    def put(self, store: str, key: str, value: bytes) -> None:
        """A key has this value from now on."""
        self._own.add((store, key))
        self._unfinished(key, value).replace(self._file(store, key))

    def put_first(self, store: str, key: str, value: bytes) -> bool:
        """The same, unless a rank has set it. Whether that was so."""
        file = self._file(store, key)
        if file.exists() and self.find(store, key) is None:
            file.unlink()
        try:
            os.link(self._unfinished(key, value), file)
        except FileExistsError:
            return False
        self._own.add((store, key))
        return True

    def find(self, store: str, key: str, *, own: bool = False) -> bytes | None:
        """Its value; None if no rank has set it. `own`: if this rank has not set it last."""
        found = _contents(self._file(store, key))
        if found is None:
            return None
        rank, _, value = found
        is_own = rank == self._rank
        return value if (is_own and (store, key) in self._own) or not (is_own or own) else None

    def wait(self, store: str, key: str) -> bytes | None:
        """Its value, as soon as another rank sets it; None if all others have ended or wait, too."""
        marker = waits.marker(self._folder, self._rank)
        others = [rank for rank in self._running() if rank != self._rank]
        sender = self._shown if self._shown != self._rank else max(others, default=-1)
        idle_s = 0.0
        tick = threading.Event()
        while (found := self.find(store, key)) is None and idle_s < waits.PATIENCE_S:
            if not marker.exists():
                waits.write(marker, sender, self._file(store, key))
            tick.wait(POLL_S)
            computes = any(
                not waits.marker(self._folder, rank).exists() for rank in self._running() if rank != self._rank
            )
            idle_s = 0.0 if computes else idle_s + POLL_S
        marker.unlink(missing_ok=True)
        return found

    def remove(self, store: str, key: str) -> bool:
        """Whether it was there."""
        was_there = self.find(store, key) is not None
        self._own.discard((store, key))
        self._file(store, key).unlink(missing_ok=True)
        return was_there

    def keys(self, store: str) -> list[str]:
        """All that are there."""
        found = [_contents(file) for file in self._folder.glob(f"key-{_hash(store)}-*")]
        return sorted(each[1] for each in found if each is not None and self.find(store, each[1]) is not None)

    def runs(self, rank: int) -> bool:
        """Whether it has begun and not ended."""
        return rank in self._running()

    def _running(self) -> list[int]:
        """Ranks that have begun and not ended."""
        ranks = [int(path.name.removeprefix("rank-")) for path in self._folder.glob("rank-*")]
        over = ("ended", "put-off")
        return [rank for rank in ranks if not any((self._folder / f"{mark}-{rank}").exists() for mark in over)]

    def _file(self, store: str, key: str) -> Path:
        return self._folder / f"key-{_hash(store)}-{_hash(key)}"

    def _unfinished(self, key: str, value: bytes) -> Path:
        file = self._folder / f"unfinished-key-{self._rank}"
        file.unlink(missing_ok=True)
        name = key.encode()
        file.write_bytes(_HEAD.pack(self._rank, len(name)) + name + value)
        return file


def _contents(file: Path) -> tuple[int, str, bytes] | None:
    """The rank that has set it, the key, its value."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    rank, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    return rank, data[_HEAD.size : end].decode(), data[end:]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
