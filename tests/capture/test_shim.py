"""The library that stands for CUDA is built once, with the compiler of the machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autosac.capture.cuda.shim import shim_file

COMPILER = """#!/bin/sh
echo built >> "$LOG"
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo library > "$2"
"""


def test_of_ranks_that_start_together_one_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ask for the library at once with an empty cache: the compiler runs once, and all get its file."""
    compiler, log = tmp_path / "slow-c++", tmp_path / "log"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setenv("AUTOSAC_CACHE", str(tmp_path / "cache"))
    folders = [tmp_path / str(i) for i in range(4)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(shim_file, folders))
    assert log.read_text() == "built\n"
    assert [path.read_text() for path in paths] == ["library\n"]
