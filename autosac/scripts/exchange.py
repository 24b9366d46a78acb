"""What the ranks of a script tell each other: values of small integer tensors, and which ranks are needed.

Their processes share a folder. A message is a file, named by its group, its sender and its number; shapes, sizes and pickled
objects are such messages. At a barrier ranks that run wait for each other: one may look for files that another one writes
after it. All other tensors have no values, and are not waited for: when ranks meet is the simulator's
business. A rank that sends to another one, or receives from it, needs it: the launcher then starts it (`ranks`).

Files: ``need-R-by-S``: rank S needs rank R. ``waits-R``: R waits; the file names the rank and the file that it waits for.
``ended-R``: R has ended. ``put-off-R``: R was ended, but may yet run: barriers do not wait for it, those who need its messages
do. ``together.json``: the folders of the ranks that are priced together.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from autosac.capture.device import shadows
from autosac.scripts import waits

POLL_S = 0.01
_KNOWN, _UNKNOWN = b"k", b"u"


class Exchange:
    """A rank's end of it (`exchanged.Peers`). `shown`: the rank that always runs; `only`: those that may run, if not all."""

    def __init__(self, folder: Path, rank: int, shown: int, only: Sequence[int] = ()) -> None:
        self._folder = folder
        self._rank = rank
        self._shown = shown
        self._only = frozenset(only)
        self._numbers: dict[str, int] = {}
        self._needed: set[int] = set()
        self._last: dict[tuple[int, torch.dtype], bytes] = {}

    # ---- exchanged.Peers --------------------------------------------------------------------------------------------

    def send(self, group: str, peer: int, known: torch.Tensor | None) -> None:
        """A message to a rank, None if its values are not known."""
        self._need(peer)
        self._post(self._name(f"{group} {self._rank} {peer}"), known)

    def receive(self, group: str, peer: int, dtype: torch.dtype) -> shadows.Later:
        """The next message of a rank. Waits when it is asked for."""
        self._need(peer)
        return self._later(self._name(f"{group} {peer} {self._rank}"), peer, dtype)

    def needs(self, peer: int) -> None:
        """A tensor without values goes to or comes from this rank."""
        self._need(peer)

    def broadcast(self, group: str, root: int, known: torch.Tensor | None, dtype: torch.dtype) -> shadows.Later | None:
        """Sent by `root` to its whole group. None: it is this rank, or taken to be like it, as all are that will not run. The
        shown rank needs it.
        """
        name = self._name(f"{group} {root}")
        if root == self._rank:
            self._post(name, known)
            return None
        if self._never_runs(root):
            return None
        if self._rank == self._shown:
            self._need(root)
        return self._later(name, root, dtype) if self._shown in (root, self._rank) else None

    def barrier(self, group: str, ranks: Sequence[int]) -> None:
        """Wait until all ranks of the group that run have come here, but for those that wait for something else."""
        name = self._name(f"barrier {group} {tuple(ranks)}")
        (self._folder / f"{name}-{self._rank}").touch()
        for rank in ranks:
            if rank != self._rank and (self._folder / f"rank-{rank}").exists():
                self._wait(
                    self._folder / f"{name}-{rank}", rank, patience_s=waits.PATIENCE_S, gone=("ended", "put-off")
                )

    # ---- the step that is kept --------------------------------------------------------------------------------------

    def together(self) -> tuple[Path, ...]:
        """The folders of the other ranks that are priced with this one, when all of them have kept their step, but for those
        that wait for what this one sends them afterwards.
        """
        path = self._folder / "together.json"
        self._wait(path, -1)
        return tuple(Path(name) for name in json.loads(path.read_text())) if path.exists() else ()

    # ---- files ------------------------------------------------------------------------------------------------------

    def _need(self, peer: int) -> None:
        if peer not in self._needed:
            self._needed.add(peer)
            (self._folder / f"need-{peer}-by-{self._rank}").touch()

    def _never_runs(self, rank: int) -> bool:
        return bool(self._only) and rank >= 0 and rank not in self._only

    def _name(self, text: str) -> str:
        """Of the next message between these."""
        number = self._numbers[text] = self._numbers.get(text, -1) + 1
        return f"message-{hashlib.sha256(text.encode()).hexdigest()[:16]}-{number}"

    def _post(self, name: str, known: torch.Tensor | None) -> None:
        data = _UNKNOWN
        if known is not None:
            data = _KNOWN + known.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        unfinished = self._folder / f"unfinished-{self._rank}"
        unfinished.write_bytes(data)
        unfinished.replace(self._folder / name)

    def _later(self, name: str, sender: int, dtype: torch.dtype) -> shadows.Later:
        def take() -> torch.Tensor | None:
            path = self._folder / name
            self._wait(path, sender)
            if path.exists():
                self._last[sender, dtype] = path.read_bytes()
            data = self._last.get((sender, dtype), _UNKNOWN)  # one that has ended would go on as before
            if data[:1] == _UNKNOWN:
                return None
            if not data[1:]:  # frombuffer refuses what is empty
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer(bytearray(data[1:]), dtype=dtype)

        return take

    def _wait(self, path: Path, sender: int, *, patience_s: float = math.inf, gone: Sequence[str] = ("ended",)) -> None:
        """Until the file is there, or its sender has ended, or has itself been waiting for so long. Not with `time.sleep`,
        which adds to simulated time.
        """
        if self._never_runs(sender):
            return
        marker = waits.marker(self._folder, self._rank)
        tick = threading.Event()
        waits_s = 0.0
        while not path.exists() and waits_s < patience_s:
            if any((self._folder / f"{mark}-{sender}").exists() for mark in gone):
                break
            if not marker.exists():
                waits.write(marker, sender, path)
            tick.wait(POLL_S)
            waits_s = waits_s + POLL_S if waits.marker(self._folder, sender).exists() else 0.0
        marker.unlink(missing_ok=True)
