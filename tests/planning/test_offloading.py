"""Plans that offload: what they choose, and that they are only given where the step is shorter."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from autosac.api import EagerCaptures
from autosac.errors import CaptureError, UsageError
from autosac.planning.candidates import Candidate
from autosac.planning.closed_loop import Planned, make_plan
from autosac.planning.offloading import Offloading, link_bytes_per_ms, offloaded_items
from autosac.planning.planner import Goal, Planner
from autosac.plans.diff import compare_plans
from autosac.report.summaries import decision_table, plan_summary
from autosac.simulation import Simulation, Target

ROWS, WIDTH, BLOCKS = 65536, 1024, 6
GIB = 2**30
BUDGET = Goal(budget_bytes=int(6.6 * GIB), budget_kind="active")
# Of an H100: 50.4 GB/s. A block's forward takes 22 ms, in which a product's result of 1 GiB leaves.
LINK_GBPS = 63.0


class Counted(EagerCaptures):
    """Counts the plans that are captured."""

    captured = 0

    def under(self, plan: Any) -> Simulation:
        """The step under a plan."""
        self.captured += 1
        return super().under(plan)


@pytest.fixture(scope="module")
def captures(products: Any) -> Callable[[float], Counted]:
    """Of the step on an H100 with another link to its host."""
    machine, make_step = Target.of("h100-sxm-80gb", 1), products(rows=ROWS, width=WIDTH, blocks=BLOCKS)
    return lambda link_gbps: Counted(
        make_step, replace(machine, hardware=replace(machine.hardware, pcie_gbps=link_gbps))
    )


@pytest.fixture(scope="module")
def without(captures: Any) -> Planned:
    """The plan that does not offload."""
    return make_plan(captures(LINK_GBPS), BUDGET)


@pytest.fixture(scope="module")
def planned(captures: Any) -> Planned:
    """The plan that may offload."""
    return make_plan(captures(LINK_GBPS), replace(BUDGET, offload=True))


def test_offloading_is_off_unless_it_is_asked_for(without: Planned) -> None:
    """And then nothing of it is in the plan."""
    assert not BUDGET.offload and not without.plan.offloads
    assert b'"offload"' not in without.plan.to_bytes() and not any("host" in note for note in without.notes)


def test_a_plan_that_offloads_has_a_shorter_step(without: Planned, planned: Planned) -> None:
    """Products are dear to recompute and their copies hide: the step is shorter by some of them, within the budget."""
    assert planned.plan.offloads and planned.simulation.peak_active_bytes <= BUDGET.budget_bytes
    assert planned.simulation.step_ms < without.simulation.step_ms - 10
    assert planned.simulation.recompute_ms < without.simulation.recompute_ms - 10
    assert planned.simulation.breakdown.exposed_copy_ms < 1
    offloaded = {unit.fqn: [d for d in unit.decisions if d.offload] for unit in planned.plan.units}
    assert {d.op for rows in offloaded.values() for d in rows} == {"aten.mm.default"}
    assert not offloaded.get(str(BLOCKS - 1)), "the last block's backward comes right after its forward"
    assert all(
        unit.kept_bytes + unit.offloaded_bytes <= sum(d.memory_bytes for d in unit.decisions if d.keep)
        for unit in planned.plan.units
    )
    (note,) = [note for note in planned.notes if "host memory" in note]
    assert "shorter than without offloading" in note and "GiB" in note


def test_people_see_what_is_offloaded(without: Planned, planned: Planned) -> None:
    """In the summary, operator by operator, and in the difference from another plan."""
    out = Console(width=200, record=True, file=io.StringIO())
    out.print(plan_summary(planned.plan, planned.notes), decision_table(planned.plan.units[0], planned.plan))
    text = out.export_text()
    assert "on the host" in text and "1.00 GiB" in text and "offload" in text and "its copies are hidden" in text
    out.print(plan_summary(without.plan))
    assert "on the host" not in out.export_text()
    (name, left, right, _, only) = compare_plans(without.plan, planned.plan).units[0]
    assert name == "0" and "host" not in left and "1.00 GiB on the host" in right
    assert only == ("aten.mm.default#0 (host)",)


def test_a_slow_link_gives_the_plan_without(captures: Any, without: Planned) -> None:
    """In a forward of 22 ms not even a small part of a product leaves at 1 GB/s: nothing is offloaded, nor captured for it."""
    slow = captures(1.0)
    planned = make_plan(slow, replace(BUDGET, offload=True))
    assert planned.plan.units == without.plan.units
    assert "no plan that offloads to host memory has a shorter step" in planned.notes


def test_a_longer_step_is_refused(captures: Any, without: Planned) -> None:
    """A link that is slower than its data sheet: copies that were to hide are waited for, and the plan without is given."""
    deceived = captures(LINK_GBPS)
    base = deceived.observed()
    planner = Planner(base, BUDGET)

    class Slow:
        """Captures as on a link of an eighth of the speed."""

        def under(self, plan: Any) -> Simulation:
            """The step under a plan."""
            found = deceived.under(plan)
            hardware = replace(found.target.hardware, pcie_gbps=LINK_GBPS / 8)
            return replace(found, target=replace(found.target, hardware=hardware))

    offloading = Offloading(planner, Slow(), lambda _: None)
    best = Candidate(plan=without.plan, simulation=without.simulation)
    found, notes = offloading.improved(BUDGET, best)
    assert deceived.captured > 0 and found is best
    assert notes == ("no plan that offloads to host memory has a shorter step",)


def test_a_capture_that_fails_is_told(captures: Any, without: Planned) -> None:
    """The plan without offloading is given, and why there is no other."""

    class Failing:
        """Captures nothing."""

        def under(self, plan: Any) -> Simulation:
            """The step under a plan."""
            raise CaptureError("training step 1: no")

    offloading = Offloading(Planner(captures(LINK_GBPS).observed(), BUDGET), Failing(), lambda _: None)
    best = Candidate(plan=without.plan, simulation=without.simulation)
    found, notes = offloading.improved(BUDGET, best)
    assert found is best and notes[1:] == ("a plan that offloads could not be captured: training step 1: no",)


def test_a_plan_without_recomputation_gains_nothing(captures: Any, without: Planned) -> None:
    """Nothing is tried, and that is what the note says."""
    source = captures(LINK_GBPS)
    base = source.observed()
    assert base.recompute_ms == 0 < without.simulation.recompute_ms
    best = Candidate(plan=without.plan, simulation=base)
    found, notes = Offloading(Planner(base, BUDGET), source, lambda _: None).improved(BUDGET, best)
    assert found is best and source.captured == 0
    assert notes == ("offloading would not avoid any recomputation",)


def test_what_a_unit_may_offload_fits_its_forward(captures: Any) -> None:
    """By shares: a forward's worth of bytes at the link's speed, none for the last unit, fewer for a smaller share."""
    planner = Planner(captures(LINK_GBPS).observed(), BUDGET)
    bytes_per_ms = link_bytes_per_ms(planner.base.target.hardware)
    assert bytes_per_ms == pytest.approx(0.8 * LINK_GBPS * 1e6, rel=1e-6)
    whole = offloaded_items(planner, 1.0)
    assert set(whole) == {str(i) for i in range(BLOCKS - 1)}
    for name, items in whole.items():
        unit = next(unit for unit in planner.policies.units if unit.name == name)
        nbytes = sum(unit.sac.problem.items[i].memory_bytes for i in items)
        assert nbytes == GIB <= 23 * bytes_per_ms
    assert offloaded_items(planner, 0.5) == {}
    twice = offloaded_items(planner, 2.0)
    assert all(whole[name] < twice[name] for name in whole)


def test_a_compiled_job_is_refused_in_one_line(captures: Any) -> None:
    """Before anything is planned."""
    base = captures(LINK_GBPS).observed()
    compiled = replace(base, trace=replace(base.trace, info=replace(base.trace.info, compiled=True)))
    with pytest.raises(UsageError, match="offloading needs a model that is not compiled"):
        Offloading(Planner(compiled, BUDGET), captures(LINK_GBPS), lambda _: None)
