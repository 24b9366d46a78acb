"""When the job's own full checkpointing may be the plan, of a job alone and of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autosac.errors import InfeasibleError
from autosac.planning.candidates import early_note
from autosac.planning.closed_loop import Goal, Planned, faster, make_plans
from autosac.planning.pipeline_plans import make_pipeline_plans
from autosac.planning.planner import Planner
from autosac.simulation import Simulation
from autosac.trace import Call, Event, ModuleEnter, ModuleExit, Op, Phase, Trace
from plans import prediction

MIB = 2**20
LAYERS = 3
MakeJob = Callable[..., Any]


def full(job: Any, slower: float = 1.0, **info: Any) -> Simulation:
    """The step under TorchTitan's own checkpointing, slower than the plan that does the same by a factor."""
    found: Simulation = job.simulated({layer: {"a", "b"} for layer in range(LAYERS)})
    events: list[Event] = []
    event_ms: list[float] = []

    def add(event: Event, ms: float) -> None:
        events.append(event)
        event_ms.append(slower * ms)

    for event, ms in zip(found.trace.events, found.pricing.event_ms.tolist(), strict=True):
        again = type(event) is Op and event.phase is Phase.RECOMPUTE
        if again:
            add(ModuleEnter(event.module, Phase.RECOMPUTE), 0.0)  # type: ignore[union-attr]
        add(event, ms)
        if again:
            add(ModuleExit(event.module, Phase.RECOMPUTE), 0.0)  # type: ignore[union-attr]
    said = {"checkpointing": "full", "torchtitan_version": "0.2.2", **info}
    trace = replace(found.trace, events=tuple(events), info=replace(found.trace.info, **said))
    pricing = replace(
        found.pricing,
        event_ms=np.array(event_ms),
        event_source=np.zeros(len(events), dtype=np.int16),
        event_rel_std=np.zeros(len(events), dtype=np.float32),
    )
    return Simulation(trace=trace, target=found.target, other_prices=pricing)


def keeping_always(trace: Trace, name: str, *, is_random: bool = False) -> Trace:
    """The observed step, in which an operator's results are always to be kept, because they are random or must be saved."""

    def kept(call: Call) -> Call:
        is_it = call.op == name
        return call._replace(must_save=is_it and not is_random, is_random=is_it and is_random)

    return replace(
        trace,
        regions=tuple(region._replace(calls=tuple(kept(call) for call in region.calls)) for region in trace.regions),
    )


def test_only_torchtitans_full_checkpointing_of_eager_jobs(make_job: MakeJob) -> None:
    """Not another one of its ways, not that of a compiled job or of a script; a plan without units."""
    job = make_job(LAYERS)
    planner, baseline = Planner(job.observed(), Goal(budget_bytes=1)), full(job)
    plan = planner.own("full", baseline)
    assert plan is not None and plan.units == () and plan.settings.job_checkpointing == "full"
    assert planner.own("selective-op", baseline) is None
    for other in ({"checkpointing": "plan"}, {"compiled": True}, {"torchtitan_version": ""}):
        assert planner.own("full", full(job, **other)) is None


@pytest.mark.parametrize(("name", "may_be"), [("aten.c.default", True), ("aten.a.default", False)])
def test_nothing_runs_again_that_plans_always_keep(make_job: MakeJob, name: str, may_be: bool) -> None:
    """aten.a runs again under full checkpointing, aten.c does not."""
    job = make_job(LAYERS)
    observed = job.observed()
    base = replace(observed, trace=keeping_always(observed.trace, name), other_prices=observed.pricing)
    assert (Planner(base, Goal(budget_bytes=1)).own("full", full(job)) is not None) == may_be


@pytest.mark.parametrize(
    ("own", "is_random", "may_be"),
    [("full", False, True), ("selective", False, True), ("none", False, False), ("full", True, False)],
)
def test_a_job_that_is_checkpointed_by_itself(make_job: MakeJob, own: str, is_random: bool, may_be: bool) -> None:
    """It runs such operators again already, and may go on with that; random ones may not, whose state it does not restore."""
    job = make_job(LAYERS)
    observed = job.observed()
    kept = keeping_always(observed.trace, "aten.a.default", is_random=is_random)
    base = replace(observed, trace=kept, other_prices=observed.pricing)
    assert (Planner(base, Goal(budget_bytes=1)).own("full", full(job, own_checkpointing=own)) is not None) == may_be


def test_a_faster_baseline_that_is_no_plan_is_told() -> None:
    """With the reason, for full checkpointing of eager jobs; nothing within 0.1 %."""
    other = prediction(9.0, 1)
    (note,) = faster(prediction(10.0, 1), {"full": other}, False)
    assert note.startswith("the job's own full also fits and is faster by 1.0 ms")
    assert note.endswith("a plan only for a job that is configured so: it runs again what other plans always keep")
    assert "configured so" not in faster(prediction(10.0, 1), {"selective-op": other}, False)[0]
    assert "configured so" not in faster(prediction(10.0, 1), {"full": other}, True)[0]
    assert faster(prediction(9.005, 1), {"full": other}, False) == ()


@pytest.mark.parametrize(("slower", "is_own"), [(0.5, True), (1.5, False)])
def test_a_pipeline_does_it_in_all_stages_or_none(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, slower: float, is_own: bool
) -> None:
    """Where the step of all stages is shorter: the joined plan has no units, and its prediction is that of `full`."""
    jobs = [make_job(LAYERS), make_job(LAYERS, rank=1)]
    for job in jobs:
        baselines = {"none": job.observed(), "full": full(job, slower)}
        monkeypatch.setattr(job, "baselines", lambda baselines=baselines: baselines)
    budget = int(4.1 * MIB)
    goal = Goal(budget_bytes=budget, budget_kind="active", utilisation=0.985)
    (planned,) = make_pipeline_plans(jobs, goal, (budget,))
    assert isinstance(planned, Planned)
    assert (planned.plan.settings.job_checkpointing == "full") == is_own == (planned.plan.units == ())
    assert (planned.plan.predictions["autosac"] == planned.plan.predictions["full"]) == is_own
    assert any(note.startswith("the plan is the job's own full checkpointing") for note in planned.notes) == is_own
    assert any("stage 0: TorchTitan's own full checkpointing" in note for note in planned.notes) == is_own
    assert not any("is faster by" in note for note in planned.notes)


@pytest.mark.parametrize(("early", "stops"), [(0.9, True), (1.1, False), (None, False)])
@pytest.mark.parametrize("stages", [1, 2])
def test_it_stops_early_where_that_is_shorter(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, early: float | None, stops: bool, stages: int
) -> None:
    """The plan says so, and what it saves; of a pipeline in all stages. Not if it takes longer, or where it cannot."""
    jobs = [make_job(LAYERS, rank=rank) for rank in range(stages)]
    for job in jobs:
        observed = job.observed()
        info = replace(observed.trace.info, early_stop=False)
        observed = replace(observed, trace=replace(observed.trace, info=info), other_prices=observed.pricing)
        baselines = {"none": observed, "full": full(job, 0.5)}
        monkeypatch.setattr(job, "observed", lambda observed=observed: observed)
        monkeypatch.setattr(job, "baselines", lambda baselines=baselines: baselines)
        stopping = None if early is None else full(job, 0.5 * early)
        monkeypatch.setattr(job, "stopping_early", lambda stopping=stopping: stopping)
    budget = int(4.1 * MIB)
    goal = Goal(budget_bytes=budget, budget_kind="active", utilisation=0.985)
    (planned,) = make_pipeline_plans(jobs, goal, (budget,)) if stages > 1 else make_plans(jobs[0], goal, (budget,))
    assert isinstance(planned, Planned)
    settings, stated = planned.plan.settings, planned.plan.predictions
    assert settings.job_checkpointing == "full" and settings.early_stop == stops
    saved_ms = stated["full"].step_ms - stated["autosac"].step_ms
    assert (saved_ms > 0) == stops
    assert [n for n in planned.notes if "(early_stop)" in n] == [early_note(saved_ms)] * stops


def test_a_pipeline_that_no_other_plan_fits(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own checkpointing is the plan if it needs less than every other one; else there is none."""
    jobs = [make_job(LAYERS), make_job(LAYERS, rank=1)]
    for job in jobs:
        small = full(job)
        less = replace(small.target.hardware, more_active_bytes=2 * MIB - small.peak_active_bytes)
        small = replace(small, target=replace(small.target, hardware=less))
        baselines = {"none": job.observed(), "full": small}
        monkeypatch.setattr(job, "baselines", lambda baselines=baselines: baselines)
    goal = Goal(budget_bytes=2 * MIB, budget_kind="active")
    fitting, refused = make_pipeline_plans(jobs, goal, (2 * MIB, 2 * MIB - 1))
    assert isinstance(fitting, Planned) and fitting.plan.settings.job_checkpointing == "full"
    assert isinstance(refused, InfeasibleError)
