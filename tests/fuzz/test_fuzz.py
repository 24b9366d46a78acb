"""A slice of the fuzz with fixed numbers: every family under legal and hostile plans, some under plans of the planner."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

THEMES = (
    "classes",
    "custom",
    "drawn",
    "hidden",
    "hooks",
    "inplace",
    "library",
    "methods",
    "models",
    "modes",
    "normalisation",
    "parallel",
    "parts",
    "recurrent",
    "steps",
    "structures",
    "training",
    "writes",
)
# One legal and one hostile plan each: the remainder of a number by four says which.
NUMBERS = [1, 3]
SLOW = {"compiled_inductor", "compiled_parts_inductor"}  # seconds a trial
PLANNED = ("batch_norm_1d", "gpt")


def families_of(theme: str) -> list[str]:
    """The names of a module's families whose packages are there."""
    import benchmarks.fuzz.families  # noqa: F401
    from benchmarks.fuzz.family import FAMILIES

    module = f"benchmarks.fuzz.families.{theme}"
    return [
        name
        for name, family in FAMILIES.items()
        if family.module == module and name not in SLOW and (not family.needs or find_spec(family.needs))
    ]


def failures(work: list[tuple[str, list[int]]], plans: Path) -> list[str]:
    """What is wrong or obscure, with the words that repeat it."""
    from benchmarks.fuzz.run import run
    from benchmarks.fuzz.table import Results

    results = Results()
    run(work, results.add, jobs=1, plans=plans)
    assert sum(row.trials for row in results.rows.values()) == sum(len(numbers) for _, numbers in work)
    return [
        f"python -m benchmarks.fuzz --repro {name}:{number}: {outcome.kind}: {outcome.detail}"
        for name, row in results.rows.items()
        for number, outcome in row.failures
    ]


def test_there_are_families_of_every_theme() -> None:
    """At least 45 families, each of them in one of the themes below."""
    from benchmarks.fuzz.family import FAMILIES

    found = [name for theme in THEMES for name in families_of(theme)]
    assert len(found) >= 45
    assert set(FAMILIES) - set(found) <= SLOW | {name for name, family in FAMILIES.items() if family.needs}


@pytest.mark.parametrize("theme", THEMES)
def test_no_plan_makes_a_result_wrong(theme: str, tmp_path: Path) -> None:
    """Every family of the theme: bitwise the model without a plan, or a clear stop or refusal."""
    found = failures([(name, NUMBERS) for name in families_of(theme)], tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", PLANNED)
def test_plans_of_the_planner_make_nothing_wrong(name: str, tmp_path: Path) -> None:
    """A plan of `autosac.plan`, saved, loaded and applied: bitwise the model without it."""
    found = failures([(name, [0])], tmp_path)
    assert not found, "\n".join(found)
