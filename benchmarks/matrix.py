"""Run the tests with every supported PyTorch, TorchTitan and Python, and write the table of `docs/versions.md`.

    python -m benchmarks.matrix [--only WORDS] [--tests PATH ...] [--environment DIR] [--keep] [--list]

Each row of `ROWS` gets an environment of its own under `build/matrix`, which is removed after its run, but for --keep: builds
of PyTorch with CUDA take 6 GB. A Python that the machine lacks leaves its rows as they are. --only takes rows whose name has
all these words, such as ``"2.15 0.3"``; --environment runs the tests in an environment that is there already, and files the
results under the versions that it holds. Results are kept in `benchmarks/matrix.json`, for each row one per folder of tests,
with its date, as soon as that folder has been run; the table is written from them. Ends with 1 if a test of this run failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks/matrix.json"
_PAGE = _ROOT / "docs/versions.md"
_BEGIN, _END = "<!-- table of benchmarks.matrix -->", "<!-- end of the table -->"
_ENVIRONMENTS = _ROOT / "build/matrix"
# What depends on the versions: not the simulators and solvers, which see only traces and numbers.
_TESTS = {
    "0.2": (
        *("capture", "integrations", "end_to_end", "planning", "bad_input", "derivation", "induction", "fuzz"),
        "scripts",  # on the builds of the newer versions, which are for CUDA, the library that stands for it meets theirs
    ),
    "0.3": ("titan03",),
}
_ASK = """
import json, platform
from importlib.metadata import version
print(json.dumps([platform.python_version(), version("torch"), version("torchtitan")]))
"""


@dataclass(frozen=True, order=True)
class Row:
    """Versions that are tested together: Python as ``"3.11"``, torch and torchtitan as pip takes them."""

    torch: str
    torchtitan: str
    python: str

    @property
    def name(self) -> str:
        """``"torch 2.15.0 torchtitan 0.3.0 python 3.11"``."""
        return f"torch {self.torch} torchtitan {self.torchtitan} python {self.python}"


ROWS = (
    *(Row(torch, "0.2.2", "3.11") for torch in ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    *(Row(torch, "0.3.0", "3.11") for torch in ("2.13.0", "2.14.1", "2.15.0")),
    *(Row("2.15.0", "0.3.0", python) for python in ("3.12", "3.13", "3.14")),
)


@dataclass(frozen=True)
class Result:
    """One run of a folder of tests (or of a file): when, how many had which outcome, and which failed."""

    date: str
    passed: int
    skipped: int
    failed: tuple[str, ...]


Results: TypeAlias = dict[Row, dict[str, Result]]
"""By row, then by folder."""


def main() -> int:
    """See the module's docstring."""
    arguments = _arguments()
    if arguments.environment is not None:
        python = arguments.environment / "bin/python"
        release, torch, titan = json.loads(_output(python, "-c", _ASK))
        return _run(python, Row(torch.partition("+")[0], titan, release.rpartition(".")[0]), arguments.tests)
    chosen = [row for row in ROWS if all(word in row.name for word in arguments.only.split())]
    if arguments.list:
        print("\n".join(row.name for row in chosen))
        return 0
    worst = 0
    for row in chosen:
        if shutil.which(f"python{row.python}") is None:
            print(f"{row.name}: there is no python{row.python} on this machine", flush=True)
            continue
        folder = _ENVIRONMENTS / row.name.replace(" ", "-")
        try:
            python = _environment(folder, row)
            worst = max(worst, _run(python, row, arguments.tests))
        finally:
            if not arguments.keep:
                shutil.rmtree(folder, ignore_errors=True)
    return worst


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORDS", help="only rows whose name has all these words")
    parser.add_argument("--tests", nargs="+", default=(), metavar="PATH", help="run these folders or files of tests/")
    parser.add_argument("--environment", type=Path, metavar="DIR", help="run in this environment and make none")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--list", action="store_true", help="list the rows and run none")
    return parser.parse_args()


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _environment(folder: Path, row: Row) -> Path:
    """The Python of a new environment with these versions and what the tests need."""
    if not (folder / "bin/python").exists():
        subprocess.run([f"python{row.python}", "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    versions = (f"torch=={row.torch}", f"torchtitan=={row.torchtitan}")
    subprocess.run([*pip, "--upgrade", "pip>=23"], check=True)
    subprocess.run([*pip, *versions, "-e", f"{_ROOT}[pictures]", "pytest", "hypothesis"], check=True)
    return python


def folders_of(row: Row) -> tuple[str, ...]:
    """The folders of tests that a row runs."""
    return _TESTS[".".join(row.torchtitan.split(".")[:2])]


def _run(python: Path, row: Row, tests: Sequence[str]) -> int:
    """Run the tests, folder by folder, and file each folder's result. 1 if a test failed."""
    failed = False
    for name in tests or folders_of(row):
        print(f"{row.name}: {name}", flush=True)
        result = _run_folder(python, name)
        _file(row, name, result)
        print(f"{result.passed} passed, {result.skipped} skipped, {len(result.failed)} failed", flush=True)
        failed |= bool(result.failed)
    return int(failed)


def _run_folder(python: Path, name: str) -> Result:
    """Run the tests of a folder, and count their outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
        ended = subprocess.run([python, "-m", "pytest", *options, f"{_ROOT}/tests/{name}"], cwd=_ROOT)
        if ended.returncode not in (0, 1) or not report.exists():  # interrupted, or nothing was collected
            raise SystemExit(f"{name}: pytest ended with {ended.returncode}; nothing is kept")
        cases = list(ET.parse(report).iter("testcase"))
    failed = [
        f"{c.get('classname')}::{c.get('name')}"
        for c in cases
        if c.find("failure") is not None or c.find("error") is not None
    ]
    skipped = sum(c.find("skipped") is not None for c in cases)
    today = datetime.date.today().isoformat()
    return Result(today, len(cases) - len(failed) - skipped, skipped, tuple(failed))


def _file(row: Row, name: str, result: Result) -> None:
    """Keep the result and write the table anew."""
    results = load(_RESULTS)
    results.setdefault(row, {})[name] = result
    rows = [
        {**asdict(known), "tests": {name: asdict(of) for name, of in sorted(results[known].items())}}
        for known in sorted(results)
    ]
    _RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    text = _PAGE.read_text()
    before, rest = text.split(_BEGIN)
    _PAGE.write_text(f"{before}{_BEGIN}\n\n{table(results)}\n\n{_END}{rest.split(_END)[1]}")


def load(file: Path) -> Results:
    """The results that are kept in a file; none if there is no file."""
    rows = json.loads(file.read_text()) if file.exists() else []
    return {
        Row(r["torch"], r["torchtitan"], r["python"]): {
            name: Result(of["date"], of["passed"], of["skipped"], tuple(of["failed"]))
            for name, of in r["tests"].items()
        }
        for r in rows
    }


def table(results: Results) -> str:
    """The results in Markdown, the newest versions first, then what failed."""
    lines = [
        "| PyTorch | TorchTitan | Python | tests | passed | skipped | failed | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(results, reverse=True):
        run = results[row]
        names = "all" if set(folders_of(row)) <= set(run) else " ".join(sorted(run))
        counts = (sum(r.passed for r in run.values()), sum(r.skipped for r in run.values()))
        failed = sum(len(r.failed) for r in run.values())
        cells = (row.torch, row.torchtitan, row.python, names, *counts, failed, min(r.date for r in run.values()))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    failures = [
        f"- {row.name}: `{test}`"
        for row in sorted(results, reverse=True)
        for name in sorted(results[row])
        for test in results[row][name].failed
    ]
    return "\n".join([*lines, "", "Failed:", "", *failures] if failures else lines)


if __name__ == "__main__":
    sys.exit(main())
