"""A search from its inputs: the job is read, the space checked, the study opened, workers started; all ends with the block."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autosac.configurations.evaluating.study import Study
from autosac.configurations.evaluating.workers import check_not_starting, workers_of
from autosac.configurations.found.job_files import without_splits
from autosac.configurations.running.jobs import check_experts, check_space, own_of
from autosac.configurations.running.search import TitanSearch
from autosac.configurations.space.layout import arguments_of
from autosac.configurations.space.request import SearchRequest
from autosac.configurations.space.wanted import Wanted
from autosac.errors import CaptureError, UsageError
from autosac.files.documents import TEXT_BYTES, read_bounded
from autosac.files.temporary import temporary_folder
from autosac.jobs.checks import check_job_file
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Goal
from autosac.planning.confidence import confidence_of
from autosac.quantities import parse_budget, text_of
from autosac.simulation import Target
from autosac.titan.python_jobs import PythonJob
from autosac.titan.version import check_job, installed_version

_ANSWERS = "answers 17"  # of what form the answers in a study are, and by which prices


@contextlib.contextmanager
def searching(request: SearchRequest, progress: Callable[[str], None] = lambda _: None) -> Iterator[TitanSearch]:
    """The search, ready to run. UsageError, on one line, for whatever of the inputs cannot be."""
    check_not_starting()
    check_job(request.job)
    first, overrides, knobs = request.offers[0], tuple(request.overrides), request.knobs
    own = own_of(request.job, overrides, first.world_size, request.global_batch)
    knobs = own.space(knobs)
    check_space(knobs, own.python)
    check_experts(knobs, own.facts)
    target = Target.of(first.gpu, first.world_size, cluster=first.cluster, allocator=knobs.allocator[0])
    if request.confidence is not None:
        confidence_of(request.confidence, request.budget_kind, target.allocator)
    job = TitanJob(
        config_file=request.job,
        target=target,
        overrides=overrides,
        world_size=first.world_size,
        use_cache=request.use_cache,
    )
    budget_bytes = parse_budget(request.budget, target.hardware.usable_bytes)
    wanted = Wanted(
        request=request, job=job, goal=Goal(budget_bytes=budget_bytes, budget_kind=request.budget_kind), space=knobs
    )
    with contextlib.ExitStack() as stack:
        folder = Path(request.study) if request.study is not None else stack.enter_context(temporary_folder())
        resume = Study.is_in(folder) if request.resume is None else request.resume
        study = Study(folder, _identity(wanted, own.python), resume=resume)
        try:
            if own.python is None:
                wanted = replace(wanted, job=replace(job, config_file=without_splits(request.job, study.folder)))
            workers = stack.enter_context(workers_of(request.workers, request.ray, use_cache=request.use_cache))
            search = TitanSearch(wanted, own, workers, study, progress)
            if own.python is None:
                some = search.layouts[0]
                arguments = (*overrides, *arguments_of(search.settings(some)))
                check_job_file(wanted.job.config_file, arguments, some.world_size)
            yield search
        except (UsageError, CaptureError):
            study.forget()
            raise


def _identity(wanted: Wanted, python: PythonJob | None) -> dict[str, Any]:
    """What the answers of a study depend on, beside what is in their questions."""
    request = wanted.request
    try:
        own = version("autosac")
    except PackageNotFoundError:  # run from a checkout
        own = ""
    job = hashlib.sha256(read_bounded(request.job, TEXT_BYTES)).hexdigest()[:16] if python is None else python.digest
    return {
        "job": job,
        "arguments": list(request.overrides),
        "budget": f"{text_of(request.budget)} {request.budget_kind}",
        "confidence": request.confidence,
        "checkpointing": list(wanted.space.checkpointing),
        "versions": [own, installed_version(), version("torch"), _ANSWERS],
    }
