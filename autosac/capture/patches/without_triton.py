"""Triton's place on machines that have none (macOS, Windows).

TorchTitan imports Triton at the top of its modules of kernels, which most jobs never launch. `import_kernels` imports these
modules with stand-ins for `triton` and `triton.language`, before TorchTitan does; they stand there while the modules' source
is executed and at no other time, because PyTorch takes anything called ``triton`` for the whole package. A capture records
launches without compiling (`patches`); a launch outside of one is an error that says what is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# In TorchTitan 0.2, and in 0.3.
MODULES_OF_KERNELS = ("torchtitan.models.moe.kernels", "torchtitan.distributed.minimal_async_ep.kernels")


class JITFunction:
    """A kernel: ``kernel[grid](*arguments)`` launches it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.run, grid=grid)

    def run(self, *_: Any, **__: Any) -> None:
        """Launch. Always a RuntimeError; a capture replaces this method."""
        raise RuntimeError(f"the kernel {self.fn.__name__} needs Triton, which is not installed on this machine")


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    """``@triton.jit``, with and without options."""
    return jit if fn is None else JITFunction(fn)


class _Type:
    """A type of the kernels' language, or a function that makes one of another."""

    def __call__(self, *_: Any) -> _Type:
        return self


class _Language(ModuleType):
    """``triton.language``: its names stand in annotations, tables, and kernels that are not compiled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Type()


def is_missing() -> bool:
    """Whether there is no Triton."""
    return importlib.util.find_spec("triton") is None


def import_kernels() -> None:
    """Import the installed TorchTitan's modules of kernels, without the packages that they are in."""
    package = importlib.util.find_spec("torchtitan")
    if package is None or package.submodule_search_locations is None:
        return
    root = Path(package.submodule_search_locations[0])
    for name in MODULES_OF_KERNELS:
        path = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name not in sys.modules and path.exists():
            sys.modules[name] = _load(name, path)


def _load(name: str, path: Path) -> ModuleType:
    triton, language = ModuleType("triton"), _Language("triton.language")
    vars(triton).update(jit=jit, language=language, cdiv=lambda a, b: -(-a // b))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]
    return module
