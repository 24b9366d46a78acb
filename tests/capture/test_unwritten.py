"""Files of a script that are not on disk: `os` and `shutil` answer for them, and for all others as before."""

# ruff: noqa: PTH104, PTH107, PTH116, PTH208 - what scripts call

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from autosac.capture.patches.unwritten import UnwrittenFiles


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> UnwrittenFiles:
    """Unwritten files that are answered for until the test ends."""
    for name in ("rename", "replace", "remove", "unlink", "symlink", "link", "stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, getattr(os, name))
    for name in ("rmtree", "copyfile", "copy", "copy2"):
        monkeypatch.setattr(shutil, name, getattr(shutil, name))
    made = UnwrittenFiles()
    made.install()
    return made


def test_folders_show_them(tmp_path: Path, files: UnwrittenFiles) -> None:
    """Beside what is there; a folder without any is listed as before."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "there").touch()
    files.write(str(tmp_path / "model.pt"), "contents", 7)
    assert sorted(os.listdir(tmp_path)) == ["empty", "model.pt", "there"]
    with os.scandir(tmp_path) as found:
        kinds = sorted((entry.name, entry.is_file(), entry.is_dir()) for entry in found)
    assert kinds == [("empty", False, True), ("model.pt", True, False), ("there", True, False)]
    (empty / "real").touch()
    assert os.listdir(empty) == ["real"]
    with os.scandir(empty) as found:
        assert [entry.name for entry in found] == ["real"]


def test_they_are_asked_moved_and_removed(tmp_path: Path, files: UnwrittenFiles) -> None:
    """Size and contents go with the name; what is removed is there no more."""
    old, new, copy = (str(tmp_path / name) for name in ("old", "new", "copy"))
    files.write(old, "contents", 7)
    assert os.stat(old).st_size == 7
    os.rename(old, new)
    assert (files.get(old), files.get(new)) == (None, "contents")
    shutil.copyfile(new, copy)
    os.remove(new)
    assert (files.get(new), files.get(copy), os.listdir(tmp_path)) == (None, "contents", ["copy"])
    shutil.rmtree(tmp_path)
    assert files.get(copy) is None and not tmp_path.exists()
