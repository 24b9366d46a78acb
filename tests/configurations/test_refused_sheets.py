"""Searches whose captures of single layers TorchTitan refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from searches import SPACE, TINY, inputs

from autosac.capture.process.server import CaptureServer
from autosac.configurations.evaluating.evaluations import SheetTask
from autosac.configurations.running.sessions import searching
from autosac.errors import CaptureError


@pytest.fixture(scope="module", autouse=True)
def _shared(module_shares_captures: None) -> None:
    """Searches capture in processes that are there already, and what has not been captured yet."""


def test_layouts_run_that_no_sheet_stands_for(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP is refused, as of tied parameters: DDP is the best, without bounds; a space without DDP has nothing that runs."""
    monkeypatch.setattr(SheetTask, "run", lambda self, server: {"refused": "tied parameters"})
    changes = {"data_parallel_replicate": (1, 2), "microbatch": (8,), "pipeline_parallel": (1,)}
    space = SPACE.model_copy(update={**changes, "checkpointing": ("none",)})
    with searching(inputs(job, space=space, budget="79GiB")) as found:
        result = found.run()
    assert result.best is not None and str(result.best.layout) == "replicate 2, batch 8 x 1" and result.proven
    assert {str(layout): why for layout, why in result.refused.items()} == {"fsdp 2, batch 8 x 1": "tied parameters"}
    with (
        pytest.raises(CaptureError, match="no layout of the space can be captured: tied parameters"),
        searching(inputs(job, space=TINY)) as found,
    ):
        found.run()


def test_layouts_without_shards_have_bounds_where_fsdp_is_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP is refused, as of tied parameters: DDP has a sheet of one rank, whose bounds are below what was simulated."""
    run = SheetTask.run

    def refusing(self: SheetTask, server: CaptureServer) -> dict[str, Any]:
        return {"refused": "tied parameters"} if self.job.world_size > 1 else run(self, server)

    monkeypatch.setattr(SheetTask, "run", refusing)
    changes = {"data_parallel_replicate": (1, 2), "microbatch": (8,), "pipeline_parallel": (1,)}
    space = SPACE.model_copy(update={**changes, "checkpointing": ("none",)})
    with searching(inputs(job, space=space, budget="79GiB")) as found:
        result = found.run()
        assert result.best is not None and str(result.best.layout) == "replicate 2, batch 8 x 1" and result.proven
        layout, measured = result.best.layout, result.best.measured
        bound_ms = found.sheet_bound(layout, math.inf)
        assert bound_ms is not None and 0.5 * measured.step_ms < bound_ms <= measured.step_ms
        assert 0.25 * measured.peak_reserved_bytes < found.least_bytes(layout) <= measured.peak_reserved_bytes
    assert result.counts.sheets == 1 and len(result.refused) == 1
