"""The project's own layout: what is packaged, what the links point to, what may be imported cheaply, how long files are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("estimator", "integrations", "memory_sim", "runtime_sim", "solvers")


def test_every_package_on_disk_is_listed() -> None:
    """Each folder with an __init__.py in autosac and the five rooms is installed under its import name."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    listed = {name for name in packages if ".data" not in name}
    data = {
        ".".join(("autosac", *folder.relative_to(ROOT).parts))
        for folder in (ROOT / "estimator/data", *(ROOT / "estimator/data").iterdir())
        if folder.is_dir()
    }
    assert set(packages) - listed == data
    found = {"autosac"}
    found |= {
        ".".join(("autosac", *init.parent.relative_to(ROOT / "autosac").parts))
        for init in (ROOT / "autosac").rglob("__init__.py")
        if init.parent != ROOT / "autosac" and not any(part in ROOMS for part in init.parts)
    }
    for room in ROOMS:
        found |= {
            ".".join(("autosac", *init.parent.relative_to(ROOT).parts)) for init in (ROOT / room).rglob("__init__.py")
        }
    assert found == listed


def test_rooms_are_linked_into_the_package() -> None:
    """A fresh clone sees the rooms as autosac.<room> through relative links."""
    for room in ROOMS:
        link = ROOT / "autosac" / room
        assert link.is_symlink() and str(link.readlink()) == f"../{room}"


def test_the_rooms_and_the_command_line_import_without_torch() -> None:
    """Simulators, estimator, solvers and the planner work on values; only capture and integrations need PyTorch."""
    code = (
        "import sys, autosac, autosac.cli.parser, autosac.cli.commands, autosac.estimator, autosac.memory_sim, "
        "autosac.runtime_sim, autosac.solvers; assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names() -> None:
    """What the package promises is there, and callable where it says so."""
    import autosac

    assert sorted(autosac.__all__) == list(autosac.__all__)
    assert all(getattr(autosac, name) is not None for name in autosac.__all__)
    assert callable(autosac.plan) and callable(autosac.simulate) and callable(autosac.apply)


def tracked(pattern: str) -> list[Path]:
    """The files of the project with this name pattern."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_files_and_functions_are_short() -> None:
    """At most 500 lines, and at most 60 without the docstring."""
    long = []
    for path in tracked("*.py"):
        text = path.read_text()
        long += [str(path)] if text.count("\n") > 500 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                skipped = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
                if (node.end_lineno or 0) - node.lineno + 1 - skipped > 60:
                    long.append(f"{path}: {node.name}")
    assert not long


def test_the_models_that_are_shipped_are_small() -> None:
    """Each refit adds them to the history: a million bytes in all."""
    models = list((ROOT / "estimator/data/models").glob("*.npz"))
    assert models and sum(path.stat().st_size for path in models) <= 1_000_000


def test_tests_import_public_names() -> None:
    """A name with an underscore belongs to its module alone."""
    private = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("autosac", "benchmarks"))
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__main__"
    ]
    assert not private


def test_tests_replace_public_names() -> None:
    """What a test sets in a module of the project is no name with an underscore either."""
    private = re.compile(r"(?:autosac|benchmarks)[\w.]*\._[A-Za-z]\w*")
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text())
        imports = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom) and str(n.module).startswith(("autosac", "benchmarks"))
        ]
        own = {alias.asname or alias.name for node in imports for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and private.fullmatch(str(node.value)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                where, name = (ast.unparse(argument) for argument in node.args[:2])
                if where in own and name.startswith("'_") and not name.startswith("'__"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {where}.{name}")
    assert not found


def test_a_class_has_a_name_of_its_own() -> None:
    """One name, one thing, across all rooms; a class inside another, or with an underscore, belongs to its place alone."""
    homes: dict[str, list[str]] = {}
    for top in ("autosac", *ROOMS):
        for path in sorted((ROOT / top).rglob("*.py")):
            if top == "autosac" and path.relative_to(ROOT).parts[1] in ROOMS:
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    # What each framework's user writes is `AutoSAC`, as its own classes are named after what they do.
    assert {name: found for name, found in homes.items() if len(found) > 1 and name != "AutoSAC"} == {}
