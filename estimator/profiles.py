"""Profile files: TOML tables with a fixed set of keys, shipped with the package or written by a user.

A profile is asked for by the name of a shipped file (``h100-sxm-80gb``), by the beginning of one that fits no other
(``h200``, ``H100_PCIe``), or by the path of a file. A file may start from another profile with ``base = "name or file"``, and
give only what differs. Files that a profile names lie in its own folder or below. Every key is checked: unknown, missing, of
the wrong type, not positive; the error is one line that names the file and the key.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autosac.display.printable import printable
from autosac.errors import HardwareError
from autosac.files.documents import DATA_BYTES, TEXT_BYTES, DocumentError, parse_json, parse_toml, read_bounded

_DATA = Path(__file__).resolve().parent / "data"
_MAX_BASES = 8
# Whatever is outside of these bounds is a mistake: no link, rate, power or latency of a machine is so small or so large in
# the units of profiles.
LEAST, MOST = 1e-4, 1e7
MOST_BYTES = 2**50


def shipped(kind: str) -> tuple[str, ...]:
    """The names of the profiles of this kind ("hardware", "clusters") that come with the package, sorted."""
    return tuple(sorted(path.stem for path in (_DATA / kind).glob("*.toml")))


def read(kind: str, name_or_path: str) -> tuple[dict[str, Any], Path]:
    """The table of a profile, bases merged in, and its file.

    HardwareError if it cannot be found or parsed.
    """
    table: dict[str, Any] = {}
    first: Path | None = None
    path = _find(kind, name_or_path, Path())
    for _ in range(_MAX_BASES):
        first = first or path
        layer = _parse(path)
        base = layer.pop("base", None)
        table = _merged(layer, table)
        if base is None:
            return table, first
        if not isinstance(base, str) or not base.strip() or not base.isprintable():
            raise HardwareError(f"{path}: base must be the name or path of a profile, not {_shown(base)}")
        try:
            path = _base(kind, base, path)
        except HardwareError as e:
            raise e if str(path) in str(e) else HardwareError(f"{path}: base: {e}") from e
    raise HardwareError(f"{first}: more than {_MAX_BASES} profiles are based on each other")


def read_document(path: str | Path, what: str, form: str, schema: int) -> dict[str, Any]:
    """A JSON file of measurements or models, whose "format" and "schema" are these. HardwareError, which calls it `what`."""
    try:
        document = parse_json(read_bounded(path, DATA_BYTES))
    except OSError as e:
        raise HardwareError(f"{what} {path} cannot be read: {e.strerror}") from e
    except DocumentError as e:
        raise HardwareError(f"{path} is not a file of {what}: {e}") from e
    if not isinstance(document, dict) or document.get("format") != form:
        raise HardwareError(f"{path} is not a file of {what}")
    if document.get("schema") != schema:
        found = _shown(document.get("schema"))
        raise HardwareError(f"{path} has schema {found}, this version reads {schema}: calibrate again")
    return document


def _find(kind: str, wanted: str, folder: Path) -> Path:
    name = wanted.lower().replace("_", "-")
    named = [name] if name in shipped(kind) else [known for known in shipped(kind) if known.startswith(f"{name}-")]
    if len(named) == 1:
        return _DATA / kind / f"{named[0]}.toml"
    if not wanted.isprintable():
        raise HardwareError(f"{wanted!r} is not the name of a profile: there are control characters in it")
    try:
        path = (folder / wanted).expanduser()
        if path.is_file():
            return path
    except (OSError, RuntimeError) as e:  # a name that is too long, a home that nobody has
        raise HardwareError(
            f"profile {printable(wanted)[:200]} cannot be read: {getattr(e, 'strerror', None) or e}"
        ) from e
    what = {"hardware": "GPU", "clusters": "cluster"}[kind]
    if wanted.endswith(".toml") or "/" in wanted:
        raise HardwareError(f"{what} profile {wanted} is not a file")
    if named:
        raise HardwareError(f"there are several kinds of {what} {wanted!r}: give one of {', '.join(named)}")
    raise HardwareError(f"unknown {what} {wanted!r}: give one of {', '.join(shipped(kind))} or the path of a TOML file")


def _base(kind: str, base: str, of: Path) -> Path:
    """The file of the base that the profile `of` names."""
    if base not in shipped(kind):
        beside(of, "base", base)
    return _find(kind, base, of.parent)


def beside(profile: Path, key: str, file: str) -> Path:
    """The file that a profile names under `key`, in its own folder or below. HardwareError for any other: whoever uses a
    stranger's profile shall not have files read that the stranger chooses.
    """
    path = (profile.parent / file).expanduser().resolve()
    if not path.is_relative_to(profile.parent.resolve()):
        raise HardwareError(
            f"{profile}: {key} {file!r} lies outside of the profile's folder; give the name of a file in {profile.parent} "
            "or below"
        )
    return path


def _parse(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_bounded(path, TEXT_BYTES))
    except OSError as e:
        raise HardwareError(f"{path} cannot be read: {e.strerror}") from e
    except DocumentError as e:
        raise HardwareError(f"{path} is not valid TOML: {e}") from e


def _merged(layer: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`layer` with the values of `over` on top; tables are merged key by key."""
    result = dict(layer)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return result


Check = Callable[[Any], Any]


class Reader:
    """Takes checked values out of a profile's table."""

    def __init__(self, table: Mapping[str, Any], path: Path, known: Sequence[str]) -> None:
        """Read `table`, which may hold the `known` keys; messages name `path`.

        HardwareError for any other key: before all else, because the key that was meant is then missing.
        """
        self._table = dict(table)
        self._path = path
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                self.fail(printable(key), "is not a known key" + (f"; {near[0]} is" if near else ""))

    def fail(self, key: str, message: str) -> NoReturn:
        """HardwareError on one line."""
        raise HardwareError(f"{self._path}: {key} {message}")

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is not empty (unless that is the default)."""
        value = self._take(key, default)
        if not isinstance(value, str) or (not value.strip() and value != default):
            self.fail(key, f"must be a non-empty string, not {_shown(value)}")
        if not value.isprintable():
            self.fail(key, f"must not hold control characters, as in {_shown(value)}")
        return value

    def number(
        self, key: str, default: float | None = None, *, least: float = LEAST, most: float = MOST, zero: bool = False
    ) -> float:
        """A number within these bounds (or 0, if `zero`)."""
        return self._number(key, self._take(key, default), least, most, zero=zero)

    def integer(self, key: str, default: int | None = None, *, most: int = MOST_BYTES, zero: bool = False) -> int:
        """A whole number above 0 (or from 0, if `zero`), and at most `most`."""
        value = self._take(key, default)
        if type(value) is not int:
            self.fail(key, f"must be a whole number, not {_shown(value)}")
        return int(self._number(key, value, 1, most, zero=zero))

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._take(key, default)
        if type(value) is not bool:
            self.fail(key, f"must be true or false, not {_shown(value)}")
        return value

    def change(self, key: str, *, most: int = MOST_BYTES) -> int:
        """A whole number of either sign, 0 if it is not given."""
        value = self._take(key, 0)
        if type(value) is not int or abs(value) > most:
            self.fail(key, f"must be a whole number from {-most} to {most}, not {_shown(value)}")
        return int(value)

    def integers(self, key: str, count: int, most: int) -> tuple[int, ...]:
        """A list of `count` whole numbers from 0 to `most`."""
        value = self._take(key, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(type(v) is not int or not 0 <= v <= most for v in value)
        ):
            self.fail(key, f"must be a list of {count} whole numbers from 0 to {most}, not {_shown(value)}")
        return tuple(value)

    def table(
        self,
        key: str,
        allowed: tuple[str, ...],
        *,
        needed: tuple[str, ...] = (),
        least: float = LEAST,
        most: float = MOST,
        zero: bool = False,
    ) -> dict[str, float]:
        """A table of numbers within these bounds (or 0, if `zero`), with keys from `allowed` and at least those `needed`."""
        value = self._take(key, None if needed else {})
        if not isinstance(value, dict):
            self.fail(key, f"must be a table, not {_shown(value)}")
        for name in value:
            if name not in allowed:
                self.fail(f"{key}.{name}", f"is unknown; {key} may hold {', '.join(allowed)}")
        for name in needed:
            if name not in value:
                self.fail(f"{key}.{name}", "is missing")
        return {name: self._number(f"{key}.{name}", number, least, most, zero=zero) for name, number in value.items()}

    def _take(self, key: str, default: Any) -> Any:
        if key in self._table:
            return self._table[key]
        if default is None:
            self.fail(key, "is missing")
        return default

    def _number(self, key: str, value: Any, least: float, most: float, *, zero: bool) -> float:
        if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
            self.fail(key, f"must be a finite number, not {_shown(value)}")
        if value < 0 or (value == 0 and not zero):
            self.fail(key, f"must be {'at least' if zero else 'above'} 0, not {_shown(value)}")
        if value != 0 and not least <= value <= most:
            self.fail(key, f"must be from {least:g} to {most:g}, not {_shown(value)}")
        return float(value)


def _shown(value: Any) -> str:
    """A value in a message: printable, and not without end."""
    try:
        text = printable(repr(value))
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number with thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
