"""One candidate for each stage: against all combinations, on pipelines whose transfers and times are made up."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autosac.estimator import Pricing
from autosac.planning import joint_choice
from autosac.planning.candidates import Candidate
from autosac.planning.joint_choice import JointSteps, agreeing, burden, choose, is_dominated, undominated
from autosac.plans import Plan
from autosac.runtime_sim import INSTANT_HOST, NoInterference, Timeline
from autosac.simulation import Pipeline, Simulation, Target
from autosac.trace import Collective, Event, Group, Op, Phase, Signature, TensorMeta, WorkWait
from plans import MADE_FOR
from traces import trace_of

STAGES, MICROBATCHES = 3, 3
META = TensorMeta((4,), (1,), "float32")
TARGET = replace(Target.of("h100-sxm-80gb", STAGES), host=INSTANT_HOST, overlap=NoInterference())


class Stage:
    """A rank with one or two parts of the model, as in a looped schedule: all microbatches of the first part, then all of the
    second, and back. `recompute_ms`: of each part.
    """

    def __init__(self, rank: int, forward_ms: float, recompute_ms: tuple[float, ...]) -> None:
        self.rank, self.parts, self.works = rank, len(recompute_ms), 0
        self.events: list[Event] = []
        self.ms: list[float] = []
        chunks = [part * STAGES + rank for part in range(self.parts)]
        last = self.parts * STAGES - 1
        for chunk in chunks:
            for _ in range(MICROBATCHES):
                self.receive(chunk - 1 if chunk else -1)
                self.compute(Phase.FORWARD, forward_ms)
                self.send(chunk + 1 if chunk < last else -1)
        for chunk, again_ms in reversed(list(zip(chunks, recompute_ms, strict=True))):
            for _ in range(MICROBATCHES):
                self.receive(chunk + 1 if chunk < last else -1)
                self.compute(Phase.RECOMPUTE, again_ms)
                self.compute(Phase.BACKWARD, 2 * forward_ms)
                self.send(chunk - 1 if chunk else -1)

    def compute(self, phase: Phase, ms: float) -> None:
        self.events.append(Op(0, 0, 0, phase, 0, (), ()))
        self.ms.append(ms)

    def transfer(self, kind: str, chunk: int) -> None:
        row = Collective(kind, 64, 0, 0, True, self.works, chunk % STAGES, -1, -1, 0, Phase.FORWARD, 0, (), ())
        self.events.append(row)
        self.ms.append(0.01)
        self.works += 1

    def send(self, chunk: int) -> None:
        if chunk >= 0:
            self.transfer("send", chunk)

    def receive(self, chunk: int) -> None:
        if chunk >= 0:
            self.transfer("recv", chunk)
            self.events.append(WorkWait(self.works - 1, 0))
            self.ms.append(0.0)

    def candidate(self) -> Candidate:
        """The stage as a plan's step."""
        trace = trace_of(
            self.events,
            signatures=(Signature("aten.x.default", (META,), (META,)),),
            groups=(Group.of("pp", range(STAGES)),),
            world_size=STAGES,
            rank=self.rank,
        )
        count = len(self.ms)
        prices = Pricing(
            event_ms=np.array(self.ms),
            source=("given",),
            event_source=np.zeros(count, dtype=np.int16),
            event_rel_std=np.zeros(count, dtype=np.float32),
        )
        simulation = Simulation(trace=trace, target=TARGET, other_prices=prices)
        return Candidate(plan=Plan(made_for=MADE_FOR, units=()), simulation=simulation)


def stages_of(seed: int, parts: int, number: int) -> list[list[Candidate]]:
    """Candidates of all stages; what they recompute in one part they may save in another."""
    generator = random.Random(seed)
    found = []
    for rank in range(STAGES):
        forward_ms = generator.choice((1.0, 1.0, 1.5))
        times = [tuple(generator.choice((0.0, 0.4, 0.8, 1.2)) for _ in range(parts)) for _ in range(number)]
        found.append([Stage(rank, forward_ms, again).candidate() for again in times])
    return found


def shortest_ms(stages: list[list[Candidate]]) -> float:
    """The shortest step of all combinations."""
    steps = JointSteps()
    return min(steps.step_ms([c.simulation for c in combination]) for combination in product(*stages))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_combination_is_shorter(parts: int, seed: int) -> None:
    """Of 4 candidates for each of 3 stages, with one part of the model each or two: all 64 combinations are executed here."""
    stages = stages_of(seed, parts, 4)
    steps = JointSteps()
    chosen = choose(stages, steps.step_ms)
    assert steps.step_ms([c.simulation for c in chosen]) == pytest.approx(shortest_ms(stages), rel=2e-6)


def test_a_step_beside_others_is_not_kept() -> None:
    """The pipeline that is told of stays the one that was executed before; the step itself is known from then on."""
    first, second = ([c.simulation for c in combination] for combination in zip(*stages_of(1, 1, 2), strict=True))
    steps = JointSteps()
    told = steps.pipeline(first)
    step_ms = steps.step_ms(second, is_beside=True)
    assert step_ms == Pipeline(stages=tuple(second)).timeline.makespan_ms == steps.step_ms(second)
    assert steps.pipeline(first) is told


def test_descent_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends where no stage alone can do better."""
    stages = stages_of(1, 2, 4)
    monkeypatch.setattr(joint_choice, "MOST_COMBINATIONS", 1)
    steps = JointSteps()
    chosen = choose(stages, steps.step_ms)
    step_ms = steps.step_ms([c.simulation for c in chosen])
    for position, candidates in enumerate(stages):
        for other in candidates:
            tried = [*chosen[:position], other, *chosen[position + 1 :]]
            assert steps.step_ms([c.simulation for c in tried]) >= step_ms * (1 - 2e-6)


def test_stages_share_one_memory_budget() -> None:
    """Of budgets 1, 0.5 and 0.3 in one stage and 0.3 and 1 in the other both can follow 0.3 and 1; of 1 and 0.3 neither."""

    def pool(*budgets: float) -> list[Candidate]:
        plan, simulation = Plan(made_for=MADE_FOR, units=()), Stage(1, 1.0, (0.0,)).candidate().simulation
        plans = (replace(plan, settings=replace(plan.settings, memory_budget=budget)) for budget in budgets)
        return [Candidate(plan=each, simulation=simulation) for each in plans]

    first, second = pool(1.0, 0.5, 0.3), pool(0.3, 1.0)
    assert agreeing([first, second]) == [[[first[2]], [second[0]]], [[first[0]], [second[1]]]]
    assert agreeing([pool(1.0), pool(0.3)]) == []


def test_burdens() -> None:
    """By hand: the second of three stages receives, computes and sends for each of three microbatches, forward and backward:
    after each of these 12 transfers it computes, having received in 0.01 ms, or goes on at once. (The first that it receives
    on the way back waits for the last that it has sent.)
    """
    simulation = Stage(1, 1.0, (0.5,)).candidate().simulation
    found = burden(simulation, range(STAGES))
    assert found.tolist() == pytest.approx([0.0, *[1.01, 0.0] * 3, 2.52, 0.0, 2.51, 0.0, 2.51, 0.01])


def test_what_is_dominated() -> None:
    """More in one part and less in the other is not; more in one is; of equal ones the first stays."""
    one, other, more, same = (
        Stage(0, 1.0, again).candidate() for again in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.5), (0.0, 1.0))
    )
    assert undominated([more, one, other, same], range(STAGES)) == [one, other]
    assert is_dominated(more.simulation, [one.simulation], range(STAGES))
    assert not is_dominated(one.simulation, [more.simulation, other.simulation], range(STAGES))


def test_one_candidate_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none that it could be dominated by."""
    monkeypatch.setattr(joint_choice, "burden", None)
    only = Stage(0, 1.0, (1.0,)).candidate()
    assert undominated([only], range(STAGES)) == [only] and undominated([], range(STAGES)) == []


def test_equally_long_steps() -> None:
    """A stage that hides what it recomputes: the candidate that recomputes less is taken."""
    slow = [Stage(0, 3.0, (0.0,)).candidate()]
    little, much = Stage(1, 1.0, (0.2,)).candidate(), Stage(1, 1.0, (0.3,)).candidate()
    last = [Stage(2, 3.0, (0.0,)).candidate()]
    assert choose([slow, [much, little], last], JointSteps().step_ms)[1] is little


@pytest.mark.parametrize("seed", range(4))
def test_exposed_recomputation_is_what_the_step_would_feel(seed: int) -> None:
    """If the recomputation of one stage takes longer by a millionth, the step does by a millionth of what is exposed of it."""
    generator, share = random.Random(seed), 1e-6
    times = [(generator.uniform(0.2, 2.0), generator.uniform(0.2, 2.0)) for _ in range(STAGES)]

    def joint(longer: int) -> Timeline:
        stages = [
            Stage(rank, 1.0 + rank / 7, (one * (1 + share * (rank == longer)), two * (1 + share * (rank == longer))))
            for rank, (one, two) in enumerate(times)
        ]
        return Pipeline(stages=tuple(stage.candidate().simulation for stage in stages)).timeline

    base = joint(-1)
    for rank, exposed_ms in enumerate(base.exposed_recompute_ms()):
        assert joint(rank).makespan_ms - base.makespan_ms == pytest.approx(share * exposed_ms, rel=1e-3, abs=1e-10)


def test_each_combination_is_executed_once() -> None:
    """And the pipeline of the last one is at hand."""
    stages = [c[0].simulation for c in stages_of(0, 1, 1)]
    steps = JointSteps()
    first = steps.step_ms(stages)
    pipeline = steps.pipeline(stages)
    assert steps.pipeline(stages) is pipeline and pipeline.timeline.makespan_ms == first
