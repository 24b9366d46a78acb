"""The pages of the documentation, their code blocks, and a folder in which the blocks run.

A block runs unless the line before it is ``<!-- not run: reason -->``. Commands run as they are written, in a folder that has
small jobs under the names that the pages use; only the budget of 68 GiB shrinks with the model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
    if "_generated" not in path.parts
}
BUDGET, SMALL_BUDGET = "68GiB", "4.5GiB"
_FENCE = re.compile(r"^```(\w*)\s*$")
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page: its language, its text, and why it is not run (empty: it is)."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    @property
    def commands(self) -> list[str]:
        """The lines of a console block that are typed."""
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page."""
    found, begin, language, reason = [], -1, "", ""
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if begin < 0 and fence and fence[1]:
            before = _NOT_RUN.match(lines[number - 1])
            begin, language, reason = number, fence[1], before[1] if before else ""
        elif begin >= 0 and fence and not fence[1]:
            text = "\n".join(lines[begin + 1 : number])
            found.append(Block(page=page, line=begin + 1, language=language, text=text, not_run=reason))
            begin = -1
    return found


def small(job: Path) -> str:
    """The example job with the debug model, whose step needs 11 GiB without checkpointing and 4 GiB with all of it.

    With pipelines it has four microbatches.
    """
    text = job.read_text(encoding="utf-8")
    for old, new in (
        ('"8B"', '"debugmodel"'),
        ("seq_len = 8192", "seq_len = 2048"),
        ("batch_size = 2", "batch_size = 64"),
        ("[parallelism]", "[parallelism]\npipeline_parallel_microbatch_size = 16"),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small jobs and nothing else. It is the same one for all tests: capture processes work in it."""
    found = tmp_path_factory.getbasetemp() / "page"
    found.mkdir(exist_ok=True)
    for path in found.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    job = small(ROOT / "examples/llama3_8b.toml")
    (found / "examples").mkdir()
    (found / "examples/llama3_8b.toml").write_text(job)
    (found / "job.toml").write_text(job)
    (found / "moe.toml").write_text(job.replace('"llama3"', '"deepseek_v3"'))
    return found


@pytest.fixture
def run_in_folder(folder: Path, shared_cache: Path) -> Callable[[list[str]], str]:
    """Run a command in the folder of small jobs, and return what it printed; captures are shared by all tests."""
    programs = Path(sys.executable).parent
    env = os.environ | {"AUTOSAC_CACHE": str(shared_cache), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def run(command: list[str]) -> str:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)
        assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    return run


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
