"""TorchTitan's own full checkpointing, where a search would look at AutoSAC's plans alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from searches import TINY, inputs

from autosac.configurations.found.results import SearchResult
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.offers import Offer
from autosac.jobs.titan import STOPPING_EARLY
from autosac.plans import Plan


@pytest.fixture(scope="module", autouse=True)
def _shared(module_shares_captures: None) -> None:
    """Searches capture in processes that are there already, and what has not been captured yet."""


def found(job: Path, *overrides: str, **space: Any) -> SearchResult:
    """A search of one layout that does not fit as it is, on GPUs on which the host holds back plans for single modules."""
    given = inputs(
        job,
        overrides=overrides,
        space=TINY.model_copy(update=space),
        offers=(Offer(gpu="rtx-4090", world_size=2),),
        budget="400MiB",
    )
    with searching(given) as search:
        return search.run()


def test_the_plan_may_be_the_jobs_own_full_checkpointing(job: Path) -> None:
    """As that of `autosac plan` may: without "full" in the space, the best is as good as with it in a job that stops early."""
    full = found(job, STOPPING_EARLY, checkpointing=("full",)).best
    planned = found(job, checkpointing=("autosac",)).best
    assert full is not None and planned is not None and planned.measured.checkpointing == "autosac"
    assert planned.score == full.score and planned.layout == full.layout


def test_its_plan_says_so(job: Path) -> None:
    """The plan beside the job file has no modules, and names the way of checkpointing."""
    result = found(job, checkpointing=("autosac",))
    assert result.best is not None
    plan = Plan.from_bytes(result.plans[result.best.plan_key].encode())
    assert plan.settings.job_checkpointing == "full" and not plan.units


def test_what_plans_may_do_more_leaves_out_no_way_of_checkpointing(job: Path) -> None:
    """In a space in which every layout lets plans compute the loss in chunks, full checkpointing is worked out all the same,
    as what it is.
    """
    result = found(job, chunk_loss=(True,), checkpointing=("full", "autosac"))
    assert result.best is not None and result.best.name == "fsdp 2, batch 8 x 1, full"
