"""Documents of strangers: bounded, strict, and printed without being obeyed."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import pytest
from rich.table import Table

from autosac.display.printable import printable
from autosac.display.terminal import PlainConsole
from autosac.files.documents import DocumentError, decompress_bounded, parse_json, parse_toml, read_bounded


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 40 + b"]" * 40, "nested more than 32 levels"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is given twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b"1" * 5000, "too many digits"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": "\0"}', "control character"),
        (b"", "Expecting value"),
    ],
)
def test_json_that_is_refused(content: bytes, message: str) -> None:
    """One line says why."""
    with pytest.raises(DocumentError, match=message) as caught:
        parse_json(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a = " + b"[" * 40 + b"]" * 40, "nested more than 32 levels"),
        (b"a = 1\na = 2", "Cannot overwrite a value"),
        (b"\xef\xbb\xbfa = 1", "byte order mark"),
        (b"a = " + b"1" * 5000, "too many digits"),
        (b"[t]\nb = [9223372036854775808]", r"the number at t\.b\[0\] does not fit into 64 bits"),
        (b"a = \xff", "not UTF-8"),
    ],
)
def test_toml_that_is_refused(content: bytes, message: str) -> None:
    """One line says why."""
    with pytest.raises(DocumentError, match=message):
        parse_toml(content)


def test_what_is_valid() -> None:
    """A byte order mark before JSON, Windows' line ends in TOML, infinities where they are asked for."""
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    assert parse_json(b"[Infinity]", finite=False) == [float("inf")]
    assert parse_toml(b'a = 1\r\n[b]\r\nc = "d"\r\n') == {"a": 1, "b": {"c": "d"}}


def test_gzip_bombs_are_not_unpacked() -> None:
    """Unpacking stops at the limit; what is cut off, damaged or followed by something else is refused."""
    packed = gzip.compress(bytes(50_000_000))
    with pytest.raises(DocumentError, match="more than 1 MiB"):
        decompress_bounded(packed, 2**20)
    good = gzip.compress(b"good")
    assert decompress_bounded(good + good, 100) == b"goodgood"
    for spoiled, message in ((good[:-3], "truncated"), (good[:-6] + b"xxxxxx", "damaged"), (good + b"x", "follows")):
        with pytest.raises(DocumentError, match=message):
            decompress_bounded(spoiled, 100)


def test_reading_is_bounded(tmp_path: Path) -> None:
    """A file without end, one that is too long, a folder; a FIFO that nobody writes to is empty."""
    (tmp_path / "long").write_bytes(bytes(101))
    os.mkfifo(tmp_path / "fifo")
    assert read_bounded(tmp_path / "fifo", 100) == b""
    for path in (Path("/dev/zero"), tmp_path / "long"):
        with pytest.raises(OSError, match="it is larger than"):
            read_bounded(path, 100)
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 100)
    with pytest.raises(OSError, match="null character"):
        read_bounded("a\0b", 100)


def test_text_is_shown_and_not_obeyed() -> None:
    """Escape sequences, markup and emoji codes of a stranger arrive as they are written."""
    assert printable("a\x1b[31m\r\n\u202e\ud800é") == "a\\x1b[31m\\r\\n\\u202e\\ud800é"
    out = PlainConsole(file=io.StringIO(), width=80)
    table = Table("[/bold]", title="[red]\x1b]0;title\x07")
    table.add_row(":smile: [link=x]\x1b[2J")
    out.print(table)
    out.print("[/bold]\ud800\nsecond line")
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "\x07" not in text
    assert "[/bold]" in text and ":smile: [link=x]\\x1" in text and "\\ud800\nsecond line" in text


@pytest.mark.parametrize(("limit_bytes", "fits"), [(1000, True), (999, False)])
def test_exactly_the_limit_fits(tmp_path: Path, limit_bytes: int, fits: bool) -> None:
    """A file of 1000 bytes, and a stream that holds as many."""
    content = b"x" * 1000
    (tmp_path / "file").write_bytes(content)
    if fits:
        assert read_bounded(tmp_path / "file", limit_bytes) == content
        assert decompress_bounded(gzip.compress(content), limit_bytes) == content
    else:
        with pytest.raises(OSError, match="larger than"):
            read_bounded(tmp_path / "file", limit_bytes)
        with pytest.raises(DocumentError, match="holds more than"):
            decompress_bounded(gzip.compress(content), limit_bytes)
