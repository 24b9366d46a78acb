"""The table of a suite: one row per model, configuration, budget and policy; its figures, its claims, CSV and Markdown.

Of every row follow (`Results`):

- recompute overhead: recomputation as a fraction of the step without checkpointing (AUTO-SAC Figure 5.6);
- slowdown: step time against the step without checkpointing, minus 1;
- reduction: by which fraction recomputation is below that of full checkpointing (5.6.3);
- budget use: the verified peak as a fraction of the budget (Figure 5.5).

`claims` holds the evaluation's claims against the rows: a plan uses at least 97 % of the budget and no more than it wherever
no checkpointing exceeds it, and runs on the GPU; recomputation is at least 6 % below full checkpointing; no policy that fits
takes less; greedy and knapsack are within 2 % of the ILP.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Group, RenderableType

from autosac.bench.policies import PLANNED
from autosac.bench.solver_times import SolverTiming
from autosac.display.tables import Table
from autosac.quantities import format_bytes, format_ms

LEAST_USE, LEAST_REDUCTION, NEAR_ILP = 0.97, 0.06, 0.02
# Two verified plans of one objective differ by what the search leaves of the budget: this much of a step is no loss.
_TIE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What a real run took: median step, peaks of the steps after the first (reserved: None on a CPU), or why it failed."""

    step_ms: float | None = None
    peak_active_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy in one configuration. `budget_bytes` is what it is held against; `error` why there is no prediction.

    `reference_ms` and `full_recompute_ms`: the step without checkpointing and full checkpointing's recomputation, None where
    they are not known. `policy_s`: problem and solving; `verify_s`: captures and simulations of its plans. Steps that
    are `compiled` are compared with such ones.
    """

    model: str
    configuration: str
    policy: str
    budget_bytes: int
    budget_kind: str
    step_ms: float | None = None
    recompute_ms: float | None = None
    peak_active_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    fits_gpu: bool | None = None
    reference_ms: float | None = None
    full_recompute_ms: float | None = None
    gap: float | None = None
    policy_s: float | None = None
    verify_s: float | None = None
    plans: int = 0
    plan_file: str = ""
    error: str = ""
    measured: MeasuredRun | None = None
    compiled: bool = False

    @property
    def name(self) -> str:
        """Model and configuration."""
        return f"{self.model} {self.configuration}"

    @property
    def peak_bytes(self) -> int | None:
        """The peak that the budget bounds."""
        return self.peak_reserved_bytes if self.budget_kind == "reserved" else self.peak_active_bytes

    @property
    def fits(self) -> bool:
        """The peak is within the budget."""
        return self.peak_bytes is not None and self.peak_bytes <= self.budget_bytes

    @property
    def budget_use(self) -> float | None:
        """Peak over budget."""
        return None if self.peak_bytes is None else self.peak_bytes / self.budget_bytes

    @property
    def overhead(self) -> float | None:
        """Recomputation over the step without checkpointing."""
        return self.recompute_ms / self.reference_ms if self.recompute_ms is not None and self.reference_ms else None

    @property
    def slowdown(self) -> float | None:
        """Step time over that without checkpointing, minus 1."""
        return self.step_ms / self.reference_ms - 1 if self.step_ms is not None and self.reference_ms else None

    @property
    def reduction(self) -> float | None:
        """How far recomputation is below full checkpointing's."""
        if self.recompute_ms is None or not self.full_recompute_ms:
            return None
        return 1 - self.recompute_ms / self.full_recompute_ms


class Claim(NamedTuple):
    """A claim of the evaluation: how many configurations it was held against, and those where it does not hold."""

    text: str
    cases: int
    misses: tuple[str, ...]

    def __str__(self) -> str:
        if not self.cases:
            return f"{self.text}: not tested"
        held = f"{self.text}: holds in {self.cases - len(self.misses)} of {self.cases} cases"
        return held + (f"; not in {'; '.join(self.misses)}" if self.misses else "")


@dataclass(frozen=True, kw_only=True)
class Results:
    """All rows of a suite, and the solvers' times per configuration where no checkpointing exceeds the budget."""

    suite: str
    gpu: str
    rows: tuple[PolicyRow, ...]
    solvers: tuple[tuple[str, tuple[SolverTiming, ...]], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def groups(self) -> list[tuple[str, list[PolicyRow]]]:
        """The rows of each model, configuration and budget, by a name of theirs."""
        several = len({row.budget_bytes for row in self.rows}) > 1
        found: dict[str, list[PolicyRow]] = {}
        for row in self.rows:
            name = f"{row.name}, {format_bytes(row.budget_bytes)}" if several else row.name
            found.setdefault(name, []).append(row)
        return list(found.items())

    def policies(self) -> list[str]:
        """Names of the policies, in the order of the suite."""
        return list(dict.fromkeys(row.policy for row in self.rows))

    def claims(self) -> list[Claim]:
        """See the module's docstring."""
        use, runs, reduction, least, best, near = (_Tally() for _ in range(6))
        for name, rows in self.groups():
            by_policy = {row.policy: row for row in rows}
            none, ilp = by_policy.get("none"), by_policy.get("ilp")
            others = [row for row in rows if row.policy not in PLANNED]
            for row in (row for row in rows if row.policy in PLANNED):
                case = f"{name} {row.policy}"
                if none is not None and not none.fits:
                    share = row.budget_use
                    use.add(share is not None and LEAST_USE <= share <= 1, f"{case} ({_percent(share) or row.error})")
                    reduction.add(
                        (row.reduction or 0) >= LEAST_REDUCTION, f"{case} ({_percent(row.reduction) or row.error})"
                    )
                if row.fits_gpu is not None:
                    runs.add(row.fits_gpu, case)
                if row.step_ms is not None and row.recompute_ms is not None:
                    tie_ms = _TIE * row.step_ms
                    fitting = [other for other in others if other.fits and other.compiled == row.compiled]
                    less = [o.policy for o in fitting if (o.recompute_ms or 0) < row.recompute_ms - tie_ms]
                    least.add(not less, f"{case} (less: {', '.join(less)})")
                    faster = [o.policy for o in fitting if (o.step_ms or 0) < row.step_ms - tie_ms]
                    best.add(not faster, f"{case} (faster: {', '.join(faster)})")
                if row.policy in ("greedy", "knapsack") and ilp is not None and ilp.recompute_ms is not None:
                    slower = row.recompute_ms is None or row.recompute_ms > ilp.recompute_ms * (1 + NEAR_ILP)
                    near.add(not slower, f"{case} ({format_ms(row.recompute_ms or 0)}, {format_ms(ilp.recompute_ms)})")
        return [
            use.claim(f"peak within the budget and at least {LEAST_USE:.0%} of it where no checkpointing exceeds it"),
            runs.claim("plans do not run out of memory on the GPU"),
            reduction.claim(f"recomputation at least {LEAST_REDUCTION:.0%} below full checkpointing there"),
            least.claim("no other policy that fits recomputes less"),
            best.claim("no other policy that fits is faster"),
            near.claim(f"greedy and knapsack recompute at most {NEAR_ILP:.0%} more than the ILP"),
        ]

    def to_csv(self) -> str:
        """Every row with what follows from it; empty fields where there is nothing."""
        derived = ("budget_use", "overhead", "slowdown", "reduction")
        measured = [f"measured_{f.name}" for f in fields(MeasuredRun)]
        columns = [f.name for f in fields(PolicyRow) if f.name != "measured"]
        out = io.StringIO()
        writer = csv.DictWriter(out, [*columns, *derived, *measured], lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            values: dict[str, Any] = {key: getattr(row, key) for key in (*columns, *derived)}
            values |= {f"measured_{k}": v for k, v in asdict(row.measured).items()} if row.measured else {}
            writer.writerow({key: "" if value is None else value for key, value in values.items()})
        return out.getvalue()

    def documents(self) -> list[dict[str, Any]]:
        """The rows as plain values, with what follows from them."""
        return [
            {**asdict(row), "budget_use": row.budget_use, "overhead": row.overhead, "reduction": row.reduction}
            for row in self.rows
        ]

    def summary(self) -> Group:
        """The main table for a terminal: one for each configuration."""
        headings, rows = self.table()
        parts: list[RenderableType] = []
        for name, group in groupby(rows, key=lambda row: row[0]):
            table = Table(title=name, title_justify="left")
            shown = [i for i, heading in enumerate(headings) if heading not in ("configuration", "of step")]
            for i in shown:
                table.add_column(headings[i], justify="left" if headings[i] in ("policy", "on the GPU") else "right")
            failed = []
            for row in group:
                if row[3]:
                    table.add_row(*(row[i] for i in shown))
                else:
                    failed.append(f"- {row[1]}: {row[2]}")
            parts += [table, *failed]
        return Group(*parts)

    def to_markdown(self) -> str:
        """The table, the solvers' times and the claims."""
        parts = [markdown_table(*self.table())]
        if any(row.measured for row in self.rows):
            parts += ["### Measured beside predicted", markdown_table(*self.measured_table())]
        if self.solvers:
            parts += ["### Solvers on equal terms", markdown_table(*self.solver_table())]
        parts += ["### Claims", "\n".join(f"- {claim}" for claim in self.claims())]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts) + "\n"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of the main table."""
        headings = [
            "configuration",
            "policy",
            "active",
            "reserved",
            "of budget",
            "step",
            "slowdown",
            "recompute",
            "of step",
            "below full",
            "found in",
            "on the GPU",
        ]
        rows = []
        for name, group in self.groups():
            for row in group:
                cells = [name, row.policy]
                if row.error:
                    rows.append([*cells, row.error, *[""] * (len(headings) - 3)])
                    continue
                use = _percent(row.budget_use) + ("" if row.fits else " !")
                rows.append(
                    [
                        *cells,
                        _bytes(row.peak_active_bytes),
                        _bytes(row.peak_reserved_bytes),
                        use,
                        format_ms(row.step_ms or 0),
                        _percent(row.slowdown),
                        format_ms(row.recompute_ms or 0),
                        _percent(row.overhead),
                        _percent(row.reduction),
                        _seconds(row.policy_s),
                        "" if row.fits_gpu is None else "fits" if row.fits_gpu else "out of memory",
                    ]
                )
        return headings, rows

    def solver_table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of the solvers' table."""
        headings = ["configuration", "solver", "time", "recompute", "filled up", "above the linear bound"]
        rows = []
        for name, timings in self.solvers:
            for t in timings:
                filled = "" if t.filled_ms is None else format_ms(t.filled_ms)
                rows.append([name, t.solver, _seconds(t.seconds), format_ms(t.recompute_ms), filled, _percent(t.gap)])
        return headings, rows

    def measured_table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of what was measured, beside what was predicted."""
        headings = [
            "configuration",
            "policy",
            "step",
            "measured",
            "slowdown",
            "measured",
            "peak active",
            "measured",
            "error",
            "peak reserved",
            "measured",
        ]
        rows = []
        for name, group in self.groups():
            none = next((r.measured for r in group if r.policy == "none"), None)
            base = none.step_ms if none is not None else None
            for row in (r for r in group if r.measured is not None):
                rows.append([name, row.policy, *_measured_cells(row, base)])
        return headings, rows


class _Tally:
    """Counts the cases of a claim."""

    def __init__(self) -> None:
        self._cases = 0
        self._misses: list[str] = []

    def add(self, holds: bool, case: str) -> None:
        self._cases += 1
        if not holds:
            self._misses.append(case)

    def claim(self, text: str) -> Claim:
        return Claim(text, self._cases, tuple(self._misses))


def _measured_cells(row: PolicyRow, base_ms: float | None) -> list[str]:
    measured = row.measured
    assert measured is not None
    predicted = [format_ms(row.step_ms), _percent(row.slowdown)] if row.step_ms is not None else ["", ""]
    if measured.error:
        return [predicted[0], measured.error, *[""] * 7]
    step, active, reserved = measured.step_ms, measured.peak_active_bytes, measured.peak_reserved_bytes
    error = row.peak_active_bytes / active - 1 if row.peak_active_bytes and active else None
    return [
        predicted[0],
        "" if step is None else format_ms(step),
        predicted[1],
        _percent(step / base_ms - 1) if step is not None and base_ms else "",
        _bytes(row.peak_active_bytes),
        _bytes(active),
        "" if error is None else f"{error:+.1%}",
        _bytes(row.peak_reserved_bytes),
        _bytes(reserved),
    ]


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
