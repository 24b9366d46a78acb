"""Temporary folders and files: their owners' locks, and what is left of those that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autosac.files import temporary
from autosac.files.temporary import PREFIX, remove_abandoned, temporary_folder
from autosac.files.writing import write_bytes_atomically

OWNER = """
import sys, time
from autosac.files.temporary import temporary_folder
with temporary_folder() as folder:
    (folder / "content").write_text("something")
    print(folder, flush=True)
    time.sleep(100)
"""
WRITER = """
import os, sys, time
from pathlib import Path
from autosac.files import writing as files
os.fdopen = lambda *_: print("open", flush=True) or time.sleep(100)
files.write_bytes_atomically(Path(sys.argv[1]), b"new")
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files, in which nothing has been removed yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary.clean_once.cache_clear()


def started(program: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A process that runs this program, and its first line."""
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    """End it so that it cannot clean up."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_folder_and_its_end(tmp_path: Path) -> None:
    """It is there inside the block, and gone after an exception."""
    with pytest.raises(RuntimeError), temporary_folder() as folder:
        assert folder.is_dir() and folder.parent == tmp_path and folder.name.startswith(PREFIX)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_has_left(tmp_path: Path) -> None:
    """As long as the owner lives its folder stays; the first folder of a process made after that removes it."""
    process, name = started(OWNER)
    with temporary_folder():
        assert (Path(name) / "content").exists()
    temporary.clean_once.cache_clear()
    kill(process)
    assert (Path(name) / "content").exists()
    with temporary_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Folders with other names and another user's are left alone, links are not followed."""
    (tmp_path / "autosac-of-mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{PREFIX}foreign").mkdir()
    uid = os.getuid()
    with pytest.MonkeyPatch.context() as other:
        other.setattr(os, "getuid", lambda: uid + 1)
        remove_abandoned(tmp_path, f"{PREFIX}*")
    assert len(list(tmp_path.iterdir())) == 4
    remove_abandoned(tmp_path, f"{PREFIX}*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["autosac-of-mine", f"{PREFIX}link", "elsewhere"]


def test_a_half_written_file(tmp_path: Path) -> None:
    """A killed writer leaves the old file whole, and its half-written one only until the next writer."""
    path = tmp_path / "plan [1].json"
    path.write_bytes(b"old")
    process, _ = started(WRITER, str(path))
    write_bytes_atomically(path, b"mine")
    assert len(list(tmp_path.iterdir())) == 2  # the other writer is still there
    kill(process)
    assert len(list(tmp_path.iterdir())) == 2 and path.read_bytes() == b"mine"
    write_bytes_atomically(path, b"next")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"next"


def test_who_may_read_a_file(tmp_path: Path) -> None:
    """As the umask says, or nobody else."""
    before = os.umask(0o027)
    try:
        write_bytes_atomically(tmp_path / "shared", b"")
        write_bytes_atomically(tmp_path / "private", b"", private=True)
    finally:
        os.umask(before)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
