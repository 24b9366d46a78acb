"""Which configurations TorchTitan 0.3 has, read from its files without importing them.

Its own refusal of a name comes after all imports of PyTorch and TorchTitan, a quarter of a minute later. Only names that are
sure to be wrong are refused here; TorchTitan judges the others.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from autosac.errors import UsageError

_PLACES = ("models", "experiments", "experiments/rl/examples")
# With one of these, a module may have names that its text does not contain.
_DYNAMIC = {"globals", "setattr", "exec", "vars", "__getattr__"}


def check_python_job(module: str, config: str) -> None:
    """UsageError if there is no such module, or it is one of TorchTitan's own and has no such configuration."""
    folders = _torchtitan()
    inside = module.replace(".", "/")
    places = [folder / place for folder in folders for place in _PLACES] + [folder.parent for folder in folders]
    for place in places:
        file = place / inside / "config_registry.py"
        if file.is_file():
            _check_config(module, config, file)
            return
    first = module.split(".")[0]
    if folders and not _importable(first):
        known = sorted(set(_modules(folders)))
        raise UsageError(
            f"job {module}:{config}: there is no module {module}{_near(module, known)}; "
            f"TorchTitan's own are {', '.join(known)}"
        )


def _torchtitan() -> list[Path]:
    """The folders of the installed package; none if it cannot be found."""
    spec = importlib.util.find_spec("torchtitan")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _importable(name: str) -> bool:
    """Whether something of this name may be imported, here or by the job's process, wherever that is started."""
    places = [Path(), *map(Path, sys.path), *map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return importlib.util.find_spec(name) is not None or any(
        (place / name).is_dir() or (place / f"{name}.py").is_file() for place in places
    )


def _modules(folders: list[Path]) -> Iterator[str]:
    """How TorchTitan's own modules are named in a job."""
    for place in (folder / place for folder in folders for place in _PLACES):
        for file in place.rglob("config_registry.py"):
            yield ".".join(file.parent.relative_to(place).parts).removeprefix("rl.examples.")


def _check_config(module: str, config: str, file: Path) -> None:
    """UsageError if the file's text shows that it defines no such name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    names = set(_names(tree))
    if config in names or names & _DYNAMIC or "*" in names:
        return
    known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    raise UsageError(
        f"job {module}:{config}: {module} has no configuration {config}{_near(config, known)}; it has {', '.join(known)}"
    )


def _names(tree: ast.AST) -> Iterator[str]:
    """Every name in a module's text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.split(".")[0]
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _near(name: str, known: list[str]) -> str:
    """The known name that is most like a wrong one, as a question."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (do you mean {near[0]}?)" if near else ""
