"""What the job's program imports but a capture never runs is imported when it is first used.

TorchTitan's modules import, at their top, data sets (pandas, pyarrow), tensorboard and tokenizers, and wrap attention in
`torch.compile`, which imports Inductor: half of the time to import it. In the capture process

- `LazyImports` puts a `_LazyModule` in the place of each module named in `LAZY`. Its first attribute imports the module. A
  ``from datasets import Dataset`` would ask for an attribute at once: where the asking is done by an import statement of one
  of `CLIENTS`, it gets a `_LazyName`, which becomes the real object when it is called, asked for an attribute, subclassed,
  or tested against. All other code, such as a job's own modules, gets the real object, because a name can be used in ways
  that no stand-in serves (``except datasets.SomeError``).
- `deferred_compilation` makes `torch.compile` of a plain function wait for the function's first call.
- `import_compiler` imports what a job that compiles needs, once for all of its captures; `calls_deferred` tells that a model's
  classes hold functions that were deferred so (flexible attention), which compile even if the model is not compiled.

A missing module is an ImportError at the import statement, as ever.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

from autosac.capture.compiler.inherited import called

LAZY = ("datasets", "tensorboard", "tokenizers", "torch.utils.tensorboard", "wandb")
CLIENTS = ("torchtitan",)
COMPILER = (
    "torch._dynamo.convert_frame",
    "torch._dynamo.backends.common",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "torch._inductor.compile_fx",
    "torch.fx.passes.infra.partitioner",
)
_IMPORT_SYSTEM = ("importlib._bootstrap", "_frozen_importlib")
_OF_IMPORT_SYSTEM = ("__path__", "__file__", "__cached__", "__loader__", "__spec__", "__package__")
_IMPORT_OPCODES = (dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"])


def import_compiler() -> None:
    """Import what compiling a module takes, which is otherwise imported by the first compilation (torch 2.11 to 2.13)."""
    for name in COMPILER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def install(names: Sequence[str] = LAZY, clients: Sequence[str] = CLIENTS) -> None:
    """Make these modules lazy in this process, those that have not been imported yet."""
    sys.meta_path.insert(0, LazyImports(names, clients))


class LazyImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder for ``sys.meta_path``, and its own loader. It makes `names` and all their submodules lazy."""

    def __init__(self, names: Sequence[str], clients: Sequence[str]) -> None:
        self.clients = clients
        self._names = names
        self._real: set[str] = set()  # imported for real, or on the way to it

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a lazy module; None for all others, and for modules that do not exist."""
        root = self._root_of(name)
        if root is None or root in self._real:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        real = next((spec for spec in others if spec is not None), None)
        if real is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            name, self, origin=real.origin, is_package=real.submodule_search_locations is not None
        )
        spec.submodule_search_locations = real.submodule_search_locations
        spec.has_location = real.has_location
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The stand-in."""
        return _LazyModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""

    def load(self, name: str) -> ModuleType:
        """Import the module, and from now on all of its package, for real."""
        root = self._root_of(name)
        assert root is not None
        if root not in self._real:
            self._real.add(root)
            for known, module in list(sys.modules.items()):
                if self._root_of(known) == root and isinstance(module, _LazyModule):
                    del sys.modules[known]
        return importlib.import_module(name)

    def _root_of(self, name: str) -> str | None:
        return next((root for root in self._names if name == root or name.startswith(f"{root}.")), None)


class _LazyModule(ModuleType):
    """Stands for a module that has not been imported yet, and speaks for it afterwards."""

    def __init__(self, name: str, imports: LazyImports) -> None:
        super().__init__(name)
        self.__dict__["_autosac_imports"] = imports

    def __getattr__(self, name: str) -> Any:
        if name in _OF_IMPORT_SYSTEM:  # it has set those that there are
            raise AttributeError(name)
        if _is_imported_by(self._autosac_imports.clients, sys._getframe(1)):
            return _LazyName(functools.partial(self._autosac_resolve, name), f"{self.__name__}.{name}")
        return getattr(self._autosac_imports.load(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_IMPORT_SYSTEM or isinstance(value, ModuleType):  # a submodule
            super().__setattr__(name, value)
        else:
            setattr(self._autosac_imports.load(self.__name__), name, value)

    def _autosac_resolve(self, name: str) -> Any:
        real = self._autosac_imports.load(self.__name__)
        with contextlib.suppress(AttributeError):
            return getattr(real, name)
        return importlib.import_module(f"{self.__name__}.{name}")


def _is_imported_by(clients: Sequence[str], frame: FrameType | None) -> bool:
    """The attribute is asked for by an import statement in one of these packages (`frame` is the one that asks).

    Only the instruction at which the frame stands tells ``from datasets import Dataset`` from ``datasets.Dataset``. If both
    got the real object, the first would import the library after all, seconds for each capture process.
    """
    while frame is not None and frame.f_globals.get("__name__") in _IMPORT_SYSTEM:
        frame = frame.f_back
    return (
        frame is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in clients
        and frame.f_code.co_code[frame.f_lasti] in _IMPORT_OPCODES
    )


class _LazyName:
    """Stands for a function or class of a lazy module, imported by name."""

    def __init__(self, resolve: Callable[[], Any], name: str) -> None:
        self.__dict__.update(_resolve=functools.cache(resolve), _name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolve()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolve(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._resolve(), name, value)

    def __getitem__(self, item: Any) -> Any:
        return self._resolve()[item]

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._resolve(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._resolve())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._resolve())

    def __eq__(self, other: object) -> bool:
        return bool(self._resolve() == (other._resolve() if isinstance(other, _LazyName) else other))

    def __hash__(self) -> int:
        return hash(self._resolve())

    def __or__(self, other: Any) -> Any:
        return self._resolve() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._resolve()

    def __repr__(self) -> str:
        return f"<{self._name}, imported when it is used>"


_deferred: list[Callable[..., Any]] = []
"""The functions that `deferred_compilation` has made."""


def calls_deferred(kinds: Iterable[type]) -> bool:
    """Whether one of these classes, or of their bases, has an attribute whose compilation was deferred."""
    bases = {base for kind in kinds for base in kind.__mro__}
    return any(value is function for base in bases for value in vars(base).values() for function in _deferred)


@contextlib.contextmanager
def deferred_compilation() -> Iterator[None]:
    """`torch.compile` of a plain function inside waits for the function's first call."""
    import torch

    compile_now = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if not inspect.isfunction(model):
            return compile_now(model, **options)
        compiled = functools.cache(functools.partial(compile_now, model, **options))

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return called(compiled(), *args, **kwargs)

        _deferred.append(call)
        call._torchdynamo_inline = model  # type: ignore[attr-defined] # what a graph around it shall trace
        call._torchdynamo_orig_callable = model  # type: ignore[attr-defined]
        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now
