"""How a module becomes a unit: by its class, not by a wrapper around it.

`become` gives a module a subclass of its own class whose forward does something around the original one. The module stays the
same object with the same name, parameters, hooks and attributes; hooks on it run outside of what is checkpointed, once, as
they do without checkpointing. (A wrapper would keep attributes that others set on the module from reaching it.)

What the module sets on its class is set on the original one, which all its modules share, and making the subclass runs no code
of the user's: neither ``__init_subclass__`` nor a metaclass. The subclass's forward tells of itself what the original one
tells: signature, names, documentation and attributes, by which other code may decide how to call the module.

The compiler keeps what it has made of a forward with the forward's code, and guards on the module's class, but not on what a
policy decides. So units with different policies are of different *variants*: classes, each with its own code for forward. Each
variant is compiled once, within Dynamo's limit of recompilations for one code; equal policies share a variant.
"""

from __future__ import annotations

import abc
import functools
import inspect
import types
from typing import Any

import torch
from torch import nn

from autosac.errors import PlanError
from autosac.integrations.operators.calling import signature_of

_made: dict[tuple[type, type, str, str], type] = {}
_originals: dict[type, type] = {}
_COMPILERS = "_torchdynamo"  # what the compiler has noted about a function is about its own code


class UnitModule(nn.Module):
    """The base of what modules become. `_autosac` is what a subclass keeps of its own beside the module.

    It is None in a module that was made of a unit by its class, as a slice of an nn.Sequential is: that is no unit.
    """

    _autosac: Any = None
    _autosac_variant = ""

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing: that of the original class has run for the original class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the original class: the subclass has no name that could be looked up."""
        found = super().__reduce_ex__(protocol)
        if isinstance(found, str) or found[0].__name__ != "__newobj__" or len(found[1]) != 1:
            return found
        kind, original = type(self).__bases__[:2]
        return (new, (kind, original, self._autosac_variant), *found[2:])

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the module had; a forward that was set on the object itself comes first."""
        inner = self.__dict__.get("_autosac_forward")
        return (inner or super().forward)(*args, **kwargs)


def become(module: nn.Module, kind: type[UnitModule], state: Any, variant: str = "") -> None:
    """Make `module` a `kind` of this variant, which keeps `state`. PlanError if its class does not allow that."""
    own = module.__dict__.get("forward")
    try:
        module.__class__ = subclass(kind, type(module), variant, own)
    except TypeError as e:
        raise PlanError(f"a module of the class {type(module).__name__} cannot be checkpointed: {e}") from e
    if own is not None:
        del module.__dict__["forward"]
        module.__dict__["_autosac_forward"] = own
    module.__dict__["_autosac"] = state


def can_become(module: nn.Module) -> bool:
    """Whether the module's class allows that. Python changes no class whose objects are laid out in another way: of
    ``class Block(ABC, nn.Module)``, for one, where the first base has no dictionary.
    """
    original = type(module)
    try:
        module.__class__ = subclass(UnitModule, original)
    except TypeError:
        return False
    module.__class__ = original
    return True


def subclass(kind: type[UnitModule], original: type, variant: str = "", own: Any = None) -> type:
    """The class of the modules of `original` that have become a `kind`. It has the name of the original.

    `own`: a forward that was set on the object itself, for which the class's forward stands.
    """
    shown = None if own is None else _signature(own, is_bound=True)
    key = (kind, original, variant, str(shown or ""))
    made = _made.get(key)
    if made is None:
        body: dict[str, Any] = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "_autosac_variant": variant,
        }
        if kind.forward is not nn.Module.forward:
            body["forward"] = _with_own_code(kind.forward, bool(variant))
            _tell(body["forward"], original, own, shown)
        meta = _transparent(type(original))
        create: Any = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type
        made = _made[key] = create.__new__(meta, original.__name__, (kind, original), body)
        _originals[made] = original
        torch.serialization.add_safe_globals([(made, f"{__name__}.{len(_made)}")])  # to load it, `original` must be one
    return made


def is_class_of_units(cls: type) -> bool:
    """Whether modules of this class have become units, or it is the class that they have become."""
    return cls in _originals or cls in _originals.values()


def _tell(function: Any, original: type, own: Any, shown: inspect.Signature | None) -> None:
    """The function tells of itself what the class's forward tells, or one that the object has (`own`, called as `shown`)."""
    forward: Any = getattr(original, "forward", None) if own is None else own
    # From Python 3.14 on these have annotations as they stand: names in them may be unknown.
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(forward, name):
            setattr(function, name, getattr(forward, name))
    if own is None:
        attributes = getattr(forward, "__dict__", {}).items()
        vars(function).update((name, value) for name, value in attributes if not name.startswith(_COMPILERS))
        found = inspect.getattr_static(original, "forward")
        is_bound = isinstance(found, staticmethod | classmethod) or not hasattr(found, "__get__")
        shown = _signature(forward, is_bound=is_bound)
    vars(function).update(__signature__=shown, __wrapped__=forward)


def _signature(forward: Any, *, is_bound: bool) -> inspect.Signature | None:
    """How the forward is called, with the module first; None if it does not tell."""
    try:
        shown = signature_of(forward)
        if not is_bound:
            return shown
        module = inspect.Parameter("self_" if "self" in shown.parameters else "self", inspect.Parameter.POSITIONAL_ONLY)
        return shown.replace(parameters=[module, *shown.parameters.values()])
    except (TypeError, ValueError):
        return None


@functools.cache
def _transparent(metaclass: type) -> type:
    """The metaclass of the subclasses: attributes that are set on one of them are set on the original class."""
    base: Any = metaclass

    def set_attribute(cls: type, name: str, value: Any) -> None:
        base.__setattr__(_originals.get(cls, cls), name, value)

    def delete_attribute(cls: type, name: str) -> None:
        base.__delattr__(_originals.get(cls, cls), name)

    return type(metaclass.__name__, (metaclass,), {"__setattr__": set_attribute, "__delattr__": delete_attribute})


def _with_own_code(function: Any, is_variant: bool) -> Any:
    """The same function; of a variant's the compiler keeps what it makes apart from the original's."""
    code = function.__code__.replace() if is_variant else function.__code__
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def new(kind: type[UnitModule], original: type, variant: str = "") -> nn.Module:
    """A unit without its state, which whoever unpickles it sets."""
    made: nn.Module = nn.Module.__new__(subclass(kind, original, variant))
    return made


def is_transformed() -> bool:
    """Whether a function transform (torch.func), forward-mode differentiation or a tracer is at work.

    There saved tensors cannot be exchanged, or carry more than their values.
    """
    autograd: Any = torch._C._autograd
    jit: Any = torch.jit
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or not autograd._saved_tensors_hooks_is_enabled()
        or jit.is_tracing()
    )
