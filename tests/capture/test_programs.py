"""What Inductor has written for one capture serves the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from autosac.capture.compiler.programs import GraphProgram, Programs, key_of

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


def test_keys_leave_the_compilers_files_to_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has a key, and another graph another one, without a look into PyTorch's and Triton's files."""
    from torch._inductor import codecache
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def read() -> str:
        raise AssertionError

    monkeypatch.setattr(codecache, "torch_key", read)
    monkeypatch.setattr(codecache, "triton_key", read)
    codecache.CacheBase.get_system.cache_clear()
    graphs = map(torch.fx.symbolic_trace, (torch.nn.ReLU(), torch.nn.Tanh()))
    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        one, other = (key_of(graph, [], {}) for graph in graphs)
    assert one is not None and other is not None and one != other
