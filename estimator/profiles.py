"""Profile files: TOML tables with a fixed set of keys, shipped with the package or written by a user.

A profile is asked for by the name of a shipped file (``h100-sxm-80gb``), by the beginning of one that fits no other
(``h200``, ``H100_PCIe``), or by the path of a file. A file may start from another profile with ``base = "name or file"``, and
give only what differs. Files that a profile names lie in its own folder or below. The classes that hold profiles say what each
key may be (`autosac.files.schema`); an error is one line that names the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from autosac.display.printable import printable
from autosac.errors import HardwareError
from autosac.files.documents import DATA_BYTES, TEXT_BYTES, DocumentError, parse_json, parse_toml, read_bounded
from autosac.files.schema import Fault, Within, Words, fitted, shown

_DATA = Path(__file__).resolve().parent / "data"
_MAX_BASES = 8
# Whatever is outside of these bounds is a mistake: no link, rate, power or latency of a machine is so small or so large in
# the units of profiles.
_LEAST, _MOST, _MOST_BYTES = 1e-4, 1e7, 2**50

Text = Annotated[str, Words(empty=True)]
Positive = Annotated[float, Within(_LEAST, _MOST)]
NotNegative = Annotated[float, Within(_LEAST, _MOST, zero=True)]
Bytes = Annotated[int, Within(1, _MOST_BYTES)]
BytesOrNone = Annotated[int, Within(0, _MOST_BYTES)]
MoreBytes = Annotated[int, Within(-_MOST_BYTES, _MOST_BYTES)]
Profile = TypeVar("Profile")


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
            raise HardwareError(f"{path}: base must be the name or path of a profile, not {shown(base)}")
        try:
            path = _base(kind, base, path)
        except HardwareError as e:
            raise e if str(path) in str(e) else HardwareError(f"{path}: base: {e}") from e
    raise HardwareError(f"{first}: more than {_MAX_BASES} profiles are based on each other")


def read_document(path: str | Path, what: str, form: str, schema: int, kind: type[Profile]) -> Profile:
    """What a JSON file of measurements or models holds beside this format and schema. HardwareError, which calls it `what`."""
    try:
        document = parse_json(read_bounded(path, DATA_BYTES))
    except OSError as e:
        raise HardwareError(f"{what} {path} cannot be read: {e.strerror}") from e
    except DocumentError as e:
        raise HardwareError(f"{path} is not a file of {what}: {e}") from e
    if not isinstance(document, dict) or document.get("format") != form:
        raise HardwareError(f"{path} is not a file of {what}")
    if document.get("schema") != schema:
        found = shown(document.get("schema"))
        raise HardwareError(f"{path} has schema {found}, this version reads {schema}: calibrate again")
    content = fitted({key: value for key, value in document.items() if key not in ("format", "schema")}, kind)
    if isinstance(content, Fault):
        raise HardwareError(f"{path} is damaged: {content.text}")
    return content


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


def value_of(table: Mapping[str, Any], kind: type[Profile], path: Path) -> Profile:
    """The profile in a table. HardwareError, on one line with file and key, if there is none."""
    found = fitted(table, kind)
    if isinstance(found, Fault):
        raise HardwareError(f"{path}: {_complaint(found)}")
    return found


def _complaint(fault: Fault) -> str:
    if fault.kind == "value":
        return f"{fault.where} must be {fault.expected}, not {shown(fault.value)}"
    return fault.text
