"""What a search is asked for: one value for the command line, Python, and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from autosac.configurations.space.offers import Objective, Offer, check_offers
from autosac.configurations.space.space import Space, space_of
from autosac.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search over a TorchTitan job's configurations, which ``autosac search`` and `autosac.search` take.

    Attributes:
        job: the path of a job file (TorchTitan 0.2) or MODULE:CONFIG (0.3).
        offers: the kinds of GPUs to choose from, each once.
        space: the values of every knob, by their names; ``autosac search --show-space`` prints them. Knobs that are left out
            have their defaults.
        overrides: TorchTitan's arguments, such as ["--training.seq_len", "4096"].
        global_batch: sequences in a step on all GPUs; None: the job's own.
        objective: "tokens-per-second" or "cost-per-token", which needs the offers' prices.
        budget: memory that each GPU may use: "68GiB", "73GB", or a share of the GPU such as "85%" or 0.85; an int is a number
            of bytes.
        budget_kind: what the budget limits: "reserved" (memory that the caching allocator reserves) or "active" (memory of
            tensors).
        confidence: the probability of fitting, such as 0.99, which leaves a margin for errors; None: no margin.
        gap: stop when no configuration can be better by more than this share; 0 for the exact best.
        study: the folder that keeps the search; None: one that is removed in the end.
        resume: whether `study` holds a search that is continued; None: if it does.
        workers: processes for evaluations; 0 for a thread of this one. Programs that start processes guard their main code
            with ``if __name__ == "__main__":``.
        ray: the address of a Ray cluster that evaluates instead ("auto": the running one).
        use_cache: whether captures of earlier commands may be used.
        output: the file for the best configuration, with its plan beside it (TorchTitan 0.3: a Python file).
        html: the file for the report of the study as a web page.

    Raises:
        UsageError: a value is none that it can have.
    """

    job: str
    offers: Sequence[Offer]
    space: Space | Mapping[str, Any] = field(default_factory=Space)
    overrides: Sequence[str] = ()
    global_batch: int | None = None
    objective: Objective = "tokens-per-second"
    budget: str | float = "85%"
    budget_kind: str = "reserved"
    confidence: float | None = None
    gap: float = 0.005
    study: str | PathLike[str] | None = None
    resume: bool | None = None
    workers: int = 0
    ray: str | None = None
    use_cache: bool = True
    output: str | PathLike[str] | None = None
    html: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_offers(self.offers, self.objective)
        for name, value, least in (("global_batch", self.global_batch, 1), ("workers", self.workers, 0)):
            if value is not None and value < least:
                raise UsageError(f"{name} {value}: expected {least} or more")
        if not 0 <= self.gap < 1:
            raise UsageError(f"gap {self.gap}: expected a share of at least 0 and below 1, such as 0.005")
        if self.resume and self.study is None:
            raise UsageError("resume: name the study's folder")
        self.knobs  # noqa: B018  a space that is none is refused where it is given

    @classmethod
    def of(
        cls,
        job: str | PathLike[str],
        *,
        gpu: str = "",
        world_size: int | None = None,
        offers: Sequence[Offer] = (),
        **values: Any,
    ) -> SearchRequest:
        """For a job on so many GPUs of one kind, or on what is offered. UsageError if that is not said, or twice."""
        if bool(gpu) == bool(offers) or (world_size is None) != (not gpu):
            raise UsageError(
                "search: give either gpu and world_size, such as gpu='h100-sxm-80gb', world_size=8, or offers"
            )
        return cls(job=fspath(job), offers=offers or (Offer(gpu=gpu, world_size=world_size or 1),), **values)

    @property
    def knobs(self) -> Space:
        """The space, checked."""
        return self.space if isinstance(self.space, Space) else space_of(dict(self.space))
