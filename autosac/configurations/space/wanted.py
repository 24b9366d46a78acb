"""What a search is asked for, and what the job says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from autosac.configurations.space.layout import ModelFacts
from autosac.configurations.space.request import SearchRequest
from autosac.configurations.space.space import Space
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Goal
from autosac.titan.python_jobs import PythonJob

_ADAM = 12  # bytes of a float32 parameter with Adam's two states


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for. `job`: as it is, on the first offer's GPUs; `space`, `goal`: the request's, checked."""

    request: SearchRequest
    job: TitanJob
    space: Space
    goal: Goal


@dataclass(frozen=True, kw_only=True)
class Own:
    """What the job's settings say of themselves. `python`: the job, if it is one of TorchTitan 0.3. `optimizer`: the
    implementation of its optimizer, if that is none of the knob's values.
    """

    facts: ModelFacts
    compiled: bool
    global_batch: int
    converters: tuple[str, ...] = ()
    state_bytes: int = _ADAM
    gradient_bytes: int = 4
    python: PythonJob | None = None
    optimizer: str | None = None

    def space(self, asked: Space) -> Space:
        """The space, with the job's own optimizer where nobody asks for another one: its states may be of another type."""
        if self.optimizer is None or "optimizer" in asked.model_fields_set:
            return asked
        return asked.model_copy(update={"optimizer": (self.optimizer,)})
