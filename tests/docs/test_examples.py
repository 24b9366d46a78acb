"""The examples of the documentation run."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from autosac.cli.parser import build_parser, main

from .conftest import BUDGET, DOCS, PAGES, ROOT, SMALL_BUDGET, blocks, needs_bash

EIGHT_B = ["examples/llama3_8b.toml", "--gpu", "h100-sxm-80gb", "--world-size", "8", "--quiet"]
WITH_COMMANDS = [page for page in PAGES if any(b.language == "console" and not b.not_run for b in blocks(page))]
WITH_PYTHON = [page for page in PAGES if any(b.language == "python" and not b.not_run for b in blocks(page))]


@pytest.fixture
def inside(folder: Path, shared_cache: Path, shared_processes: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of small jobs, which is this process's own; captures and the processes that make them are shared."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AUTOSAC_CACHE", str(shared_cache))
    return folder


@needs_bash
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_succeed(
    page: str, run_in_folder: Callable[[list[str]], str], inside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of them, in order, in one folder: in this process, which need not start Python for each, but for what the
    getting-started page says of plans, which a shell runs.
    """
    typed = [line for b in blocks(page) if b.language == "console" and not b.not_run for line in b.commands]
    lines = [line.replace(BUDGET, SMALL_BUDGET) for line in dict.fromkeys(typed)]
    shell = [line for line in lines if page == "docs/getting-started.md" and not line.startswith("autosac simulate ")]
    for line in lines:
        if line.startswith("autosac ") and line not in shell:
            code = main(shlex.split(line)[1:])
            assert code == 0, (line, capfd.readouterr())
        else:
            run_in_folder(["bash", "-euc", line])


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(
    page: str, run_in_folder: Callable[[list[str]], str], inside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All blocks of a page are one program; text blocks directly after one are what it prints. It runs in this process, which
    need not import PyTorch for each, but for the README's.
    """
    found = [b for b in blocks(page) if b.language in ("python", "text") and not b.not_run]
    expected = [after.text for b, after in pairwise(found) if (b.language, after.language) == ("python", "text")]
    program = inside / "page.py"
    program.write_text("\n\n".join(b.text for b in found if b.language == "python"))
    if page == "README.md":
        printed = run_in_folder([sys.executable, str(program)])
    else:
        runpy.run_path(str(program), run_name="__main__")
        printed = capfd.readouterr().out
    assert all(text in printed for text in expected), printed


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_are_commands(page: str) -> None:
    """Their arguments are those of the command line."""
    for block in blocks(page):
        for line in block.commands if block.language == "console" and block.not_run else ():
            words = shlex.split(line, comments=True)
            if words[0] == "autosac":
                build_parser().parse_args(words[1 : words.index("--")] if "--" in words else words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_settings_files_are_toml(page: str) -> None:
    """Every TOML block can be read."""
    for block in blocks(page):
        if block.language == "toml":
            assert tomllib.loads(block.text)


def test_blocks_are_of_known_languages() -> None:
    """A block of a misspelt language would not be run, and nobody would see it."""
    found = {block.language for page in PAGES for block in blocks(page)}
    assert found <= {"console", "python", "text", "toml"}


def test_the_figures_of_the_readme_are_those_of_the_site() -> None:
    """The README shows the report that the site shows."""
    assert (DOCS / "examples/plan.txt").read_text() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("command", "columns"), [("plan", "110"), ("simulate", "100")])
def test_the_reports_of_the_site_are_what_the_program_prints(
    command: str,
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shared_cache: Path,
    shared_processes: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Llama-3 8B on 8 H100s; to renew a file: COLUMNS=110 autosac plan ... > docs/examples/plan.txt."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("AUTOSAC_CACHE", str(shared_cache))
    output = tmp_path / "plan.json"
    extra = ["--budget", BUDGET, "-o", str(output)] if command == "plan" else []
    assert main([command, *EIGHT_B, *extra]) == 0
    printed = capfd.readouterr().out.replace(str(output), "plan.json")
    shown = (DOCS / f"examples/{command}.txt").read_text().splitlines()
    assert [line.rstrip() for line in printed.splitlines()] == shown
    assert command == "simulate" or json.loads(output.read_text())["format"] == "autosac-plan"
