"""What a search found: rows, the best, ties, and how much work it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autosac.configurations.evaluating.evaluations import PredictedStep
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Objective, Offer
from autosac.plans import Plan
from autosac.quantities import format_bytes, format_ms
from autosac.titan.python_jobs import PythonJob

# Ratios between configurations of one job have been seen to be off by so much, whatever their operators
# (docs/published.md: checkpointing modes up to 2.7 %, compilation up to 1.9 %).
LEAST_ERROR = 0.01
LIMITS = {
    "compute_ms": "compute",
    "exposed_communication_ms": "exposed communication",
    "exposed_copy_ms": "copies to and from the host",
    "bubble_ms": "pipeline bubble",
    "host_bound_ms": "host",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationRow:
    """A configuration that was worked out. `score`: what is minimised, a step's milliseconds or price."""

    layout: Layout
    measured: PredictedStep
    score: float
    offer: Offer
    plan_key: str = ""

    @property
    def name(self) -> str:
        """Short."""
        return f"{self.layout}, {self.measured.checkpointing}"

    @property
    def binds(self) -> str:
        """What holds the step back: the largest part beside computation if that is more than a tenth; memory if recomputation
        is the most that could be saved; else computation.
        """
        parts = {name: self.measured.parts.get(name, 0.0) for name in LIMITS if name != "compute_ms"}
        worst = max(parts, key=lambda name: parts[name])
        if self.measured.recompute_ms > max(parts[worst], 0.02 * self.measured.step_ms):
            return "memory"
        return LIMITS[worst] if parts[worst] > 0.1 * self.measured.step_ms else "compute"


def is_tied(a: ConfigurationRow, b: ConfigurationRow) -> bool:
    """Whether two predictions are closer than their errors: a cost model is wrong in the same way in both, so only what they
    use it differently for counts; and no two configurations are told apart by less than `LEAST_ERROR`.
    """
    scale_a, scale_b = a.score / a.measured.step_ms, b.score / b.measured.step_ms
    names = {*a.measured.errors_ms, *b.measured.errors_ms}
    error = math.hypot(
        *(
            a.measured.errors_ms.get(name, 0.0) * scale_a - b.measured.errors_ms.get(name, 0.0) * scale_b
            for name in names
        )
    )
    return abs(a.score - b.score) <= max(error, LEAST_ERROR * min(a.score, b.score))


def why_lost(best: ConfigurationRow, other: ConfigurationRow) -> str:
    """In what the other one is slower, largest first."""
    if other.score <= best.score:
        return ""
    mine, theirs = _times(best), _times(other)
    more = {name: theirs[name] - mine[name] for name in mine}
    worst = max(more, key=lambda name: more[name])
    if more[worst] <= 0:
        return "its price" if other.offer != best.offer else "its interference"
    return f"{format_ms(more[worst])} more {worst}"


def _times(row: ConfigurationRow) -> dict[str, float]:
    parts = row.measured.parts
    found = {title: parts.get(name, 0.0) for name, title in LIMITS.items()}
    found["compute"] -= parts.get("recompute_ms", 0.0)
    found["recomputation"] = parts.get("recompute_ms", 0.0)
    return found


def told_as(layout: Layout, plan: str | None) -> Layout:
    """The layout that a row is told as, by the text of its plan: without what only plans do and this one does not, or nobody
    for lack of a plan.
    """
    made = Plan.from_bytes(plan.encode()) if plan is not None and layout != layout.without_plans else None
    return replace(
        layout,
        activation_offload=layout.activation_offload and made is not None and made.offloads,
        chunk_loss=layout.chunk_loss and made is not None and made.settings.loss_chunks > 1,
    )


def least_of_kinds(pruned: Mapping[Layout, float]) -> dict[str, float]:
    """The least bound of the layouts that bounds ruled out, for each kind of GPU that has any."""
    found: dict[str, float] = {}
    for layout, bound in pruned.items():
        found[layout.gpu] = min(bound, found.get(layout.gpu, math.inf))
    return found


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How much work a search was. `configurations`: layouts times ways of checkpointing; the rest counts layouts. `derived`:
    with a plan that was simulated without a capture under it, of which `confirmed` were captured; `captured`: evaluations;
    `refused`: by TorchTitan, `induced` of them without being tried, as others were.
    """

    configurations: int
    legal: int
    bounded: int
    evaluated: int
    derived: int
    confirmed: int
    captured: int
    sheets: int
    refused: int
    induced: int
    failed: int
    reused: int

    @property
    def open(self) -> int:
        """Layouts of which nobody knows yet whether they are better than the best."""
        return self.legal - self.bounded - self.evaluated - self.refused - self.failed


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best configuration and all that was worked out, best first. `proven`: no configuration of the space is better than
    the best by more than `gap`. `refused`: why a job cannot run with a layout; `failed`: why nobody knows. `plans`: AutoSAC's
    plans by their rows' keys. `closest`: of the layouts that bounds ruled out, the one with the least bound, and that.
    `kinds`: the same bound for each kind of GPU. `budgets_bytes`: what each GPU may use, by its kind. `offers`: the GPUs to
    choose from. `sampled`: the space was too large to list, and proposals came to an end. `python`: the job, if it is one of
    TorchTitan 0.3. `confidence`: with which probability what fits does so, if that was asked for.
    """

    rows: tuple[ConfigurationRow, ...]
    counts: Counts
    objective: Objective
    gap: float
    proven: bool
    refused: Mapping[Layout, str] = field(default_factory=dict)
    failed: Mapping[Layout, str] = field(default_factory=dict)
    plans: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[Layout, Mapping[str, Any]] = field(default_factory=dict)
    budgets_bytes: Mapping[str, int] = field(default_factory=dict)
    closest: tuple[Layout, float] | None = None
    kinds: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    offers: tuple[Offer, ...] = ()
    sampled: bool = False
    python: PythonJob | None = None
    confidence: float | None = None

    def __str__(self) -> str:
        """The best, in a line."""
        best, proven = self.best, "proven" if self.proven else "not proven"
        if best is None:
            return f"none of {len(self.rows)} configurations fits ({proven})"
        step, peak = format_ms(best.measured.step_ms), format_bytes(best.measured.peak_reserved_bytes)
        return f"best of {len(self.rows)} configurations ({proven}): {best.name}, step {step}, peak {peak} reserved"

    @property
    def fitting(self) -> Sequence[ConfigurationRow]:
        """The rows that fit, best first."""
        return [row for row in self.rows if row.measured.fits]

    @property
    def best(self) -> ConfigurationRow | None:
        """None if nothing fits, or nothing has been evaluated yet."""
        return self.fitting[0] if self.fitting else None

    @property
    def tied(self) -> Sequence[ConfigurationRow]:
        """The rows that cannot be told from the best."""
        best = self.best
        return [row for row in self.fitting[1:] if best is not None and is_tied(best, row)]
