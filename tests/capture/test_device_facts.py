"""What stands around captures: the library that stands for CUDA, a device's properties, graphs' memory, requests, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosac.capture.cuda.functions import properties
from autosac.capture.cuda.shim import load_shim
from autosac.capture.failures import capture_error
from autosac.capture.jobs.eager import EagerRequest
from autosac.capture.record.graphs import GraphRecords
from autosac.capture.record.log import EventLog
from autosac.errors import CaptureError, UsageError
from autosac.target import TargetGPU


@pytest.mark.parametrize(("capability", "per_block", "per_processor"), [((9, 0), 227, 228), ((8, 0), 163, 164)])
def test_shared_memory(capability: tuple[int, int], per_block: int, per_processor: int) -> None:
    """In KiB, as NVIDIA states it for the capability; a block has 48 unless it asks for more."""
    found = properties(TargetGPU(compute_capability=capability))
    assert found.shared_memory_per_block == 48 * 1024
    assert found.shared_memory_per_block_optin == per_block * 1024
    assert found.shared_memory_per_multiprocessor == per_processor * 1024


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library cannot be built, which is said in one line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("AUTOSAC_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CaptureError, match="no C\\+\\+ compiler was found"):
        load_shim(1)


def test_memory_of_a_graph() -> None:
    """While a pool is open its memory is a stream's of its own for each stream, the same one every time."""
    graphs = GraphRecords(EventLog())
    assert not graphs.is_open and graphs.memory_of(0) == 0
    assert graphs.enter_pool((0, 1)) is None
    first = graphs.memory_of(0)
    assert graphs.is_open and graphs.memory_of(0) == first != graphs.memory_of(7) and first in graphs.pools
    assert graphs.enter_pool(None) == (0, 1)
    assert not graphs.is_open and graphs.memory_of(0) == 0


def test_a_step_is_captured_after_another() -> None:
    """Two steps are the least."""
    assert EagerRequest(steps=2).steps == 2
    with pytest.raises(UsageError, match="at least two steps are needed"):
        EagerRequest(steps=1)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_traceback_is_shown_to_who_debugs(
    debug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With AUTOSAC_DEBUG=1, and only then; the error is the same."""
    monkeypatch.setenv("AUTOSAC_DEBUG", debug)
    try:
        raise ValueError("wrong")
    except ValueError as e:
        found = capture_error(e, "capturing")
    assert "ValueError: wrong" in str(found)
    assert ("Traceback" in capsys.readouterr().err) == (debug == "1")
