"""Key-value stores of `torch.distributed` in scripts. Ranks that run share them; all others are taken to be like these.

A rank that adds to a counter adds for all ranks: ``store.add("arrived", 1) == world_size`` holds at once, and who takes
numbers from a counter takes every n-th of n ranks. A key that no rank sets has the value of one that this rank has set, if
they only differ in the rank's number: after ``store.set("host/0", ...)`` there is ``host/3`` as well. Of a rank that runs its
own value is waited for: which of two it is must not hang on who is faster.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed

dist: Any = torch.distributed
_NUMBER = re.compile(r"\d+")
_PORT = 29500
_stores: list[ScriptStore] = []  # PyTorch keeps them without what Python knows of them


class Shelf(Protocol):
    """Where the ranks that run keep keys and their values."""

    def put(self, store: str, key: str, value: bytes) -> None:
        """A key has this value from now on."""

    def put_first(self, store: str, key: str, value: bytes) -> bool:
        """The same, unless a rank has set it. Whether that was so."""

    def find(self, store: str, key: str, *, own: bool = False) -> bytes | None:
        """Its value; None if no rank has set it. `own`: if this rank has not set it last."""

    def wait(self, store: str, key: str) -> bytes | None:
        """Its value, as soon as another rank sets it; None if none will."""

    def remove(self, store: str, key: str) -> bool:
        """Whether it was there."""

    def keys(self, store: str) -> list[str]:
        """All that are there."""

    def runs(self, rank: int) -> bool:
        """Whether it has begun and not ended."""


class ScriptStore(dist.Store):  # type: ignore[misc]
    """Those keys on a shelf that begin so."""

    def __init__(self, shelf: Shelf, name: str, begin: str, rank: int, world_size: int) -> None:
        super().__init__()
        self._shelf, self._name, self._begin = shelf, name, begin
        self._rank, self._world_size = rank, world_size
        self._added: dict[str, int] = {}
        self._patience = timedelta(minutes=5)  # as torch's message says; nobody waits for ranks that do not run
        _stores.append(self)

    def prefixed(self, prefix: str) -> ScriptStore:
        """What `PrefixStore` makes of it."""
        return ScriptStore(self._shelf, self._name, f"{self._begin}{prefix}/", self._rank, self._world_size)

    # ---- as torch's --------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """It has this value from now on."""
        self._added.pop(key, None)
        self._shelf.put(self._name, self._begin + key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Its value. Waits until it has one. DistStoreError: it gets none."""
        found = self._shelf.find(self._name, self._begin + key)
        rank, same = self._of_rank(key) if found is None else (-1, None)
        if found is None and (same is None or self._shelf.runs(rank)):
            found = self._shelf.wait(self._name, self._begin + key)
        found = same if found is None else found
        if found is None:
            milliseconds = 1000 * self._patience.total_seconds()
            raise dist.DistStoreError(
                f"wait timeout after {milliseconds:.0f}ms, keys: /{key} (no rank that autosac ran sets it)"
            )
        return found

    def add(self, key: str, amount: int) -> int:
        """All ranks add so much; the sum."""
        if not amount:
            return int(self._found(key) or 0)
        if key not in self._added:
            self._added[key] = int(self._shelf.find(self._name, self._begin + key, own=True) or 0)
        self._added[key] += amount * self._world_size
        self._shelf.put(self._name, self._begin + key, str(self._added[key]).encode())
        return self._added[key]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set it if it has the expected value, or if none is there and none is expected. What is there afterwards."""
        if not expected and self._shelf.put_first(self._name, self._begin + key, _bytes(desired)):
            return _bytes(desired)
        found = self._found(key)
        if found == _bytes(expected):
            self.set(key, desired)
            return _bytes(desired)
        return _bytes(expected) if found is None else found

    def append(self, key: str, value: str | bytes) -> None:
        """To what is there."""
        self.set(key, (self._found(key) or b"") + _bytes(value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there."""
        self.multi_get(keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return all(self._found(key) is not None for key in keys)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        self._added.pop(key, None)
        return self._shelf.remove(self._name, self._begin + key)

    def num_keys(self) -> int:
        """How many are there."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Those that are there."""
        begin = self._begin
        return [key.removeprefix(begin) for key in self._shelf.keys(self._name) if key.startswith(begin)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all of them."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all of them."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """It has `append`, `multi_get` and `multi_set`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long torch's would wait."""
        self._patience = timeout

    @property
    def timeout(self) -> timedelta:
        """The same."""
        return self._patience

    def clone(self) -> ScriptStore:
        """The same store."""
        return self

    def _found(self, key: str) -> bytes | None:
        """What is there, or is at a rank like this one."""
        found = self._shelf.find(self._name, self._begin + key)
        return self._of_rank(key)[1] if found is None else found

    def _of_rank(self, key: str) -> tuple[int, bytes | None]:
        """The rank whose number the key has, and what this rank has set with its own number there."""
        for number in _NUMBER.finditer(key):
            rank = int(number.group())
            if self._rank != rank < self._world_size:
                same = f"{key[: number.start()]}{self._rank}{key[number.end() :]}"
                found = self._shelf.find(self._name, self._begin + same, own=True)
                if found is not None:
                    return rank, found
        return -1, None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def share(shelf: Shelf, rank: int, world_size: int) -> ScriptStore:
    """The default store of a rank's script. Stores that the script makes itself are on the same shelf."""
    prefixed = dist.PrefixStore

    class PrefixStore(ScriptStore):
        """Of a store on the shelf one there, of any other PyTorch's own."""

        def __new__(cls, prefix: str, store: Any) -> Any:
            return store.prefixed(prefix) if isinstance(store, ScriptStore) else prefixed(prefix, store)

    class TCPStore(ScriptStore):
        """Found by its port."""

        def __init__(self, host_name: str, port: int = _PORT, size: int | None = None, *_: Any, **given: Any) -> None:
            self.host, self.port = host_name, port or _PORT
            super().__init__(shelf, f"port {self.port}", "", rank, given.get("world_size", size) or world_size)

    class FileStore(ScriptStore):
        """Found by its file."""

        def __init__(self, file_name: str, size: int = -1, **given: Any) -> None:
            self.path = file_name
            size = given.get("world_size", size)
            super().__init__(shelf, f"file {file_name}", "", rank, size if size > 0 else world_size)

    modules: tuple[Any, ...] = (dist, dist.distributed_c10d, sys.modules["torch.distributed.rendezvous"])
    for store in (PrefixStore, TCPStore, FileStore):
        for module in modules:
            if hasattr(module, store.__name__):
                setattr(module, store.__name__, store)
    return ScriptStore(shelf, "", "", rank, world_size)
