"""Results of mutants, and the table by room."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_EQUIVALENT = Path(__file__).with_name("equivalent.toml")
CAUGHT, SURVIVED, EQUIVALENT = "caught", "survived", "equivalent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a mutant; `by` is the test that caught it."""

    file: str
    line: int
    kind: str
    source: str
    before: str
    after: str
    outcome: str
    by: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A mutant that a person found to behave like the original, and why."""

    file: str
    source: str
    after: str
    why: str

    def matches(self, result: Result) -> bool:
        """Whether the result is of this mutant."""
        return (self.file, self.source, self.after) == (result.file, result.source, result.after)


def load_judged() -> tuple[Judged, ...]:
    """The mutants of equivalent.toml."""
    return tuple(Judged(**row) for row in tomllib.loads(_EQUIVALENT.read_text()).get("mutants", []))


def outcome(result: Result, judged: Sequence[Judged]) -> str:
    """What a result counts as."""
    if result.outcome == SURVIVED and any(row.matches(result) for row in judged):
        return EQUIVALENT
    return result.outcome


def markdown(results: Mapping[str, Result], judged: Sequence[Judged], seed: int) -> str:
    """The page: the table by room, the survivors, and what was judged to be equivalent."""
    outcomes = {key: outcome(result, judged) for key, result in results.items()}
    rooms: dict[str, list[str]] = {}
    for key, result in sorted(results.items(), key=lambda item: item[1].file):
        rooms.setdefault(str(Path(result.file).parent), []).append(outcomes[key])
    rows = [_row(room, found) for room, found in rooms.items()]
    rows.append(_row("**all**", list(outcomes.values())))
    survivors = [r for key, r in results.items() if outcomes[key] == SURVIVED]
    equivalent = [
        (r, next(j.why for j in judged if j.matches(r))) for k, r in results.items() if outcomes[k] == EQUIVALENT
    ]
    lines = [
        f"Seed {seed}. Caught: share of the mutants that change behaviour.\n",
        "| room | mutants | caught | survived | equivalent | caught |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "\n## Survivors\n",
        *(_item(result) for result in sorted(survivors, key=_place)),
        *([] if survivors else ["None."]),
        "\n## Judged to be equivalent\n",
        *(f"{_item(result)}: {why}" for result, why in sorted(equivalent, key=lambda pair: _place(pair[0]))),
        *([] if equivalent else ["None."]),
    ]
    return "\n".join(lines) + "\n"


def _place(result: Result) -> tuple[str, int]:
    return result.file, result.line


def _row(room: str, outcomes: Sequence[str]) -> str:
    counts = [outcomes.count(kind) for kind in (CAUGHT, SURVIVED, EQUIVALENT)]
    judged = counts[0] + counts[1]
    share = f"{counts[0] / judged:.0%}" if judged else "–"
    return f"| {room} | {len(outcomes)} | {counts[0]} | {counts[1]} | {counts[2]} | {share} |"


def _item(result: Result) -> str:
    return f"- `{result.file}:{result.line}` {result.kind}: `{_short(result.before)}` → `{_short(result.after)}`"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."
