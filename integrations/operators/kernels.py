"""Which of its arguments a Triton kernel writes to, from its source.

A kernel writes by ``tl.store`` and ``tl.atomic_*`` (or ``descriptor.store``), to addresses that are worked out from its
parameters. `written_parameters` follows assignments: a name is *derived* from every parameter that its expression mentions,
directly or by other names, except inside of ``tl.load``, which returns contents and no address. What a store's address is
derived from is written. All that is passed to any other function that is not Triton's (a kernel may call other kernels) counts
as written, too. So the answer may name too many parameters, but not too few; None: nothing can be said.

PyTorch answers the same question for kernels that it compiles (``torch._higher_order_ops.triton_kernel_wrap``), but with
Triton's compiler, which needs a GPU's driver. A plan that is made without a GPU has to see what its job will see.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autosac.integrations.operators.calling import signature_of

_LANGUAGE = "triton.language"
_UNKNOWN = (ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Addresses that are contents of memory, and text that is handed to the assembler.
_OPAQUE = ("pointer_type", "inline_asm_elementwise", "extra")


def written_arguments_of(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Of a launch of the kernel (a ``JITFunction``) with these arguments, those that it may write to; None: any."""
    function: Any = getattr(kernel, "fn", None)
    written = written_parameters(function) if inspect.isfunction(function) else None
    if written is None:
        return None
    names = list(signature_of(function).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [value for name, value in given.items() if name in written]


@functools.cache
def written_parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The parameters whose memory this kernel may write to. See the module's docstring."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef) or found.args.vararg or found.args.kwarg:
        return None
    inside = [node for statement in found.body for node in ast.walk(statement)]
    if any(isinstance(node, _UNKNOWN) for node in inside):
        return None
    if any(isinstance(node, ast.Attribute | ast.Name) and _word(node) in _OPAQUE for node in inside):
        return None
    arguments = (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)
    names = {argument.arg: frozenset({argument.arg}) for argument in arguments}
    return _Kernel(inspect.unwrap(function).__globals__, inside, names).written()


class _Kernel:
    """The nodes of one kernel, and what each name may be derived from."""

    def __init__(
        self, outside: Mapping[str, Any], nodes: list[ast.AST], parameters: Mapping[str, frozenset[str]]
    ) -> None:
        self._outside = outside
        self._nodes = nodes
        self._derived = dict(parameters)
        bindings = [binding for node in nodes for binding in _bindings(node)]
        before = -1
        while (now := sum(map(len, self._derived.values()))) > before:  # names only ever become derived from more
            before = now
            for target, value in bindings:
                for name in _names(target):
                    self._derived[name] = self._derived.get(name, frozenset()) | self._of(value)

    def _of(self, node: ast.AST) -> frozenset[str]:
        """The parameters that an expression is derived from."""
        if isinstance(node, ast.Name):
            return self._derived.get(node.id, frozenset())
        if isinstance(node, ast.Call) and self._language(node.func) == "load":
            return frozenset()
        return frozenset().union(*map(self._of, ast.iter_child_nodes(node)))

    def _language(self, function: ast.AST) -> str | None:
        """The name of a function of Triton's language; None for any other one."""
        if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
            return None
        if function.value.id in self._derived:
            return None
        module = self._outside.get(function.value.id)
        return function.attr if getattr(module, "__name__", "") == _LANGUAGE else None

    def written(self) -> frozenset[str]:
        """What the kernel's calls write to."""
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        return frozenset().union(*map(self._written_by, calls))

    def _written_by(self, call: ast.Call) -> frozenset[str]:
        given = (*call.args, *(keyword.value for keyword in call.keywords))
        name = self._language(call.func)
        if name is not None:
            return self._of(_address(call)) if name.startswith(("store", "atomic_")) else frozenset()
        if isinstance(call.func, ast.Name) and call.func.id not in self._outside and hasattr(builtins, call.func.id):
            return frozenset()
        if isinstance(call.func, ast.Attribute) and self._is_of_value(call.func):
            return self._of(call.func.value) if "store" in call.func.attr or "atomic" in call.func.attr else frozenset()
        return frozenset().union(*map(self._of, given))

    def _is_of_value(self, function: ast.Attribute) -> bool:
        """Whether it is a method of what the kernel works with, and no function of a module."""
        names = _names(function.value)
        return all(name in self._derived for name in names) or any(
            isinstance(node, ast.Call) for node in ast.walk(function.value)
        )


def _address(call: ast.Call) -> ast.AST:
    """Where a store writes to: its first argument, or what is passed by a name."""
    if call.args:
        return call.args[0]
    return ast.Tuple(elts=[keyword.value for keyword in call.keywords if keyword.arg not in ("value", "val", "mask")])


def _bindings(node: ast.AST) -> Iterable[tuple[ast.AST, ast.AST]]:
    """What a statement binds, and to what."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, ast.AugAssign | ast.NamedExpr):
        return [(node.target, node.value)]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    if isinstance(node, ast.For):
        return [(node.target, node.iter)]
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return [(node.optional_vars, node.context_expr)]
    return []


def _names(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def _word(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id
