"""Plans of several stages whose step together counts, against all plans there are, on a job whose times are known."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from autosac.errors import InfeasibleError, UsageError
from autosac.planning import closed_loop
from autosac.planning.closed_loop import Goal, Planned
from autosac.planning.joint_prices import JointPrices
from autosac.planning.pipeline_plans import make_pipeline_plans
from autosac.planning.planner import Planner
from autosac.plans import Plan
from autosac.simulation import Pipeline, Simulation
from autosac.trace import Phase

MIB = 2**20
MakeJob = Callable[..., Any]
LAYERS = 3


def goal(mib: float) -> Goal:
    """A budget of active memory, to be used as far as possible."""
    return Goal(budget_bytes=int(mib * MIB), budget_kind="active", utilisation=0.985)


def fitting(job: Any, budget_bytes: int) -> Iterator[Simulation]:
    """The steps of a stage that fit the budget, of which no other one recomputes a part of what it recomputes."""
    choices: list[frozenset[str]] = [frozenset(s) for s in ("", "a", "b", "ab")]
    found: list[tuple[tuple[frozenset[str], ...], Simulation]] = []
    for policy in sorted(product(choices, repeat=LAYERS), key=lambda p: sum(map(len, p))):
        simulation = job.simulated({layer: set(again) for layer, again in enumerate(policy) if again})
        is_more = any(all(a <= b for a, b in zip(less, policy, strict=True)) for less, _ in found)
        if not is_more and simulation.peak_bytes("active") <= budget_bytes:
            found.append((policy, simulation))
            yield simulation


def shortest_ms(jobs: list[Any], budget_bytes: int) -> float:
    """The shortest step of all stages together, of all plans that fit."""
    every = [list(fitting(job, budget_bytes)) for job in jobs]
    return min(Pipeline(stages=stages).timeline.makespan_ms for stages in product(*every))


@pytest.mark.parametrize("mib", [3.1, 4.1, 5.1])
@pytest.mark.parametrize("slowness", [1.0, 1.7])
def test_no_combination_of_plans_is_faster(make_job: MakeJob, slowness: float, mib: float) -> None:
    """Two stages that meet in every layer's gather, the second as fast as the first or slower: of all plans of both that fit,
    none has a shorter step, and the bound is below it.
    """
    jobs = [make_job(LAYERS), make_job(LAYERS, rank=1, slowness=slowness)]
    (planned,) = make_pipeline_plans(jobs, goal(mib), (int(mib * MIB),))
    assert isinstance(planned, Planned), planned
    step_ms = planned.plan.predictions["autosac"].step_ms
    assert step_ms == pytest.approx(shortest_ms(jobs, int(mib * MIB)))
    assert planned.simulation.pipeline is not None and planned.simulation.step_ms == step_ms
    assert all(s.peak_bytes("active") <= mib * MIB for s in planned.simulation.pipeline.stages)


def test_budgets_are_planned_one_by_one(make_job: MakeJob) -> None:
    """In the order given: one that no plan meets names the stage, the largest needs no checkpointing; none twice."""
    jobs = [make_job(LAYERS), make_job(LAYERS, rank=1)]
    large, small, middle = (int(mib * MIB) for mib in (50, 1, 4.1))
    free, refused, planned = make_pipeline_plans(jobs, goal(1), (large, small, middle))
    assert isinstance(free, Planned) and free.plan.units == ()
    assert "every stage: the step fits the budget without any checkpointing" in free.notes
    assert isinstance(refused, InfeasibleError) and str(refused).startswith("pipeline stage 0: no plan meets 1.0")
    assert isinstance(planned, Planned) and planned.plan.made_for.budget_bytes == middle
    with pytest.raises(UsageError, match="a budget is given twice"):
        make_pipeline_plans(jobs, goal(1), (large, large))


def test_prices_are_those_of_the_slowest_stage(make_job: MakeJob) -> None:
    """The second stage takes twice as long in all that it does: what the first one recomputes hides behind it, and costs
    nothing; what the second one recomputes costs what it takes, but for what hides behind the gathers.
    """
    jobs = [make_job(LAYERS), make_job(LAYERS, rank=1, slowness=2.0, gather_ms=0.001)]
    planners = [Planner(job.observed(), goal(1)) for job in jobs]
    plans = [planner.smallest() for planner in planners]
    stages = tuple(job.under(plan) for job, plan in zip(jobs, plans, strict=True))
    step_ms = Pipeline(stages=stages).timeline.makespan_ms
    prices = JointPrices(Pipeline(stages=tuple(planner.base for planner in planners)), planners)
    prices.add(plans, step_ms)
    shares = [prices.shares(position) for position in (0, 1)]
    assert max(shares[0]) == 0.0 and min(shares[1]) == 1.0
    assert prices.costs(0) is None and prices.costs(1) is None
    free_ms = Pipeline(stages=tuple(job.observed() for job in jobs)).timeline.makespan_ms
    assert free_ms <= prices.least_ms(plans) <= step_ms
    # With the memory of a step that recomputes nothing none is needed; the gathers that recomputation hid are then waited for.
    bare_ms = prices.least_ms([replace(plan, units=()) for plan in plans])
    assert bare_ms == pytest.approx(free_ms - 2.0)


def test_what_hides_is_told(make_job: MakeJob) -> None:
    """Recomputation of the fast stage is hidden, that of the slow one is the step's: its notes and the sum say so."""
    jobs = [make_job(LAYERS), make_job(LAYERS, rank=1, slowness=2.0)]
    (planned,) = make_pipeline_plans(jobs, goal(3.1), (int(3.1 * MIB),))
    assert isinstance(planned, Planned)
    pipeline = planned.simulation.pipeline
    assert pipeline is not None
    exposed_ms = pipeline.timeline.exposed_recompute_ms()
    longer_ms = planned.simulation.step_ms - planned.plan.predictions["none"].step_ms
    assert exposed_ms[0] == 0.0 and exposed_ms[1] >= longer_ms - 1e-9 > 0
    first, second = pipeline.stages
    assert f"{first.recompute_ms:.1f} ms recomputed ({first.recompute_ms:.1f} ms of it hidden)" in planned.notes[0]
    hidden_ms = second.recompute_ms - exposed_ms[1]
    assert f"{second.recompute_ms:.1f} ms recomputed ({hidden_ms:.1f} ms of it hidden)" in planned.notes[1]
    assert planned.notes[2].startswith(f"{exposed_ms[1]:.1f} ms of the step is recomputation")


class Deceived:
    """A derivation that says at first that recomputation takes no time, until a capture shows that it does."""

    def __init__(self, job: Any) -> None:
        self.job, self.is_wrong = job, True
        self.made_up: list[Simulation] = []
        self.captured: list[Plan] = []

    def prepare(self, _: Plan) -> None:
        """Nothing."""

    def expect(self, _: Plan, *, ahead: bool = False) -> None:
        """Nothing."""

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        simulation: Simulation = self.job.under(plan)
        if not self.is_wrong:
            return simulation
        free = [getattr(event, "phase", None) is Phase.RECOMPUTE for event in simulation.trace.events]
        event_ms = np.where(free, 0.0, simulation.pricing.event_ms)
        made_up = replace(simulation, other_prices=replace(simulation.pricing, event_ms=event_ms))
        self.made_up.append(made_up)
        return made_up

    def derived(self, _: Plan) -> None:
        """Nothing is known before."""

    def is_derived(self, simulation: Simulation) -> bool:
        """Whether it was made up."""
        return any(simulation is other for other in self.made_up)

    def confirm(self, plan: Plan, _: Simulation, __: float) -> bool:
        """It never is as it was derived."""
        self.captured.append(plan)
        self.is_wrong = False
        return False

    def notes(self) -> tuple[str, ...]:
        """What is to be told."""
        return () if self.is_wrong else ("derived steps were not as captured ones: every plan was captured",)


def test_what_is_not_as_derived_is_planned_again(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages are: the plan is the best one after all, as captured."""
    jobs = [make_job(LAYERS), make_job(LAYERS, rank=1, slowness=1.7)]
    derivations = [Deceived(job) for job in jobs]
    given = iter(derivations)
    monkeypatch.setattr(closed_loop, "derivation_for", lambda *_: next(given))
    (planned,) = make_pipeline_plans(jobs, goal(4.1), (int(4.1 * MIB),))
    assert isinstance(planned, Planned)
    assert all(len(derivation.captured) == 1 for derivation in derivations)
    assert planned.plan.predictions["autosac"].step_ms == pytest.approx(shortest_ms(jobs, int(4.1 * MIB)))
    assert planned.plan.predictions["autosac"].recompute_ms > 0
    assert "every stage: derived steps were not as captured ones: every plan was captured" in planned.notes


class Asked(UserDict[str, Simulation]):
    """Baselines that note in `asked` which of them are asked for."""

    def __init__(self, baselines: dict[str, Simulation], rank: int, asked: list[Any]) -> None:
        super().__init__(baselines)
        self.rank, self.asked = rank, asked

    def __getitem__(self, name: str) -> Simulation:
        self.asked.append((self.rank, name))
        return super().__getitem__(name)


class Confirming(Deceived):
    """A derivation whose steps are as captured; `asked` notes when one is confirmed."""

    def __init__(self, job: Any, asked: list[Any]) -> None:
        super().__init__(job)
        self.is_wrong, self.asked = False, asked

    def is_derived(self, _: Simulation) -> bool:
        """All are."""
        return True

    def confirm(self, *_: Any) -> bool:
        """It is as it was derived."""
        self.asked.append("confirmed")
        return True


def test_a_plan_is_confirmed_before_baselines_that_are_only_shown_are_waited_for(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage fits without checkpointing: its full checkpointing cannot compete, and may come when the first stage's
    plan is confirmed; the first stage's competes before.
    """
    jobs, asked = [make_job(LAYERS), make_job(LAYERS, rank=1)], list[Any]()
    light = jobs[1].observed()
    hardware = replace(light.target.hardware, more_active_bytes=-10 * MIB)
    light = replace(light, target=replace(light.target, hardware=hardware))
    jobs[1].observed = lambda: light
    for rank, job in enumerate(jobs):
        full = job.under(Planner(job.observed(), goal(4.1)).smallest())
        baselines = Asked({"none": job.observed(), "full": full}, rank, asked)
        job.baselines = lambda baselines=baselines: baselines
    given = iter([Confirming(job, asked) for job in jobs])
    monkeypatch.setattr(closed_loop, "derivation_for", lambda *_: next(given))
    (planned,) = make_pipeline_plans(jobs, goal(4.1), (int(4.1 * MIB),))
    assert isinstance(planned, Planned) and planned.plan.units and "full" in planned.plan.predictions
    assert asked.index((0, "full")) < asked.index("confirmed") < asked.index((1, "full"))
