"""Captures kept on disk, so that a job which has not changed is not captured again.

A capture is kept under a hash of everything that it depends on (`request_fingerprint`): the request with the contents of the
files it names, the sources of torch, Triton, torchtitan and AutoSAC (size and time of every file), the names and versions of
all installed packages, Python, and the environment variables that PyTorch reads. None of this imports torch. A job that
could depend on anything else has no fingerprint and is captured every time: one with modules of its own, or with a model that
reads files of its own when it is built.

The folder is ``$XDG_CACHE_HOME/autosac/captures`` (``~/.cache``), which nobody but its owner can read. Files appear whole
(rename), a damaged one is removed, and the least recently used go when there is more than `LIMIT_BYTES`. ``AUTOSAC_CACHE=off``
turns all of it off; ``AUTOSAC_CACHE=/some/folder`` keeps the captures below that folder instead. The programs that the
compiler wrote for captures are kept there too (`autosac.capture.compiler.programs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import platform
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autosac.capture.compiler.programs import Programs
from autosac.capture.request import TitanRequest
from autosac.errors import TraceError, UsageError
from autosac.files.caching import cache_folder
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_toml, read_bounded
from autosac.files.writing import remove_unfinished, write_bytes_atomically
from autosac.trace import Trace

LIMIT_BYTES = 2**30
_KEPT = ("*.trace", "*.program")
# TorchTitan's models that are built from the job's settings alone.
_MODELS = ("llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss")
SOURCES = ("autosac", "torch", "torchtitan", "torchao", "triton")
_NO_SOURCES = ("include", "lib", "share", "bin", "test", "__pycache__")
_OF_NO_EFFECT = ("predictions", "reasons", "certainty")  # what a plan says of itself
_ENVIRONMENT = ("AUTOSAC", "CUDA", "LOCAL_", "NCCL", "PYTHON", "PYTORCH", "TORCH")
_IRRELEVANT = (
    "AUTOSAC_CACHE",
    "AUTOSAC_DEBUG",
    "AUTOSAC_SCRIPT",
    "CUDA_VISIBLE_DEVICES",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_HOME",
)


class CaptureStore:
    """A folder of captures."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def get(self, key: str) -> Trace | None:
        """The capture with this request_fingerprint, or None. A damaged file is removed, another user's is not read."""
        path = self._path(key)
        try:
            if {self._folder.stat().st_uid, path.stat().st_uid} != {os.getuid()}:
                return None
            trace = Trace.load(path, trusted=True)
            with contextlib.suppress(PermissionError):
                os.utime(path)  # used now
        except TraceError:
            path.unlink(missing_ok=True)
            return None
        except OSError:
            return None
        return trace

    def put(self, key: str, capture: bytes) -> None:
        """Keep a saved capture. OSError if that is not possible, UsageError if the folder is another user's."""
        self.make_private()
        write_bytes_atomically(self._path(key), capture, private=True)
        self._shrink()

    def put_unless_changed(self, key: str, request: TitanRequest, capture: bytes) -> None:
        """`put`, unless a file that the capture depends on has changed since its key was made."""
        if request_fingerprint(request, surroundings()) == key:
            self.put(key, capture)

    @property
    def folder(self) -> Path:
        """Where captures are kept. It need not exist."""
        return self._folder

    def programs(self, salt: str) -> Programs:
        """What the compiler has written for captures with this salt. OSError and UsageError as `put`."""
        self.make_private()
        self._shrink()
        return Programs(self._folder, salt)

    def size(self) -> tuple[int, int]:
        """How many captures are kept, and the bytes of all files."""
        kept = self._kept()
        return sum(path.suffix == ".trace" for _, _, path in kept), sum(nbytes for _, nbytes, _ in kept)

    def clear(self) -> None:
        """Remove all that is kept, and what an interrupted writer left. OSError if that is not possible."""
        for pattern in _KEPT:
            for path in [*self._folder.glob(pattern), *self._folder.glob(f".{pattern}.*")]:
                path.unlink(missing_ok=True)

    def make_private(self) -> None:
        """Nobody else can list, read or write the folder: a capture holds the job's settings and lines of its source, and
        programs are run. OSError if that is not possible, UsageError if the folder is another user's.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self._folder.stat()
        if status.st_uid != os.getuid():
            raise UsageError(f"{self._folder} belongs to another user: set XDG_CACHE_HOME to a folder of your own")
        if stat.S_IMODE(status.st_mode) != 0o700:
            self._folder.chmod(0o700)
            for _, _, path in self._kept():
                path.chmod(0o600)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.trace"

    def _kept(self) -> list[tuple[int, int, Path]]:
        """When each file was used, its bytes, its path."""
        found = []
        for path in itertools.chain.from_iterable(map(self._folder.glob, _KEPT)):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return found

    def _shrink(self) -> None:
        """Remove the least recently used; others may do the same at the same time."""
        found = self._kept()
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found)[:-1]:
            if total <= self._limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def default_store() -> CaptureStore | None:
    """The user's store, without what killed runs have left unfinished; None if AUTOSAC_CACHE=off.

    UsageError if the variable is neither that nor a usable folder.
    """
    folder = cache_folder("captures")
    if folder is None:
        return None
    remove_unfinished(folder)
    return CaptureStore(folder)


def kept_programs(purpose: str) -> Programs:
    """What the compiler has written for this purpose, in the user's store; where there is none, in this process."""
    with contextlib.suppress(OSError, UsageError):
        store, around = default_store(), surroundings()
        if store is not None and around is not None:
            return store.programs(f"{purpose} {fingerprint(around)}")
    return Programs()


def surroundings() -> dict[str, Any] | None:
    """What all captures on this machine depend on; None if it cannot be read."""
    try:
        sources = [_sources(name) for name in SOURCES]
    except OSError:
        return None
    return {
        "sources": sources,
        "packages": _packages(),
        "python": (sys.version, platform.platform()),
        "environment": _environment(),
    }


def fingerprint(around: dict[str, Any]) -> str:
    """A hash of these `surroundings`."""
    return hashlib.sha256(json.dumps(around, sort_keys=True).encode()).hexdigest()


def request_fingerprint(request: TitanRequest, around: dict[str, Any] | None) -> str | None:
    """A hash of all that decides what the request's capture is, in these `surroundings`; None if that cannot be said."""
    try:
        job = _job_text(request)
        if job is None or around is None:
            return None
        document = {
            **asdict(request),
            "config_file": job,
            "plan_file": _plan_text(Path(request.plan_file)) if request.plan_file else None,
            "surroundings": around,
        }
    except (OSError, UnicodeDecodeError):
        return None
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _plan_text(path: Path) -> str:
    """The plan without what it predicts, and why: a plan that was verified is the one that is written afterwards."""
    text = path.read_text()
    try:
        document = json.loads(text)
    except ValueError:
        return text
    if not isinstance(document, dict):
        return text
    return json.dumps({name: value for name, value in document.items() if name not in _OF_NO_EFFECT}, sort_keys=True)


def _job_text(request: TitanRequest) -> str | None:
    """The job file's text; None if the job may depend on more than that and on its arguments."""
    content = read_bounded(request.config_file, TEXT_BYTES) if request.config_file else b""
    try:
        settings = parse_toml(content)
    except DocumentError:
        return None
    text = content.decode()
    for section, name in (("experimental", "custom_import"), ("job", "custom_config_module")):
        own = settings.get(section, {}).get(name) or "autosac"
        if str(own).partition(".")[0] != "autosac":
            return None
    words = [word for argument in request.overrides for word in argument.split("=", 1)]
    if any(word.replace("-", "_").endswith(("custom_import", "custom_config_module", "config_file")) for word in words):
        return None
    model = settings.get("model", {}).get("name", "llama3")
    for word, value in itertools.pairwise(words):
        if word.endswith("model.name"):
            model = value
    return text if model in _MODELS else None


def _sources(name: str) -> tuple[str, str]:
    """Where a package lies that the capture process would import, and a hash of its files' names, sizes and times."""
    spec = importlib.machinery.PathFinder.find_spec(name, _search_path())
    if spec is None:
        spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return name, ""
    root = Path(spec.origin).parent
    digest = hashlib.sha256()
    for line in sorted(_files(root)):
        digest.update(line.encode())
    return str(root), digest.hexdigest()


def _search_path() -> list[str]:
    """Where the capture process looks for modules: in the current folder last (`autosac.capture.process.start`)."""
    current = str(Path.cwd())
    asked_for = current in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [*(path for path in sys.path if asked_for or path not in ("", current)), current]


def _files(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".so", ".toml")):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}\n"
            elif entry.name not in _NO_SOURCES and entry.is_dir():
                yield from _files(Path(entry.path))


def _packages() -> list[str]:
    """Names and versions of what is installed, as the folders of their metadata say."""
    found: set[str] = set()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found.update(path.name for path in Path(folder).iterdir() if path.suffix in (".dist-info", ".egg-info"))
    return sorted(found)


def _environment() -> dict[str, Any]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT) and name not in _IRRELEVANT
    }
