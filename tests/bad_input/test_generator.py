"""A slice of the generator of malformed inputs: every kind, with a fixed seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.bad_input import material
from benchmarks.bad_input.__main__ import ALL, run
from benchmarks.bad_input.trials import Trial, attempt


@pytest.mark.parametrize("kind", list(ALL))
def test_malformed_inputs(kind: str) -> None:
    """Each is refused with one clear line, or makes sense after all."""
    failures = [
        f"{outcome.verdict}: {trial.what}: {' '.join(trial.arguments)[:300]}: {outcome.said}"
        for trial, outcome in run(20, 20, (kind,))
        if outcome.verdict != "ok"
    ]
    assert not failures, "\n".join(failures).encode("ascii", "backslashreplace").decode()


def test_equal_seeds_give_equal_trials() -> None:
    """What was found can be found again."""
    first, second = ([(t.kind, t.what, outcome.verdict) for t, outcome in run(12, 3)] for _ in range(2))
    assert first == second and len(Counter(kind for kind, *_ in first)) > 3


def test_the_material_is_valid(tmp_path: Path) -> None:
    """What the generator spoils is accepted as long as it is not spoiled."""
    material.check()
    material.capture().save(tmp_path / "step.trace")
    arguments = ("simulate", str(tmp_path / "step.trace"), "--gpu", material.GPU, "--memory", "--time")
    assert attempt(Trial(kind="", what="", arguments=arguments, refuse=False)).verdict == "ok"


def test_the_judge_is_strict(tmp_path: Path) -> None:
    """A refusal of what should work, an acceptance of what should not, and a message without the name are found."""
    plan, suite = tmp_path / "plan.json", tmp_path / "suite.toml"
    plan.write_text("{}")
    good = ("simulate", str(tmp_path / "step.trace"), "--gpu", material.GPU)
    material.capture().save(tmp_path / "step.trace")
    suite.write_text(material.toml_of(material.SUITE))

    def verdict(arguments: tuple[str, ...], refuse: bool | None, *names: str) -> str:
        return attempt(Trial(kind="", what="", arguments=arguments, refuse=refuse, names=names)).verdict

    assert verdict(("explain", str(plan)), False) == "wrongly refused"
    assert verdict(good, True) == "wrongly accepted"
    assert verdict(("explain", str(plan)), True, "another name") == "unclear"
    assert verdict(("explain", str(plan)), True, "plan.json") == "ok"
