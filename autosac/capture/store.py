"""Captures kept on disk, so that a job which has not changed is not captured again.

A capture is kept under a hash of everything that it depends on (`fingerprint`): the request with the contents of the files
it names, the sources of torch, torchtitan and AutoSAC (size and time of every file), the names and versions of all
installed packages, Python, and the environment variables that PyTorch reads. None of this imports torch. A job that could
depend on anything else has no fingerprint and is captured every time: one with modules of its own, or with a model that
reads files of its own when it is built.

The folder is ``$XDG_CACHE_HOME/autosac/captures`` (``~/.cache``). Files appear whole (rename), a damaged one is removed, and
the least recently used go when there is more than `LIMIT_BYTES`. ``AUTOSAC_CACHE=off`` turns all of it off.
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
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autosac.capture.request import TitanRequest
from autosac.errors import TraceError
from autosac.files import write_bytes_atomically
from autosac.trace import Trace

LIMIT_BYTES = 2**30
# TorchTitan's models that are built from the job's settings alone.
_MODELS = ("llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss")
_SOURCES = ("autosac", "torch", "torchtitan", "torchao")
_NO_SOURCES = ("include", "lib", "share", "bin", "test", "__pycache__")
_ENVIRONMENT = ("AUTOSAC", "CUDA", "LOCAL_", "NCCL", "PYTHON", "PYTORCH", "TORCH")
_IRRELEVANT = ("AUTOSAC_CACHE", "AUTOSAC_DEBUG", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME")


class CaptureStore:
    """A folder of captures."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def get(self, key: str) -> Trace | None:
        """The capture with this fingerprint, or None. A damaged file is removed."""
        path = self._path(key)
        try:
            trace = Trace.load(path)
            with contextlib.suppress(PermissionError):
                os.utime(path)  # used now
        except TraceError:
            path.unlink(missing_ok=True)
            return None
        except OSError:
            return None
        return trace

    def put(self, key: str, capture: bytes) -> None:
        """Keep a saved capture. OSError if that is not possible."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(self._path(key), capture)
        self._shrink()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.trace"

    def _shrink(self) -> None:
        """Remove the least recently used; others may do the same at the same time."""
        found = []
        for path in self._folder.glob("*.trace"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found)[:-1]:
            if total <= self._limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def default_store() -> CaptureStore | None:
    """The user's store, or None if AUTOSAC_CACHE=off."""
    if os.environ.get("AUTOSAC_CACHE", "").lower() in ("off", "0", "no", "false"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return CaptureStore(Path(base) / "autosac" / "captures")


def surroundings() -> dict[str, Any] | None:
    """What all captures on this machine depend on; None if it cannot be read."""
    try:
        sources = [_sources(name) for name in _SOURCES]
    except OSError:
        return None
    return {
        "sources": sources,
        "packages": _packages(),
        "python": (sys.version, platform.platform()),
        "environment": _environment(),
    }


def fingerprint(request: TitanRequest, around: dict[str, Any] | None) -> str | None:
    """A hash of all that decides what the request's capture is, in these `surroundings`; None if that cannot be said."""
    try:
        job = _job_text(request)
        if job is None or around is None:
            return None
        document = {
            **asdict(request),
            "config_file": job,
            "plan_file": Path(request.plan_file).read_text() if request.plan_file else None,
            "surroundings": around,
        }
    except (OSError, UnicodeDecodeError):
        return None
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _job_text(request: TitanRequest) -> str | None:
    """The job file's text; None if the job may depend on more than that and on its arguments."""
    text = Path(request.config_file).read_text() if request.config_file else ""
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
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
    spec = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
    if spec is None:
        spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return name, ""
    root = Path(spec.origin).parent
    digest = hashlib.sha256()
    for line in sorted(_files(root)):
        digest.update(line.encode())
    return str(root), digest.hexdigest()


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
        name: value
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT) and name not in _IRRELEVANT
    }
