"""Modules that are imported when they are first used, with made-up packages: a lazy one, a client's and a user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from autosac.capture.patches import imports
from autosac.capture.patches.after_import import after_import, around_imports

LAZY_INIT = """
import sys
sys.loaded_for_test = True
class Data: kind = "real"
class Problem(Exception): pass
def make(): return Data()
constant = 7
"""
CLIENT = """
import madeup_lazy
import madeup_lazy.part
from madeup_lazy import Data, make, part
from madeup_lazy.part import twice
def annotated(x: Data) -> "Data": return x
"""
USER = """
import madeup_lazy
from madeup_lazy import Problem
from madeup_lazy.part import twice
def caught():
    try:
        raise Problem
    except Problem:
        return True
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Three packages on the path, the first of them lazy for the second."""
    for name, text in (("madeup_lazy/__init__", LAZY_INIT), ("madeup_client/__init__", CLIENT), ("madeup_user", USER)):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "madeup_lazy" / "part.py").write_text("def twice(x): return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    imports.install(("madeup_lazy", "madeup_missing"), ("madeup_client",))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("madeup_")]:
        del sys.modules[name]
    vars(sys).pop("loaded_for_test", None)


def is_loaded() -> bool:
    """Whether the lazy package's code has run."""
    return hasattr(sys, "loaded_for_test")


def client() -> ModuleType:
    """The client, newly imported."""
    return importlib.import_module("madeup_client")


def test_a_clients_imports_load_nothing(packages: Path) -> None:
    """Import statements of a client, by name and of submodules too, leave the package's code alone."""
    module = client()
    assert not is_loaded()
    assert "imported when it is used" in repr(module.Data)
    assert not is_loaded()


def test_a_name_becomes_real_when_it_is_called(packages: Path) -> None:
    """A function imported by name gives what the real one gives, and the classes agree."""
    module = client()
    made = module.make()
    assert is_loaded() and made.kind == "real"
    real = importlib.import_module("madeup_lazy").Data
    assert type(made) is real
    assert module.Data == real and hash(module.Data) == hash(real)


def test_a_class_by_name_serves_instance_tests_and_subclasses(packages: Path) -> None:
    """isinstance, issubclass, subclassing and unions treat the name as the class it stands for."""
    module = client()

    class Mine(module.Data):  # type: ignore[name-defined, misc]
        pass

    real = importlib.import_module("madeup_lazy").Data
    assert Mine.__mro__[1] is real and issubclass(Mine, module.Data) and isinstance(Mine(), module.Data)
    assert not isinstance(3, module.Data)
    assert isinstance(Mine(), module.Data | int) and isinstance(3, int | module.Data)


def test_submodules_of_a_client_work(packages: Path) -> None:
    """A submodule, imported by either kind of statement, is the real one when it is used."""
    module = client()
    assert module.twice(4) == 8 and module.part.twice(5) == 10 and module.madeup_lazy.part.twice(6) == 12
    assert module.madeup_lazy.constant == 7


def test_other_code_gets_real_objects_at_once(packages: Path) -> None:
    """A job's own module may use names where no stand-in serves, as in an except clause."""
    module = importlib.import_module("madeup_user")
    assert is_loaded() and module.caught()
    assert module.twice is sys.modules["madeup_lazy.part"].twice


def test_other_code_after_a_client_gets_the_same_module(packages: Path) -> None:
    """A client's stand-in and what others import later are one module, also when attributes are set."""
    first, second = client(), importlib.import_module("madeup_user")
    first.madeup_lazy.constant = 8
    assert second.madeup_lazy.constant == 8
    assert first.Data == sys.modules["madeup_lazy"].Data


def test_a_missing_module_is_an_import_error(packages: Path) -> None:
    """A lazy module that is not installed fails at its import, as any other."""
    with pytest.raises(ModuleNotFoundError, match="madeup_missing"):
        importlib.import_module("madeup_missing")
    with pytest.raises(ModuleNotFoundError, match=r"madeup_lazy\.nothing"):
        importlib.import_module("madeup_lazy.nothing")


def test_looking_at_all_modules_loads_nothing(packages: Path) -> None:
    """What `inspect` asks of every module (its file) is answered without loading; the spec says where it lies."""
    client()
    lazy = sys.modules["madeup_lazy"]
    assert lazy.__file__ == str(packages / "madeup_lazy" / "__init__.py")
    spec = importlib.util.find_spec("madeup_lazy")
    assert spec is not None and spec.origin == lazy.__file__
    assert not hasattr(sys.modules["madeup_lazy.part"], "__path__")
    assert not is_loaded()


def test_compilation_of_functions_waits_for_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile runs once, with its options, when the function is called; modules are compiled at once."""
    compiled: list[object] = []

    def compile_now(model: object, **options: object) -> object:
        compiled.append((model, options))
        return model

    monkeypatch.setattr(torch, "compile", compile_now)

    def double(x: int) -> int:
        return 2 * x

    with imports.deferred_compilation():
        later = torch.compile(double, mode="max-autotune")
        module = torch.nn.Identity()
        torch.compile(module)
    assert torch.compile is compile_now
    assert compiled == [(module, {})]
    assert [later(3), later(4)] == [6, 8]
    assert compiled[1:] == [(double, {"mode": "max-autotune"})]


def test_classes_that_hold_a_deferred_function() -> None:
    """A class that holds one, or whose base does, is told from one that does not."""

    def double(x: int) -> int:
        return 2 * x

    with imports.deferred_compilation():

        class Attention:
            compiled = torch.compile(double)

    class Inherited(Attention):
        pass

    class Plain:
        own = len

    assert imports.calls_deferred({Attention}) and imports.calls_deferred({Plain, Inherited})
    assert not imports.calls_deferred({Plain}) and not imports.calls_deferred(())


def test_a_package_is_imported_inside_of_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its modules find while they are imported holds for the import alone; an action comes after it, with the module."""
    package = tmp_path / "madeup_asking"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("first", "second"):
        (package / f"{name}.py").write_text("import madeup_asked\nfound = madeup_asked.answer\n")
    asked: Any = ModuleType("madeup_asked")
    asked.answer = "no"
    monkeypatch.setitem(sys.modules, "madeup_asked", asked)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[str] = []
    after_import("madeup_asking.first", lambda module: seen.append(module.found))
    around_imports("madeup_asking", lambda: mock.patch.object(asked, "answer", "yes"))
    try:
        first, second = (importlib.import_module(f"madeup_asking.{name}") for name in ("first", "second"))
    finally:
        for name in [name for name in sys.modules if name.startswith("madeup_asking")]:
            del sys.modules[name]
    assert (first.found, second.found, asked.answer) == ("yes", "yes", "no")
    assert seen == ["yes"]
