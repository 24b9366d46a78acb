"""What Inductor has written for one capture serves the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autosac.capture.compiler.programs import GraphProgram, Programs

PROGRAM = GraphProgram("def call(args): ...", (("8", "1"), None))


def test_programs_are_found_by_other_processes(tmp_path: Path) -> None:
    """What is put into a folder is read back equal by whoever looks there, and by nobody else."""
    Programs(tmp_path).put("key", PROGRAM)
    assert Programs(tmp_path).get("key") == PROGRAM
    assert Programs(tmp_path).get("other") is None and Programs().get("key") is None


def test_a_folder_is_no_condition(tmp_path: Path) -> None:
    """Without a folder, or with one that is gone, a process still has its own."""
    for programs in (Programs(), Programs(tmp_path / "gone")):
        programs.put("key", PROGRAM)
        assert programs.get("key") == PROGRAM


def test_kept_programs_are_of_one_environment_and_of_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of other versions are not found, nor are those of somebody else, and a damaged one is none."""
    Programs(tmp_path, "torch 1").put("key", PROGRAM)
    assert Programs(tmp_path, "torch 1").get("key") == PROGRAM
    assert Programs(tmp_path, "torch 2").get("key") is None
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        assert Programs(tmp_path, "torch 1").get("key") is None
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert Programs(tmp_path, "torch 1").get("key") is None
