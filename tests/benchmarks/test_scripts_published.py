"""Published steps of scripts: what is read from their files."""

from __future__ import annotations

from benchmarks.scripts.published import UNSEEN, read_published


def test_the_unseen_mpts_are_runs_of_the_script_with_their_pages_steps() -> None:
    """A row becomes the script's arguments, its nodes, and the time in which its GPU has seen its share of the tokens."""
    runs = {run.case: run for run in read_published(UNSEEN)}
    assert len(runs) == 16
    several, single = runs["M9"], runs["M11"]
    assert (several.request.nodes, several.request.nproc, several.request.gpu) == (16, 8, "h100-sxm-80gb")
    assert several.step_ms == 1e3 * 16 * 2048 / 5080
    sizes = "--batch 16 --length 2048 --layers 40 --width 5120 --accumulation 1 --checkpointing --attention flash"
    assert several.request.arguments == tuple(sizes.split())
    assert (single.request.nodes, single.request.gpu) == (1, "a100-sxm-80gb")
    assert single.step_ms == 1e3 * 4 * 14 * 2048 / 20513
    assert "--checkpointing" not in single.request.arguments
