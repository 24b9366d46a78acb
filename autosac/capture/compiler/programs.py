"""The programs that Inductor has written for captures: equal graphs are compiled once.

A program is kept as its text and the strides of its outputs, under the key that Inductor's own cache of graphs would use: the
graph, the layouts of its inputs, what it was asked, its settings, and the GPU. What Inductor would not cache is not kept
either, nor is a program with values of its own beside the text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autosac.files.writing import write_bytes_atomically


@dataclass(frozen=True, slots=True)
class GraphProgram:
    """The text of a module, and for each of its outputs its strides (None: no tensor)."""

    text: str
    output_strides: tuple[tuple[str, ...] | None, ...]


class Programs:
    """Those in a folder, and those that this process has seen. Without a folder only the latter.

    `salt` stands for what programs depend on beside their keys, the compiler first of all. Programs are run: of a folder's
    only those of this user are.
    """

    def __init__(self, folder: Path | None = None, salt: str = "") -> None:
        self._folder = folder
        self._salt = salt
        self._seen: dict[str, GraphProgram] = {}

    def get(self, key: str) -> GraphProgram | None:
        """The program under this key, if there is one."""
        if key not in self._seen and self._folder is not None:
            path = self._path(key)
            with contextlib.suppress(OSError, ValueError):
                if {self._folder.stat().st_uid, path.stat().st_uid} == {os.getuid()}:
                    text, strides = json.loads(path.read_bytes())
                    found = tuple(None if s is None else tuple(s) for s in strides)
                    self._seen[key] = GraphProgram(text, found)
                    os.utime(path)  # used now
        return self._seen.get(key)

    def put(self, key: str, program: GraphProgram) -> None:
        """Keep it, where others may find it if there is a folder that can be written."""
        self._seen[key] = program
        if self._folder is not None:
            content = json.dumps([program.text, program.output_strides]).encode()
            with contextlib.suppress(OSError):
                write_bytes_atomically(self._path(key), content, private=True)

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(f'{self._salt} {key}'.encode()).hexdigest()}.program"


def key_of(graph: Any, inputs: Any, options: Mapping[str, Any]) -> str | None:
    """The key of a graph; None if Inductor would not cache it. To be asked where Inductor compiles.

    It says nothing of PyTorch's and Triton's own files, which Inductor would read: the salt does.
    """
    from torch._inductor import codecache

    cache: Any = codecache.FxGraphCache
    try:
        with mock.patch.multiple(codecache, torch_key=bytes, triton_key=str):
            key, _ = cache.prepare_key(graph, inputs, options, [], False)
    except Exception:  # of another version's, or of what cannot be pickled
        return None
    return None if key is None else str(key[0])
