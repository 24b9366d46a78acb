"""What a generated kernel computes, read off its source: instructions by the unit that runs them.

Inductor fuses whatever a consumer needs into it, and does not weigh what that costs. A value that depends on a row alone is
computed anew for each element of the row if the kernel does not walk rows: float8's scales by row, which torchao computes in
double precision, then cost more than the traffic.

An operation is counted once for each element of its operands' block. A Triton function is counted by the instructions that
it compiles to on a GPU of NVIDIA (`_FUNCTIONS`; about, as compilers differ).
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_HEAD = re.compile(r"^def [\w.]+\(", re.M)
_BLOCK = re.compile(r"\b[XYZR]\d?_?BLOCK\b")
# Rows of a block, and the side of a tile, that Inductor's heuristics choose for large kernels.
_ROW_BLOCK, _TILE = 8, 32


class Instructions(NamedTuple):
    """How many: `special` ones run on the units for reciprocals, exponentials and conversions from and to 64 bits; `atomic`
    additions in the L2.
    """

    single: int = 1
    special: int = 0
    double: int = 0
    atomic: int = 0


class _Value(NamedTuple):
    """An expression: the axes ("x", "r") along which it differs, and whether it is a double."""

    axes: frozenset[str] = frozenset()
    double: bool = False


_ACCESS, _ATOMIC = Instructions(2), Instructions(2, atomic=1)
_DIVISION, _DOUBLE_DIVISION = Instructions(8, 1), Instructions(6, 1, 12)
_FUNCTIONS = {
    "exp": Instructions(4, 1),
    "exp2": Instructions(3, 1),
    "log": Instructions(8, 1),
    "log2": Instructions(8, 1),
    "sigmoid": Instructions(6, 2),
    "rsqrt": Instructions(2, 1),
    "sqrt": Instructions(4, 1),
    "tanh": Instructions(14, 2),
    "erf": Instructions(20, 1),
    "sin": Instructions(20),
    "cos": Instructions(20),
    "pow": Instructions(30, 2),
    "log1p": Instructions(20, 1),
    "expm1": Instructions(20, 1),
    "online_softmax_combine": Instructions(34, 2),
}
_DOUBLE_FUNCTIONS, _DOUBLE_OTHER = {"maximum": 3, "minimum": 3, "abs": 1, "floor": 2, "where": 2}, 30
_ADDRESSED = ("load", "store", "atomic_add")
_SHAPED = ("full", "zeros", "arange", "program_id", "num_programs", "device_assert", "debug_barrier")
_REDUCTIONS = ("sum", "max2", "min2", "any", "prod", "welford", "welford_reduce", "online_softmax_reduce")
_TO = {"float32": 0, "bfloat16": 2, "float16": 2}  # instructions, from other types of at most 32 bits; to others 1


def arithmetic(source: str, sizes: Mapping[str, int]) -> Instructions:
    """The instructions of a kernel whose loops and blocks have these sizes ("x", "y", "r0_"); without those of addresses."""
    axes: dict[str, int] = {}
    for name, size in sizes.items():
        axes[name[0]] = axes.get(name[0], 1) * size
    start = _HEAD.search(source)
    assert start is not None  # Inductor writes a function
    counter = _Counter()
    counter.visit(ast.parse(_HEAD.sub("def kernel(", source[start.start() :])))
    block = 1 if "ReductionHint.INNER" in source else _ROW_BLOCK if axes.get("r", 1) > 1 else _TILE
    counts = [[_times(along, axes, block) * n for n in found] for along, found in counter.found.items()]
    return Instructions(*map(sum, zip(Instructions(0), *counts, strict=True)))


def _times(along: frozenset[str], axes: Mapping[str, int], block: int) -> int:
    """How often an operation runs whose value differs along these axes: once for each block of the others. A row is one."""
    others = math.prod(size for axis, size in axes.items() if axis not in along and axis != "r")
    return math.prod(axes.get(axis, 1) for axis in along) * max(1, others // block) if along else 0


class _Counter(ast.NodeVisitor):
    """Walks a kernel's statements. `found`: instructions by the axes of what they compute."""

    def __init__(self) -> None:
        self.found: dict[frozenset[str], Instructions] = {}
        self._known: dict[str, _Value] = {}
        self._is_address = False

    def visit_Assign(self, node: ast.Assign) -> None:
        """Of indices, constants and what is computed."""
        targets = [target.id for target in ast.walk(node.targets[0]) if isinstance(target, ast.Name)]
        with self._addressing(not any("tmp" in target for target in targets)):
            value = self._value(node.value)
        for target in targets:
            before = self._known.get(target, _Value())
            kept = before.axes if target.startswith("_tmp") else frozenset()  # an accumulator is as large as a block
            self._known[target] = _Value(value.axes | kept, value.double)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Stores."""
        self._value(node.value)

    def _value(self, node: ast.expr) -> _Value:
        if isinstance(node, ast.Name):
            return self._known.get(node.id, _Value())
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self._value(node.value)
        operands = [self._value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        value = _joined(operands)
        if isinstance(node, ast.BinOp | ast.Compare | ast.UnaryOp):
            self._add(value, _operation(node, value.double))
        return value._replace(double=value.double and not isinstance(node, ast.Compare))

    def _call(self, node: ast.Call) -> _Value:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == "to" and isinstance(node.func, ast.Attribute):
            return self._converted(self._value(node.func.value), ast.unparse(node.args[0]).removeprefix("tl."))
        if name in _ADDRESSED:
            return self._accessed(node, _ATOMIC if name == "atomic_add" else _ACCESS)
        if name in _SHAPED:
            return _shaped(ast.unparse(node))
        value = _joined([self._value(argument) for argument in node.args])
        if name == "broadcast_to":  # a thread computes what is the same for all of its elements once
            return value
        if name in _REDUCTIONS:
            return value._replace(axes=value.axes - {"r"})
        self._add(value, _function(name, value.double))
        return value

    def _converted(self, value: _Value, to: str) -> _Value:
        if to == "float64" or value.double:
            self._add(value, Instructions(0, special=1))
        else:
            self._add(value, Instructions(_TO.get(to, 1)))
        return value._replace(double=to == "float64")

    def _accessed(self, node: ast.Call, instructions: Instructions) -> _Value:
        """A load or a store, whose address differs along some axes, or its value does."""
        with self._addressing(True):
            value = _joined([self._value(argument) for argument in node.args])
        self._add(value, instructions)
        return value._replace(double=False)

    @contextlib.contextmanager
    def _addressing(self, is_address: bool) -> Iterator[None]:
        """Instructions of addresses are not counted."""
        before, self._is_address = self._is_address, self._is_address or is_address
        yield
        self._is_address = before

    def _add(self, value: _Value, more: Instructions) -> None:
        if not self._is_address:
            old = self.found.get(value.axes, Instructions(0))
            self.found[value.axes] = Instructions(*(a + b for a, b in zip(old, more, strict=True)))


def _joined(values: Sequence[_Value]) -> _Value:
    return _Value(frozenset().union(*(value.axes for value in values)), any(value.double for value in values))


def _operation(node: ast.expr, double: bool) -> Instructions:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _DOUBLE_DIVISION if double else _DIVISION
    return Instructions(0, double=1) if double else Instructions(1)


def _function(name: str, double: bool) -> Instructions:
    if double:
        return Instructions(0, double=_DOUBLE_FUNCTIONS.get(name, _DOUBLE_OTHER))
    return _FUNCTIONS.get(name, Instructions(1))


def _shaped(text: str) -> _Value:
    """``tl.full([XBLOCK, R0_BLOCK], ...)``: as large as a block."""
    return _Value(frozenset(block[0].lower() for block in _BLOCK.findall(text)), "float64" in text)
