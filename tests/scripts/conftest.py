"""Scripts are run as users run them, in processes of their own; the library that stands for CUDA is built once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for this session's scripts."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(source, *options, arguments=())``: what `autosac run` prints for a script with this source, on an H100."""
    monkeypatch.setenv("AUTOSAC_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "100")

    def call(source: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(source)
        command = [sys.executable, "-m", "autosac", "run", "train.py", "--gpu", "h100-sxm-80gb", *options]
        command += ["--", *arguments] if arguments else []
        return subprocess.run(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300
        )

    return call
