"""The results of a fuzz run: outcomes by family, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz.trial import OUTCOMES, Outcome

BAD = ("wrong", "obscure")


_PAGE = """# Models of many kinds under plans of many kinds

For readers who want to know how the [guarantee](guarantee.md) is tested. Every family is a kind of small model (`--list`
prints them). A trial trains a model for one to three steps on the CPU, without a plan and under one, and compares bit for bit:
losses, gradients, parameters, buffers, the state of random generators, and what Python code can see of the modules. Plans are
made by the planner, legal with random keeps, or hostile: random keeps, wrong, missing and surplus decisions, other modules as
units, any settings. Some steps have other numbers of rows or run under autocast, and some models are in double precision.

Printed by `{command}`.

- right: no difference. warned: no difference, and a warning that the plan did not fit.
- refused: `autosac.plan` or `autosac.apply` raised an error that names the place. stopped: a step did so, before the
  optimizer's step.
- wrong: something differs (with Inductor, by more than another order of sums). obscure: any other error, a hang, or a crash
  of the process.
- no reference: the model raises an error without a plan, too.

"""


@dataclass
class Row:
    """The outcomes of one family: how many of each kind, by the plan's kind, and those that are wrong or obscure."""

    counts: Counter[str] = field(default_factory=Counter)
    plan_kinds: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, Outcome]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, number: int, outcome: Outcome) -> None:
        """One more trial."""
        self.counts[outcome.kind] += 1
        self.seconds += outcome.seconds
        self.plan_kinds[outcome.plan_kind or "unknown"] += 1
        if outcome.kind in BAD:
            self.failures.append((number, outcome))

    @property
    def trials(self) -> int:
        """How many there were."""
        return sum(self.counts.values())


@dataclass
class Results:
    """The rows by family, in order, and the families that were left out with the reason."""

    rows: dict[str, Row] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, family: str, number: int, outcome: Outcome) -> None:
        """One more trial of a family."""
        self.rows.setdefault(family, Row()).add(number, outcome)

    @property
    def good(self) -> bool:
        """Whether nothing is wrong or obscure."""
        return not any(row.failures for row in self.rows.values())

    def page(self, command: str) -> str:
        """A page for the documentation: what the table says, and the table. `command` printed it."""
        return f"{_PAGE.format(command=command)}{self.markdown()}\n"

    def markdown(self) -> str:
        """The table, the totals, and what was left out."""
        heads = ["family", "trials", *OUTCOMES, "first failing"]
        rows = [heads, ["---"] + ["--:"] * (len(OUTCOMES) + 1) + ["---"]]
        totals: Counter[str] = Counter()
        plan_kinds: Counter[str] = Counter()
        for name, row in sorted(self.rows.items()):
            totals += row.counts
            plan_kinds += row.plan_kinds
            first = str(min(number for number, _ in row.failures)) if row.failures else ""
            rows.append([name, str(row.trials), *(_number(row.counts[kind]) for kind in OUTCOMES), first])
        rows.append(
            [f"{len(self.rows)} families", str(totals.total()), *(_number(totals[kind]) for kind in OUTCOMES), ""]
        )
        lines = ["| " + " | ".join(cells) + " |" for cells in rows]
        lines += ["", "Plans: " + ", ".join(f"{count} {kind}" for kind, count in sorted(plan_kinds.items())) + "."]
        lines += [f"Left out: {name} ({reason})." for name, reason in self.skipped.items()]
        return "\n".join(lines)

    def as_json(self) -> str:
        """All counts, and every failure with its message."""
        rows: dict[str, Any] = {
            name: {
                "trials": row.trials,
                "seconds": round(row.seconds, 1),
                **{kind: row.counts[kind] for kind in OUTCOMES},
                "plans": dict(row.plan_kinds),
                "failures": [
                    {"number": number, "kind": outcome.kind, "plan": outcome.plan_kind, "detail": outcome.detail}
                    for number, outcome in sorted(row.failures, key=lambda pair: pair[0])
                ],
            }
            for name, row in sorted(self.rows.items())
        }
        return json.dumps({"families": rows, "skipped": self.skipped}, indent=1) + "\n"


def _number(count: int) -> str:
    return str(count) if count else ""
