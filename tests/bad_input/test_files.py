"""Outputs: devices, FIFOs and links stay what they are; what cannot be written is named before the work begins."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from autosac.errors import UsageError
from autosac.files.writing import check_folder, check_output, check_outputs, is_special, write_bytes_atomically


def test_a_device_is_written_through() -> None:
    """/dev/null is still a device afterwards."""
    check_output(Path("/dev/null"))
    write_bytes_atomically(Path("/dev/null"), b"gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode) and is_special(Path("/dev/null"))


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    """The target keeps its permissions; a link into nowhere makes the file that it names."""
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    dangling.symlink_to("later")
    for path in (link, dangling):
        check_output(path)
        write_bytes_atomically(path, b"new")
    assert link.is_symlink() and dangling.is_symlink()
    assert target.read_text() == (tmp_path / "later").read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "later", "link", "target"]


def test_a_fifo_is_written_through(tmp_path: Path) -> None:
    """Who reads from it gets everything, and it is a FIFO still."""
    fifo, content = tmp_path / "fifo", bytes(range(256)) * 1024
    os.mkfifo(fifo)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    check_output(fifo)
    write_bytes_atomically(fifo, content)
    reader.join()
    assert read == [content] and fifo.is_fifo()


def test_a_full_disk_is_named() -> None:
    """The error names the file that was asked for."""
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_bytes_atomically(Path("/dev/full"), b"too much")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, "is a folder"),
        (lambda folder: folder / "none" / "x", "there is no folder"),
        (lambda folder: Path("/proc/x"), "/proc/x cannot be written"),
        (lambda folder: Path(__file__) / "x", "Not a directory"),
        (lambda folder: folder / ("n" * 300), "File name too long"),
        (lambda folder: folder / "a\0b", "null character"),
    ],
)
def test_what_cannot_be_written_is_refused_before(make: object, message: str, tmp_path: Path) -> None:
    """Nothing is left behind by the check."""
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(UsageError, match=message):
        check_output(path)
    assert list(tmp_path.iterdir()) == []


def test_links_to_each_other_and_sockets(tmp_path: Path) -> None:
    """Neither can be written."""
    loop, other = tmp_path / "loop", tmp_path / "socket"
    loop.symlink_to("loop")
    with pytest.raises(UsageError, match="symbolic links"):
        check_output(loop)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(other))
        with pytest.raises(UsageError, match="is a socket"):
            check_output(other)


def test_outputs_that_are_equal_or_read(tmp_path: Path) -> None:
    """Two outputs to one file, also through a link, and an output that is the input."""
    job, link = tmp_path / "job.toml", tmp_path / "link"
    job.write_text("")
    link.symlink_to("job.toml")
    with pytest.raises(UsageError, match="is given twice: for --a and for --b"):
        check_outputs([("--a", job), ("--b", link)])
    with pytest.raises(UsageError, match="is also an input"):
        check_outputs([("-o", link)], [job])
    check_outputs([("--a", Path("/dev/null")), ("--b", Path("/dev/null")), ("--c", None)], [job])


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file appears whole or not at all, and nothing is left beside it."""
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fails(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_bytes_atomically(path, b"new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_for_outputs(tmp_path: Path) -> None:
    """It is made where it can be, and named where it cannot."""
    check_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())
    with pytest.raises(UsageError, match="is not a folder"):
        check_folder(Path(__file__))
    with pytest.raises(UsageError, match="the folder /proc/x cannot be written"):
        check_folder(Path("/proc/x"))
