"""Builds and loads the library that makes ``cuda`` a device on any machine (shim.cpp).

It is built once for each version of torch, with the C++ compiler of the machine (``$CXX``, else ``c++``, ``g++`` or
``clang++``), into the cache folder. Building takes four seconds of one core: of ranks that start together one builds, and the
others wait for it. It must be loaded before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from autosac.errors import CaptureError
from autosac.files.caching import cache_folder
from autosac.files.temporary import temporary_folder
from autosac.files.writing import write_bytes_atomically

_SOURCE = Path(__file__).with_name("shim.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O1", "-shared", "-fPIC", "-std=c++20")
_SUFFIX = ".dylib" if platform.system() == "Darwin" else ".so"
_MESSAGE_CHARACTERS = 300


def load_shim(device_count: int) -> None:
    """From now on torch, which must not have been imported, has `device_count` CUDA devices. CaptureError where it cannot."""
    with temporary_folder() as folder:
        path = shim_file(folder)
        try:
            for needed in _libraries(_torch_folder() / "lib"):
                ctypes.CDLL(str(needed), ctypes.RTLD_GLOBAL)
            shim = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as e:
            raise CaptureError(f"the library that stands for CUDA cannot be loaded: {e}") from e
    shim.autosac_set_device_count(device_count)
    _loaded.append(shim)


def shim_file(folder: Path) -> Path:
    """The library, built where it is not in the cache; without a cache it lies in `folder`."""
    torch_folder = _torch_folder()
    path = (cache_folder("shims") or folder) / f"cuda-{_key(torch_folder)}{_SUFFIX}"
    if not _is_built(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not _is_built(path):
                library = _build(torch_folder, folder / f"built{_SUFFIX}")
                write_bytes_atomically(path, library, private=True)
    return path


_loaded: list[ctypes.CDLL] = []


def current_device() -> int:
    """The index of this thread's current device."""
    return int(_loaded[0].autosac_current_device())


def set_device(index: int) -> None:
    """Make it this thread's current device."""
    _loaded[0].autosac_set_device(index)


def _is_built(path: Path) -> bool:
    return path.exists() and path.stat().st_uid == os.getuid()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process builds meanwhile, where files can be locked; a process that ends lets go of its lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


def _libraries(folder: Path) -> list[Path]:
    """Those of torch that have to be there before. A build with CUDA brings hooks of its own, which only what comes after them
    replaces without a word on standard error.
    """
    names = ("libtorch_global_deps", "libc10", "libtorch_cpu", "libc10_cuda", "libtorch_cuda")
    found = [folder / f"{name}{_SUFFIX}" for name in names]
    return [path for path in found if path.exists()]


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CaptureError("torch is not installed")
    return Path(spec.origin).parent


def _key(torch_folder: Path) -> str:
    """What the library depends on."""
    parts = (_SOURCE.read_text(), version("torch"), str(torch_folder), platform.machine(), *_FLAGS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(torch_folder: Path, path: Path) -> bytes:
    """The library, compiled by way of the file `path`."""
    command = [_compiler(), str(_SOURCE), "-o", str(path), *_FLAGS]
    command += [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    command += [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode:
        first = next((line for line in ended.stderr.splitlines() if "error" in line), ended.stderr.strip())
        raise CaptureError(f"{command[0]} cannot build the library that stands for CUDA: {first[:_MESSAGE_CHARACTERS]}")
    return path.read_bytes()


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise CaptureError(
        "no C++ compiler was found; autosac run needs one, once for each version of torch: install g++ or clang++, or "
        "set CXX (make_step with autosac.simulate needs none)"
    )
