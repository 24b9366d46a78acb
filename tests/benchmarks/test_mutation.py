"""Mutation testing: which faults are put into a file, and that tests which notice one are told from those that do not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from coverage import CoverageData

from benchmarks.mutation.covering import Covering, statement
from benchmarks.mutation.mutants import ROOMS, all_mutants, in_order, is_equivalent, mutants_of, sample
from benchmarks.mutation.rooms import stages
from benchmarks.mutation.table import CAUGHT, EQUIVALENT, SURVIVED, Judged, Result, load_judged, markdown, outcome
from benchmarks.mutation.trial import Bench

ROOT = Path(__file__).parents[2]


def changes(source: str) -> list[tuple[str, str, str]]:
    """(kind, before, after) of a file's mutants."""
    return [(m.kind, m.before, m.after) for m in mutants_of("a.py", source.encode())]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", [("comparison", "a < b", "a <= b")]),
        (
            "x = a is not b in c",
            [("comparison", "a is not b in c", f"a {op} c") for op in ("is b in", "is not b not in")],
        ),
        ("x = a * b", [("arithmetic", "a * b", "a / b")]),
        ("x = min(a, b)", [("arithmetic", "min(a, b)", "max(a, b)")]),
        ("x += a", [("statement", "x += a", "pass"), ("arithmetic", "x += a", "x -= a")]),
        ("x = True", [("constant", "True", "False")]),
        ("x = -7", [("constant", "7", "8")]),
        ("x = 2.5, 0.0", [("constant", "2.5", "5.0"), ("constant", "0.0", "1.0")]),
        ("x = a and b", [("condition", "a and b", "a or b")]),
        ("x = not a", [("condition", "not a", "a")]),
        ("x = a if b else c", [("condition", "a if b else c", "a if not b else c")]),
        ("if a:\n  f()", [("condition", "a", "not a"), ("statement", "f()", "pass")]),
        ("def f(): return x", [("return", "return x", "return None")]),
        ("x.y = z", [("statement", "x.y = z", "pass")]),
        ("raise E(1)", [("statement", "raise E(1)", "pass")]),
    ],
)
def test_faults(source: str, expected: list[tuple[str, str, str]]) -> None:
    """One of each kind."""
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A text."""\nx = "a" + b',
        "assert a < 1",
        "def f(x: int | None = None) -> A | B: return None",
        "@cache(1)\nclass A(B, x=1): pass",
        "X: TypeAlias = A | B",
        "x: A | B",
        "if TYPE_CHECKING:\n  f()",
        "__all__ = [1]",
        "x = zip(a, strict=True)",
        "x = f'{a + 1}'",
        "import a",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    """Texts, annotations, decorators, assertions, what only type checkers see."""
    assert changes(source) == []


def test_a_fault_is_put_where_it_was_found() -> None:
    """The rest of the file stays, letters of several bytes before it included; equal faults are counted."""
    content = 'x = "µ", a + b\ny = a + b\nx = "µ", a + b\n'.encode()
    mutants = mutants_of("a.py", content)
    assert [(m.line, m.nth) for m in mutants] == [(1, 0), (2, 0), (3, 1)]
    assert mutants[1].apply(content).decode() == 'x = "µ", a + b\ny = (a - b)\nx = "µ", a + b\n'
    assert mutants[2].apply(content).decode() == 'x = "µ", a + b\ny = a + b\nx = "µ", (a - b)\n'


def test_keys_survive_changes_elsewhere() -> None:
    """Lines before a mutant do not change its key, nor its place among the others."""
    before, after = b"x = a + b\ny = c < 1\n", b"import z\n\nx = a + b\ny = c < 1\n"
    keys = [[m.key for m in in_order(mutants_of("a.py", content), 3)] for content in (before, after)]
    assert keys[0] == keys[1] and len(set(keys[0])) == 3
    orders = {tuple(m.key for m in in_order(mutants_of("a.py", before), seed)) for seed in range(8)}
    assert len(orders) > 1


def test_code_that_compiles_alike_is_equivalent() -> None:
    """A statement that does nothing may go; a constant may not change."""
    assert is_equivalent(b"if 0:\n  f()\n", b"if 0:\n  pass\n")
    assert is_equivalent(b"x = 1\n", b"\n\nx = 1\n")
    assert not is_equivalent(b"def f(): return 1\n", b"def f(): return 2\n")
    assert not is_equivalent(b"x = 1\n", b"x = True\n")


def test_more_mutants_begin_with_fewer() -> None:
    """Ten of a room are the first of twenty, and are in that room."""
    few, many = (sample(ROOT, 0, count, "^solvers/") for count in (10, 20))
    assert many[:10] == few and all(m.room == "solvers" for m in many)


def test_every_source_file_has_tests() -> None:
    """rooms.toml knows tests for each, and names none that is not there; those named after a file come first."""
    for room in ROOMS:
        for path in (ROOT / room).glob("**/*.py"):
            assert stages(ROOT, str(path.relative_to(ROOT)))
    assert stages(ROOT, "solvers/joint.py")[0] == ("tests/solvers/test_joint.py",)
    with pytest.raises(ValueError, match="no tests for"):
        stages(ROOT, "elsewhere/a.py")


def test_judged_mutants_are_still_there() -> None:
    """What a person found to be equivalent is a mutant of today's source."""
    for row in load_judged():
        assert (row.source, row.after) in {(m.source, m.after) for m in all_mutants(ROOT, f"^{re.escape(row.file)}$")}


SOURCE = """\
LIMIT = 3


def f(x, y=1):
    if (
        x > LIMIT
    ):
        return g(
            x,
        )
    return y
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [(1, (1, 1, False)), (4, (4, 4, False)), (6, (5, 7, True)), (9, (8, 10, True)), (11, (11, 11, True))],
)
def test_the_statement_around_a_line(line: int, expected: tuple[int, int, bool]) -> None:
    """Its own lines, without those of statements inside; the head of a function runs when its file is imported."""
    assert statement(SOURCE.encode(), line) == expected


def test_the_tests_that_run_a_line(tmp_path: Path) -> None:
    """Fast ones first; what a fixture sets up counts for all that share it, the head of a file for all that run any of it."""
    (tmp_path / "a.py").write_text(SOURCE)
    data = CoverageData(str(tmp_path / "lines"))
    for context, lines in (("", [1, 4]), ("t::slow|run", [5, 8]), ("t::quick|run", [8]), ("t::set|setup", [11])):
        data.set_context(context)
        data.add_lines({str(tmp_path / "a.py"): lines})
    data.write()
    facts = {
        "t::slow": {"seconds": 20.0, "shared": ["::tmp_path_factory"]},
        "t::quick": {"seconds": 1.0, "shared": []},
        "t::set": {"seconds": 3.0, "shared": ["tests::made", "::tmp_path_factory"]},
        "t::also": {"seconds": 5000.0, "shared": ["tests::made"]},
    }
    (tmp_path / "tests-1.json").write_text(json.dumps(facts))
    covering = Covering(tmp_path, tmp_path)
    mutants = {
        m.before: m for m in mutants_of("a.py", SOURCE.encode()) if m.kind in ("constant", "comparison", "return")
    }
    found = {before: covering.stages(mutant, SOURCE.encode()) for before, mutant in mutants.items()}
    assert found["x > LIMIT"] == (("t::slow",),)
    assert found["return g(x)"] == (("t::quick",), ("t::slow",))
    assert found["return y"] == (("t::set",),)  # the other one takes too long
    assert covering.tests(mutants["return y"], SOURCE.encode()) == {"t::set", "t::also"}
    assert found["3"] == found["1"] == (("t::quick", "t::set"), ("t::slow",))
    with pytest.raises(ValueError, match="has no record of tests"):
        Covering(tmp_path / "none", tmp_path)


def result(file: str, how: str) -> Result:
    """A mutant's result."""
    return Result(
        file=file, line=3, kind="constant", source="x = 1", before="1", after="2", outcome=how, by="", seconds=1.0
    )


def test_the_table() -> None:
    """Shares are of the mutants that change behaviour; a caught one stays caught whatever was judged."""
    results = {
        str(i): result(f, how)
        for i, (f, how) in enumerate(
            [("a/x.py", CAUGHT), ("a/x.py", SURVIVED), ("a/y.py", SURVIVED), ("b/z.py", CAUGHT), ("b/z.py", CAUGHT)]
        )
    }
    judged = (Judged(file="a/y.py", source="x = 1", after="2", why="nobody reads it"),)
    assert [outcome(r, judged) for r in results.values()] == [CAUGHT, SURVIVED, EQUIVALENT, CAUGHT, CAUGHT]
    assert outcome(result("a/y.py", CAUGHT), judged) == CAUGHT
    page = markdown(results, judged, 0).splitlines()
    assert [line for line in page if line.startswith("| ")][1:] == [
        "| a | 3 | 1 | 1 | 1 | 50% |",
        "| b | 2 | 2 | 0 | 0 | 100% |",
        "| **all** | 5 | 3 | 1 | 1 | 75% |",
    ]
    assert "- `a/x.py:3` constant: `1` → `2`" in page and "- `a/y.py:3` constant: `1` → `2`: nobody reads it" in page


def test_trials_in_a_copy(tmp_path: Path) -> None:
    """A test that looks at the sign catches a missing result, not another factor; one that fails in any case catches nothing.

    The checkout is as it was.
    """
    tree = tmp_path / "tree"
    tree.mkdir()
    source = "def double(x):\n    return x * 2\n"
    (tree / "source.py").write_text(source)
    (tree / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')
    (tree / "test_it.py").write_text(
        "import source\n\ndef test_wrong():\n    assert False\n\ndef test_sign():\n    assert source.double(3) > 0\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    mutants = {m.after: m for m in mutants_of("source.py", source.encode())}
    bench = Bench(tree, tmp_path / "copy", limit_s=600.0, preload=())
    tests = (("test_it.py",),)
    assert bench.trial(mutants["return None"], tests).failed == "test_it.py::test_sign"
    assert bench.trial(mutants["3"], tests).passed
    assert (tree / "source.py").read_text() == source
