"""Which tests run the line of a mutant, as a run of all tests under coverage has recorded (`benchmarks.mutation.contexts`).

A line that runs while a test sets up what it shares with others counts for all that share it. A line that runs only when
its file is imported counts for all tests that run anything of the file, and for those that look at every class.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData

from benchmarks.mutation.mutants import Mutant

# Tests are run in stages of at most these seconds together, the fast ones first; those beyond the last are not run.
_STAGES_S = (8.0, 60.0, 400.0)
# They read the classes of all rooms, which were imported before.
_OF_CLASSES = ("tests/golden/test_defaults.py::test_defaults",)


class Covering:
    """The tests of every line of a checkout."""

    def __init__(self, folder: Path, root: Path) -> None:
        """Read what runs of tests have left in `folder` and in folders below. ValueError if there is nothing."""
        self._root = root.resolve()
        self._lines: dict[str, dict[int, set[str]]] = {}
        self._seconds: dict[str, float] = {}
        self._sharing: dict[str, set[str]] = defaultdict(set)
        self._shared: dict[str, list[str]] = {}
        for file in sorted(folder.glob("**/tests-*.json")):
            for name, facts in json.loads(file.read_text()).items():
                self._seconds[name] = facts["seconds"]
                self._shared[name] = [each for each in facts["shared"] if not each.startswith("::")]
                for each in self._shared[name]:
                    self._sharing[each].add(name)
        for file in sorted(folder.glob("**/lines")):
            self._read(file)
        if not self._seconds or not self._lines:
            raise ValueError(f"{folder} has no record of tests under coverage: see benchmarks/mutation/contexts.py")

    def _read(self, file: Path) -> None:
        data = CoverageData(str(file))
        data.read()
        for measured in data.measured_files():
            path = Path(measured).resolve()
            if path.is_relative_to(self._root):
                lines = self._lines.setdefault(str(path.relative_to(self._root)), defaultdict(set))
                for line, contexts in data.contexts_by_lineno(measured).items():
                    lines[line].update(contexts)

    def tests(self, mutant: Mutant, content: bytes) -> set[str]:
        """The tests that run the statement with the mutant; `content` is its file."""
        lines = self._lines.get(mutant.file, {})
        first, last, in_function = statement(content, mutant.line)
        contexts = {c for line in range(first, last + 1) for c in lines.get(line, ())}
        if in_function:
            return set(self._named(contexts))
        contexts = {c for found in lines.values() for c in found}
        return {*self._named(contexts), *(name for name in _OF_CLASSES if name in self._seconds)}

    def _named(self, contexts: Iterable[str]) -> Iterable[str]:
        for context in contexts:
            name, _, when = context.rpartition("|")
            if name in self._seconds:
                yield name
                for each in self._shared[name] if when == "setup" else ():
                    yield from self._sharing[each]

    def stages(self, mutant: Mutant, content: bytes) -> tuple[tuple[str, ...], ...]:
        """These tests in stages."""
        found: list[list[str]] = [[] for _ in _STAGES_S]
        total_s = 0.0
        for name in sorted(self.tests(mutant, content), key=lambda name: (self._seconds[name], name)):
            total_s += self._seconds[name]
            stage = next((i for i, most_s in enumerate(_STAGES_S) if total_s <= most_s), None)
            if stage is not None:
                found[stage].append(name)
        return tuple(tuple(stage) for stage in found if stage)


def statement(content: bytes, line: int) -> tuple[int, int, bool]:
    """The first and the last line of the innermost statement around a line, without the statements inside it, and whether it
    is in the body of a function.
    """
    around = [n for n in ast.walk(ast.parse(content)) if isinstance(n, ast.stmt) and n.lineno <= line <= _end(n)]
    in_function = any(n.body[0].lineno <= line for n in around if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    if not around:
        return line, line, False
    inner = max(around, key=lambda n: n.lineno)
    below = [n.lineno - 1 for n in ast.walk(inner) if isinstance(n, ast.stmt) and n.lineno > inner.lineno]
    return inner.lineno, max(line, min([_end(inner), *below])), in_function


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
