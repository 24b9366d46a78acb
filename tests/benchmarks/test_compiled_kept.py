"""The benchmark of what compiled modules save, on a small model of its own blocks."""

from __future__ import annotations

import pytest

from benchmarks.compiled_kept.__main__ import Step, table, trial
from benchmarks.compiled_kept.blocks import Dropped, Normed, Products, Sliced
from benchmarks.compiled_kept.pipelines import rows_of
from benchmarks.compiled_kept.pipelines import table as staged

pytestmark = pytest.mark.slow


def test_blocks_save_what_their_plan_states() -> None:
    """Slices of one product, a product that no backward needs, random numbers, changing buffers: to the byte, under a plan."""
    step = Step(kinds=(Sliced, Products, Dropped, Normed), batch=2, length=32, vocabulary=96, tied=True)
    rows = trial(step, seed=3, plans=1)
    assert [row.kind for row in rows] == ["Sliced", "Products", "Dropped", "Normed"]
    assert [row.wrong for row in rows] == [""] * 4 and table(rows).endswith(
        "4 of 4 blocks under plans save what is stated, gradients bit for bit"
    )


def test_stages_of_a_pipeline_save_what_their_plan_states() -> None:
    """As a fresh capture of the stages, and as one microbatch on one GPU, to the byte."""
    rows = rows_of("1F1B")
    assert rows and {row.module.partition(".")[0] for row in rows} == {"layers"}
    assert [(row.executed_bytes, row.alone_bytes) for row in rows] == [(row.stated_bytes,) * 2 for row in rows]
    assert staged(rows).endswith(f"{len(rows)} of {len(rows)} modules of pipelines save what is stated")
