"""The record of a run's first steps. The classes are the file's schema, which pydantic checks (`files.schema`).

Of all ranks: the longest steps and the highest peaks. Of rank 0: the units' times. Times are in ms, of the device where it is
a GPU (CUDA events), else of the host's clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Interval, MinLen

from autosac.errors import UsageError
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_json, read_bounded
from autosac.files.schema import STRICT, Fault, fitted
from autosac.files.writing import write_text_atomically
from autosac.plans import Plan
from autosac.plans.schema import Count, Milliseconds, Name, Ranks

SCHEMA_VERSION = 1
_FORMAT = "autosac-run"
Positive = Annotated[float, Interval(gt=0, le=1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """One module's share of a step, all calls together. `backward_ms`: with what is recomputed; None if not known."""

    __pydantic_config__: ClassVar[Any] = STRICT

    fqn: Name
    forward_ms: Milliseconds
    backward_ms: Milliseconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """PyTorch's peaks over all steps so far."""

    __pydantic_config__: ClassVar[Any] = STRICT

    peak_active_bytes: Count
    peak_reserved_bytes: Count


class MeasuredSteps(NamedTuple):
    """What was measured on this rank; `memory`: None without a GPU; `in_backward`: an optimizer stepped in a backward."""

    device: str
    device_name: str
    torch_version: str
    warm_up: int
    steps_ms: tuple[float, ...]
    units: tuple[UnitTimes, ...]
    memory: RunMemory | None
    in_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan promised."""

    __pydantic_config__: ClassVar[Any] = STRICT

    step_ms: Milliseconds
    peak_active_bytes: Count
    peak_reserved_bytes: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The first steps of a job. `job`: as ``autosac simulate`` takes it, empty for an eager model; `plan_file`, `plan_hash`:
    of the plan that it followed, empty for none; `warm_up`: how many steps came before those of `steps_ms`; `memory`:
    None on a CPU.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    device: Literal["cuda", "cpu"]
    device_name: str = ""
    torch_version: str = ""
    job: str = ""
    overrides: tuple[str, ...] = ()
    world_size: Ranks = 1
    gpu: str = ""
    plan_file: str = ""
    plan_hash: str = ""
    warm_up: Count = 0
    steps_ms: Annotated[tuple[Positive, ...], MinLen(1)]
    units: tuple[UnitTimes, ...] = ()
    memory: RunMemory | None = None
    predicted: Predicted | None = None
    budget_bytes: Count | None = None

    @staticmethod
    def of_steps(steps: MeasuredSteps, *, plan: Plan | None = None, **more: Any) -> RunRecord:
        """The record of what was measured, beside what the plan promised. `more`: other fields."""
        predicted = plan.predictions.get("autosac") if plan is not None else None
        return RunRecord(
            device="cuda" if steps.device == "cuda" else "cpu",
            device_name=steps.device_name,
            torch_version=steps.torch_version,
            plan_hash=plan.hash() if plan is not None else "",
            warm_up=steps.warm_up,
            units=steps.units,
            predicted=None
            if predicted is None
            else Predicted(
                step_ms=predicted.step_ms,
                peak_active_bytes=predicted.peak_active_bytes,
                peak_reserved_bytes=predicted.peak_reserved_bytes,
            ),
            budget_bytes=plan.made_for.budget_bytes if plan is not None else None,
            **{"steps_ms": steps.steps_ms, "memory": steps.memory, **more},
        )

    @property
    def step_ms(self) -> float:
        """The median step."""
        ordered = sorted(self.steps_ms)
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    @property
    def misses_budget(self) -> bool:
        """Whether more memory was reserved than the plan's budget allows."""
        if self.memory is None or self.budget_bytes is None:
            return False
        return self.memory.peak_reserved_bytes > self.budget_bytes

    def compared(self) -> str:
        """Prediction and measurement in one line."""
        parts = [f"{self.step_ms:.1f} ms a step" + self._beside("step_ms", self.step_ms, 1.0, "ms")]
        if self.memory is not None:
            gib, reserved = 2.0**30, self.memory.peak_reserved_bytes
            parts.append(f"peak {reserved / gib:.2f} GiB" + self._beside("peak_reserved_bytes", reserved, gib, "GiB"))
        return ", ".join(parts)

    def _beside(self, name: str, measured: float, unit: float, word: str) -> str:
        promised = getattr(self.predicted, name) if self.predicted is not None else None
        if not promised:
            return ""
        return f" (predicted {promised / unit:.{1 if unit == 1 else 2}f} {word}, {measured / promised - 1:+.1%})"

    def save(self, path: Path) -> None:
        """Write the file; it appears whole or not at all. OSError if it cannot."""
        import json

        document = {"format": _FORMAT, "schema": SCHEMA_VERSION, **asdict(self)}
        write_text_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | Path) -> RunRecord:
        """Read a file. UsageError if it is none, is damaged, or has another schema version."""
        try:
            document = parse_json(read_bounded(path, TEXT_BYTES))
        except OSError as e:
            raise UsageError(f"cannot read the run {path}: {e.strerror}") from e
        except DocumentError as e:
            raise UsageError(f"{path} is not the record of a run: {e}") from e
        return RunRecord.of(document, str(path))

    @staticmethod
    def of(document: Any, name: str) -> RunRecord:
        """From JSON's types. UsageError as of `load`."""
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise UsageError(f"{name} is not the record of a run")
        if document.get("schema") != SCHEMA_VERSION or isinstance(document.get("schema"), bool):
            found_schema = f"{document.get('schema')!r:.40}"
            raise UsageError(
                f"{name} has run schema {found_schema}; this version of AutoSAC reads {SCHEMA_VERSION}: run again"
            )
        fields = {key: value for key, value in document.items() if key not in ("format", "schema")}
        found = fitted(fields, RunRecord)
        if isinstance(found, Fault):
            raise UsageError(f"{name} is damaged: {found.text}")
        return found
