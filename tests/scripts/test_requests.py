"""The two documents between the command and the process of a script."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from autosac.errors import UsageError
from autosac.scripts.request import ScriptOutcome, ScriptRequest

PLAIN = ScriptRequest(script="train.py")


def test_documents_survive_their_files(tmp_path: Path) -> None:
    """With defaults and with other values everywhere."""
    other = ScriptRequest(
        script="package.train",
        is_module=True,
        arguments=("--lr", "1"),
        gpu="l40s",
        cluster="c",
        allocator="expandable_segments:True",
        nproc=8,
        nodes=2,
        rank=15,
        steps=0,
        period=4,
        marker="train.step",
        fast_forward=True,
        every_microbatch=True,
        moe_load="zipf",
        synthetic="text",
        stand_ins=("flash_attn",),
        checkpoints=True,
        patience_s=1.5,
        plan_file="plan.json",
        optimizer_slice_bytes=1,
        observe=True,
        model=1,
        unlimited=True,
        quiet=True,
        shared="folder",
        shown=3,
        only=(3, 15),
    )
    assert all(getattr(other, each.name) != getattr(PLAIN, each.name) for each in fields(ScriptRequest))
    outcome = ScriptOutcome(exit_code=3, steps=7, kept=2, error="e", notes=("a", "b"), printed=False, model=1)
    for document in (PLAIN, other, ScriptOutcome(), outcome):
        document.save(tmp_path / "document.json")
        assert type(document).load(tmp_path / "document.json") == document


def test_an_outcome_says_nothing_until_it_is_known() -> None:
    """No steps have run, none is in a trace, and there is nothing to tell."""
    assert ScriptOutcome() == ScriptOutcome(exit_code=0, steps=0, kept=0, error="", notes=(), printed=True)


def test_the_number_of_gpus() -> None:
    """Ranks of a node times nodes; one for a script that is started by itself."""
    assert PLAIN.world_size == 1
    assert ScriptRequest(script="s", nproc=4, nodes=3).world_size == 12


def test_a_model_is_changed_by_observation_or_a_plan() -> None:
    """And by nothing else."""
    assert not PLAIN.is_changed
    assert replace(PLAIN, observe=True).is_changed and replace(PLAIN, plan_file="p").is_changed


@pytest.mark.parametrize(("rank", "nproc"), [(-1, 4), (4, 4), (1, None)])
def test_ranks_that_do_not_exist(rank: int, nproc: int | None) -> None:
    """UsageError with the size of the world."""
    with pytest.raises(UsageError, match=f"rank {rank}: the world has {nproc or 1} ranks"):
        ScriptRequest(script="s", rank=rank, nproc=nproc)


@pytest.mark.parametrize("steps", [-1, 10**9 + 1])
def test_numbers_of_steps_that_are_refused(steps: int) -> None:
    """Below none, and above 10**9."""
    assert replace(PLAIN, steps=10**9).steps == 10**9
    with pytest.raises(UsageError, match=f"{steps} steps"):
        replace(PLAIN, steps=steps)
