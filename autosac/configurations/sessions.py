"""A search from its inputs: the job is read, the space checked, the study opened, workers started; all ends with the block."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autosac.configurations.job_files import without_splits
from autosac.configurations.jobs import check_space, own_of
from autosac.configurations.layout import arguments_of
from autosac.configurations.offers import Objective, Offer
from autosac.configurations.search import TitanSearch
from autosac.configurations.space import Space
from autosac.configurations.study import Study
from autosac.configurations.wanted import Wanted
from autosac.configurations.workers import workers_of
from autosac.errors import CaptureError, UsageError
from autosac.files.documents import TEXT_BYTES, read_bounded
from autosac.files.temporary import temporary_folder
from autosac.jobs.checks import check_job_file
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Goal
from autosac.planning.confidence import confidence_of
from autosac.quantities import parse_budget
from autosac.simulation import Target
from autosac.titan.python_jobs import PythonJob
from autosac.titan.version import check_job, installed_version

_ANSWERS = "answers 7"  # of what form the answers in a study are


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a search is given. `study` None: a folder that is removed in the end. `workers` 0: a thread of this process."""

    config_file: str
    offers: tuple[Offer, ...]
    overrides: tuple[str, ...] = ()
    space: Space = field(default_factory=Space)
    budget: str = "85%"
    budget_kind: str = "reserved"
    confidence: float | None = None
    objective: Objective = "tokens-per-second"
    global_batch: int | None = None
    gap: float = 0.005
    study: Path | None = None
    resume: bool = False
    workers: int = 1
    ray: str | None = None
    use_cache: bool = True


@contextlib.contextmanager
def searching(inputs: Inputs, progress: Callable[[str], None] = lambda _: None) -> Iterator[TitanSearch]:
    """The search, ready to run. UsageError, on one line, for whatever of the inputs cannot be."""
    check_job(inputs.config_file)
    if not 0 <= inputs.gap < 1:
        raise UsageError(f"gap {inputs.gap}: expected a share of at least 0 and below 1, such as 0.005")
    first = inputs.offers[0]
    own = own_of(inputs.config_file, inputs.overrides, first.world_size, inputs.global_batch)
    check_space(inputs.space, own.python)
    target = Target.of(first.gpu, first.world_size, cluster=first.cluster, allocator=inputs.space.allocator[0])
    if inputs.confidence is not None:
        confidence_of(inputs.confidence, inputs.budget_kind, target.allocator)
    goal = Goal(budget_bytes=parse_budget(inputs.budget, target.hardware.usable_bytes), budget_kind=inputs.budget_kind)
    job = TitanJob(
        config_file=inputs.config_file,
        target=target,
        overrides=inputs.overrides,
        world_size=first.world_size,
        use_cache=inputs.use_cache,
    )
    wanted = Wanted(
        job=job,
        offers=inputs.offers,
        space=inputs.space,
        goal=goal,
        budget=inputs.budget,
        objective=inputs.objective,
        confidence=inputs.confidence,
        gap=inputs.gap,
    )
    with contextlib.ExitStack() as stack:
        folder = inputs.study or stack.enter_context(temporary_folder())
        study = Study(folder, _identity(inputs, own.python), resume=inputs.resume)
        try:
            if own.python is None:
                wanted = replace(wanted, job=replace(job, config_file=without_splits(inputs.config_file, study.folder)))
            workers = stack.enter_context(workers_of(inputs.workers, inputs.ray, use_cache=inputs.use_cache))
            search = TitanSearch(wanted, own, workers, study, progress)
            if own.python is None:
                some = search.layouts[0]
                arguments = (*inputs.overrides, *arguments_of(search.settings(some)))
                check_job_file(wanted.job.config_file, arguments, some.world_size)
            yield search
        except (UsageError, CaptureError):
            study.forget()
            raise


def _identity(inputs: Inputs, python: PythonJob | None) -> dict[str, Any]:
    """What the answers of a study depend on, beside what is in their questions."""
    try:
        own = version("autosac")
    except PackageNotFoundError:  # run from a checkout
        own = ""
    job = (
        hashlib.sha256(read_bounded(inputs.config_file, TEXT_BYTES)).hexdigest()[:16]
        if python is None
        else python.digest
    )
    return {
        "job": job,
        "arguments": list(inputs.overrides),
        "budget": f"{inputs.budget} {inputs.budget_kind}",
        "confidence": inputs.confidence,
        "checkpointing": list(inputs.space.checkpointing),
        "versions": [own, installed_version(), version("torch"), _ANSWERS],
    }
