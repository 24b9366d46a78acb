"""Which tests cover which room: rooms.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

_FILE = Path(__file__).with_name("rooms.toml")


def stages(root: Path, file: str) -> tuple[tuple[str, ...], ...]:
    """The tests for a source file, in stages: those named after it, then those of its room.

    ValueError if rooms.toml knows no room of the file, or names tests that do not exist.
    """
    table: dict[str, list[str]] = tomllib.loads(_FILE.read_text())["rooms"]
    room = max((r for r in table if file == r or file.startswith(f"{r}/")), key=len, default=None)
    if room is None:
        raise ValueError(f"{_FILE.name} has no tests for {file}")
    paths = {test: sorted(str(p.relative_to(root)) for p in root.glob(test)) for test in table[room]}
    missing = [test for test, found in paths.items() if not found]
    if missing:
        raise ValueError(f"{_FILE.name} names tests that do not exist: {', '.join(missing)}")
    rest = tuple(path for found in paths.values() for path in found)
    parts = set(Path(file).parts)
    named = sorted(p.relative_to(root) for p in (root / "tests").rglob(f"test_{Path(file).stem}.py"))
    near = tuple(str(test) for test in named if parts & set(test.parts[1:-1]) or str(test) in rest)
    return (near, rest) if near and near != rest else (rest,)
