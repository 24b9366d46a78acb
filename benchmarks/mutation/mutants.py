"""The small faults that can be put into a source file, and their order.

Kinds: a comparison moves its boundary or turns around; an arithmetic or bit operator becomes its counterpart; min and max
change places; a number grows, True and False change places; `and` and `or` change places, a `not` goes, a condition is
negated; a statement (a call, an assignment to an attribute or an element, `x += y`, `raise`, `continue`, `break`) goes; a
returned value becomes None.

Left alone: annotations, decorators, docstrings and all other texts, what is raised, assertions, `if TYPE_CHECKING`,
`__all__` and zip's `strict`.

Mutants are equivalent if Python compiles both files to the same code (`is_equivalent`); those that a person has judged to be
are listed in equivalent.toml.
"""

from __future__ import annotations

import ast
import copy
import dis
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType

ROOMS = ("autosac", "estimator", "memory_sim", "runtime_sim", "solvers", "integrations")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_EXTREMES = {"min": "max", "max": "min"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: bytes `start` to `end` of `file` (relative to the repository) become `text`.

    `before` and `after` are the expression or statement for people; `source` is the whole line, without its indentation, and
    `nth` counts alike faults on alike lines of the file.
    """

    file: str
    line: int
    start: int
    end: int
    text: str
    kind: str
    before: str
    after: str
    source: str
    nth: int = 0

    @property
    def key(self) -> str:
        """The same after changes elsewhere in the file."""
        parts = (self.file, self.source, self.kind, self.before, self.after, str(self.nth))
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()

    @property
    def room(self) -> str:
        """The folder that holds the file."""
        return str(Path(self.file).parent)

    def apply(self, content: bytes) -> bytes:
        """The file with the fault."""
        return content[: self.start] + self.text.encode() + content[self.end :]


def all_mutants(root: Path, pattern: str = "") -> list[Mutant]:
    """The mutants of all rooms below a checkout, by file and place, of files whose path has this regular expression."""
    found: list[Mutant] = []
    for room in ROOMS:
        for folder, _, names in sorted(_walk(root / room)):
            for name in sorted(n for n in names if n.endswith(".py")):
                path = Path(folder, name)
                file = str(path.relative_to(root))
                found += mutants_of(file, path.read_bytes()) if re.search(pattern, file) else []
    return found


def _walk(folder: Path) -> Iterator[tuple[str, None, list[str]]]:
    """Folders and their files; links (autosac/estimator) are not followed."""
    files = [p.name for p in folder.iterdir() if p.is_file()]
    yield str(folder), None, files
    for below in folder.iterdir():
        if below.is_dir() and not below.is_symlink() and below.name != "__pycache__":
            yield from _walk(below)


def in_order(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """The mutants in an order that looks random and depends on the seed and on each mutant's key alone."""
    return sorted(mutants, key=lambda m: hashlib.blake2b(f"{seed} {m.key}".encode(), digest_size=8).digest())


def sample(root: Path, seed: int, count: int, pattern: str = "") -> list[Mutant]:
    """The first `count` of the mutants in order that are not known to be equivalent; `pattern` as in `all_mutants`."""

    def differs(mutant: Mutant) -> bool:
        content = (root / mutant.file).read_bytes()
        return not is_equivalent(content, mutant.apply(content))

    return list(islice(filter(differs, in_order(all_mutants(root, pattern), seed)), count))


def mutants_of(file: str, content: bytes) -> list[Mutant]:
    """The mutants of one file, by place."""
    tree = ast.parse(content)
    lines = content.split(b"\n")
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    seen: dict[tuple[str, ...], int] = {}
    found = []
    for node, kind, changed in _changes(tree):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        after = ast.unparse(changed)
        source = lines[node.lineno - 1].strip().decode()
        same = (source, kind, ast.unparse(node), after)
        nth = seen[same] = seen.get(same, -1) + 1
        text = f"({after})" if isinstance(changed, ast.expr) else after
        mutant = Mutant(
            file=file,
            line=node.lineno,
            start=start,
            end=end,
            text=text,
            kind=kind,
            before=ast.unparse(node),
            after=after,
            source=source,
            nth=nth,
        )
        found.append(mutant)
    return found


def is_equivalent(content: bytes, mutated: bytes) -> bool:
    """Whether two sources compile to the same code, but for line numbers."""
    return _code(compile(content, "m", "exec", dont_inherit=True)) == _code(
        compile(mutated, "m", "exec", dont_inherit=True)
    )


def _code(code: CodeType) -> list[tuple[str, object]]:
    """Instructions with what they work on; jumps lead to offsets, which NOPs move: those count."""
    return [
        (i.opname, _code(i.argval) if isinstance(i.argval, CodeType) else (type(i.argval), repr(i.argval)))
        for i in dis.get_instructions(code)
    ]


_Change = tuple[ast.expr | ast.stmt, str, ast.expr | ast.stmt]


def _changes(tree: ast.AST) -> Iterator[_Change]:
    """What can be put in the place of which node."""
    for node in ast.iter_child_nodes(tree):
        if _is_left_alone(node):
            continue
        if isinstance(node, ast.expr):
            yield from ((node, kind, changed) for kind, changed in _expressions(node))
        elif isinstance(node, ast.stmt):
            yield from _statements(node)
        yield from _changes(_without_annotations(node))


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _without_annotations(node: ast.AST) -> ast.AST:
    """A shallow copy without what is left alone inside."""
    node = copy.copy(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node.decorator_list, node.returns = [], None
        arguments = copy.copy(node.args)
        parts = ("posonlyargs", "args", "kwonlyargs")
        for part in parts:
            setattr(arguments, part, [])
        arguments.vararg = arguments.kwarg = None
        node.args = arguments
    elif isinstance(node, ast.ClassDef):
        node.decorator_list, node.bases, node.keywords = [], [], []
    elif isinstance(node, ast.AnnAssign):
        node.annotation = ast.Constant(None)
    elif isinstance(node, ast.Raise):
        node.exc = node.cause = None
    return node


def _statements(node: ast.stmt) -> Iterator[_Change]:
    if _is_removable(node):
        yield node, "statement", ast.Pass()
    elif isinstance(node, ast.Return) and not (node.value is None or _is_none(node.value)):
        yield node, "return", ast.Return(ast.Constant(None))
    if isinstance(node, ast.If):
        yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        changed = copy.copy(node)
        changed.op = _ARITHMETIC[type(node.op)]()
        yield node, "arithmetic", changed


def _is_removable(node: ast.stmt) -> bool:
    """Without it the names that follow still exist."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            compare = copy.copy(node)
            compare.ops = [*node.ops[:i], _COMPARISONS[type(op)](), *node.ops[i + 1 :]]
            yield "comparison", compare
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node.left, node.right):
        binary = copy.copy(node)
        binary.op = _ARITHMETIC[type(node.op)]()
        yield "arithmetic", binary
    elif isinstance(node, ast.BoolOp):
        boolean = copy.copy(node)
        boolean.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "condition", boolean
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition", node.operand
    elif isinstance(node, ast.IfExp):
        chosen = copy.copy(node)
        chosen.test = ast.UnaryOp(ast.Not(), node.test)
        yield "condition", chosen
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield "constant", ast.Constant(_other(node.value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _EXTREMES:
        call = copy.copy(node)
        call.func = ast.Name(_EXTREMES[node.func.id])
        yield "arithmetic", call


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes
    )


def _other(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 2 * value or 1.0
