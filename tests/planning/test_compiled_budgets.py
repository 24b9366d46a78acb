"""Which modules may have a memory budget of the compiler's partitioner."""

from __future__ import annotations

import pytest

from autosac.api import EagerCaptures
from autosac.planning.closed_loop import planner_for
from autosac.planning.compiled_policies import groups_of
from autosac.planning.planner import Goal
from autosac.simulation import Target
from benchmarks.compiled_kept.__main__ import Step
from benchmarks.compiled_kept.blocks import Dropped, Normed, Sines


@pytest.mark.capture
@pytest.mark.slow
def test_modules_that_the_compiler_gives_a_budget() -> None:
    """One that only computes; not one that changes its buffers, and not one that draws random numbers."""
    step = Step(kinds=(Sines, Normed, Dropped), batch=1, length=32, vocabulary=96, tied=False)
    captures = EagerCaptures(step.make_step, Target.of("h100-sxm-80gb", 1))
    none = captures.plain()
    groups = groups_of(planner_for(captures.observed(), none, Goal(budget_bytes=1)).policies, none.trace)
    found = {g.units[0].name: sum(p.name.startswith("memory_budget") for p in g.policies) for g in groups}
    assert found == {"layers.0": 9, "layers.1": 0, "layers.2": 0}
