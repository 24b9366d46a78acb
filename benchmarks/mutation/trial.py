"""Runs tests on a copy of the tree with one mutant after the other.

Each job has a copy of its own in a temporary folder; the checkout is only read. A fork server that has imported the large
packages starts every run of pytest, so that a run costs no more than the project's own imports and the tests.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.mutation.mutants import Mutant

_LARGE = (
    "torch",
    "torch.distributed.tensor",
    "numpy",
    "scipy.optimize",
    "pulp",
    "pydantic",
    "rich",
    "pytest",
)
_OPTIONS = ("-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run of pytest ended: its exit status (None: stopped), the first test that failed, and how long it took."""

    status: int | None
    failed: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Every test passed, or there was none."""
        return self.status in (0, 5)


def copy_of(root: Path, folder: Path) -> Path:
    """Copy what git tracks, or does not ignore, into a folder; links stay links. CalledProcessError outside of git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = root / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


class Bench:
    """A copy of the tree, in which one mutant at a time is tried."""

    def __init__(
        self, root: Path, folder: Path, limit_s: float, preload: Sequence[str] = _LARGE, options: Sequence[str] = ()
    ) -> None:
        """Copy the checkout at `root` into `folder`. A stage of tests that takes longer than the limit is stopped.

        `preload`: modules that the fork server imports once. `options`: for pytest, beside its usual ones.
        """
        self._root = root
        self._tree = copy_of(root, folder / "tree")
        self._output = folder / "output.txt"
        self._limit_s = limit_s
        self._options = tuple(options)
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._without: dict[tuple[str, ...], Run] = {}
        self._changes = 0
        self._running: int | None = None

    def stop(self) -> None:
        """End the tests that run now, with all that they have started."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)
            self._running = None

    def trial(self, mutant: Mutant, stages: tuple[tuple[str, ...], ...]) -> Run:
        """The run of the first stage of tests that fails under the mutant, or of the last one.

        A test that fails without the mutant too does not count. RuntimeError if a stage ends the same way, without a failed
        test or not in time, with the mutant and without.
        """
        for tests in stages:
            run = self._mutated(mutant, tests)
            while run.failed and not self._run_without((run.failed,)).passed:
                run = self._mutated(mutant, tests)
            if not run.passed:
                if not run.failed and self._run_without(tests).status == run.status:
                    raise RuntimeError(f"without a mutant these tests fail or take too long: {' '.join(tests)}")
                break
        return run

    def _mutated(self, mutant: Mutant, tests: tuple[str, ...]) -> Run:
        content = (self._tree / mutant.file).read_bytes()
        self._write(mutant.file, mutant.apply(content))
        try:
            return self._run(tests)
        finally:
            self._write(mutant.file, content)

    def _run_without(self, tests: tuple[str, ...]) -> Run:
        if tests not in self._without:
            self._without[tests] = self._run(tests)
        return self._without[tests]

    def _write(self, file: str, content: bytes) -> None:
        """Each version of a file is of another second, or Python would take the compiled one of the version before."""
        path = self._tree / file
        path.write_bytes(content)
        self._changes += 2
        later = time.time() + self._changes
        os.utime(path, (later, later))

    def _run(self, tests: tuple[str, ...]) -> Run:
        wrong = [run.failed for run in self._without.values() if run.failed]
        tests = (*self._options, *tests, *(f"--deselect={name}" for name in wrong if name not in tests))
        begin = time.monotonic()
        process = self._context.Process(target=_pytest, args=(str(self._tree), str(self._output), tests))
        process.start()
        self._running = process.pid
        process.join(self._limit_s)
        stopped = process.exitcode is None
        self.stop()
        process.join()
        failed = _FAILED.search(self._output.read_text(errors="replace")) if self._output.exists() else None
        return Run(
            status=None if stopped else process.exitcode,
            failed=failed[1] if failed and not stopped else "",
            seconds=time.monotonic() - begin,
        )


def _pytest(tree: str, output: str, tests: tuple[str, ...]) -> None:
    """In the child: run tests on the copy, with all that they print in a file."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    sys.path.insert(0, tree)
    import pytest

    status = pytest.main([*_OPTIONS, "-c", f"{tree}/pyproject.toml", "--rootdir", tree, *tests])
    sys.stdout.flush()
    os._exit(int(status))
