"""Which other settings of a job are tried, and which of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.errors import InfeasibleError
from autosac.jobs.levers import Lever, Pulled, combined, levers_of, one_ahead, pull
from autosac.jobs.titan import TitanJob
from autosac.memory_sim import AllocatorConfig
from autosac.planning.closed_loop import Goal
from autosac.simulation import TITAN_ALLOCATOR, Target
from autosac.trace import Parallelism, TraceInfo

GOAL = Goal(budget_bytes=2**30)
JOB = TitanJob(config_file="job.toml", target=Target.of("h100-sxm-80gb", 8, allocator=TITAN_ALLOCATOR), world_size=8)
INFO = TraceInfo(
    local_batch_size=4,
    parallelism=Parallelism(dp_shard=8),
    job_settings={
        "training.global_batch_size": "-1",
        "optimizer.implementation": "fused",
        "parallelism.fsdp_reshard_after_forward": "default",
        "model.converters": "[]",
    },
)


def names(info: TraceInfo = INFO, job: TitanJob = JOB, goal: Goal = GOAL) -> list[str]:
    """The levers' names, without what is the same in all tests."""
    return [lever.name for lever in levers_of(info, job, goal)]


def test_the_levers_of_an_ordinary_job() -> None:
    """Smaller microbatches of the same global batch, what FSDP keeps, compilation, offloading, the loss; float8 marked."""
    assert names() == [
        "loss in chunks",
        "local batch 2, 2 microbatches",
        "local batch 1, 4 microbatches",
        "compiled model",
        "activations in host memory",
        "FSDP reshards after the forward: always",
        "FSDP reshards after the forward: never",
        "float8 products",
    ]
    levers = list(levers_of(INFO, JOB, GOAL))
    assert [lever.name for lever in levers if lever.numbers] == ["float8 products"]
    assert [lever.name for lever in levers if lever.quick] == ["loss in chunks", "local batch 2, 2 microbatches"]
    assert levers[1].how == "--training.local_batch_size 2 --training.global_batch_size 32"
    assert levers[0].how == "--chunk-loss" and levers[0].goal(GOAL) == replace(GOAL, chunk_loss=True)


@pytest.mark.parametrize(
    ("parallelism", "count"),
    [
        (Parallelism(cp=2), 2),
        (Parallelism(dp_shard=4, cp=2), 2),
        (Parallelism(dp_replicate=8), 0),
        (Parallelism(tp=8), 0),
    ],
)
def test_fsdp_shards_over_context_parallelism_as_well(parallelism: Parallelism, count: int) -> None:
    """What FSDP keeps can be changed wherever FSDP shards."""
    assert sum(name.startswith("FSDP reshards") for name in names(replace(INFO, parallelism=parallelism))) == count


def test_levers_that_are_pulled_already_are_left_out() -> None:
    """A compiled job, chunks and offloading that are allowed, float8 that is on; a global batch allows larger microbatches."""
    settings = {**INFO.job_settings, "training.global_batch_size": "64", "model.converters": "['float8']"}
    info = replace(INFO, compiled=True, job_settings=settings, parallelism=Parallelism(dp_replicate=8))
    goal = replace(GOAL, chunk_loss=True, offload=True)
    assert names(info, goal=goal) == [
        "local batch 8, 1 microbatch",
        "local batch 2, 4 microbatches",
        "local batch 1, 8 microbatches",
    ]


def test_the_allocator_and_the_optimizer() -> None:
    """A job without expandable segments and with a for-loop optimizer gets both; the lever changes the simulated machine."""
    job = replace(JOB, target=replace(JOB.target, allocator=AllocatorConfig()))
    info = replace(INFO, job_settings={"optimizer.implementation": "for-loop"}, local_batch_size=None)
    found = {lever.name: lever for lever in levers_of(info, job, GOAL)}
    assert list(found)[-2:] == ["fused optimizer", "expandable segments"]
    assert found["expandable segments"].job(job).target.allocator.expandable_segments
    assert found["expandable segments"].how == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert found["fused optimizer"].job(job).overrides == ("--optimizer.implementation", "fused")


@dataclass(frozen=True)
class Machine:
    """Tokens per second of levers together: each adds its own, two that hinder each other nothing."""

    rates: dict[str, float]
    hindering: frozenset[str] = frozenset()

    def pull(self, levers: Sequence[Lever]) -> Pulled:
        chosen = {lever.name for lever in levers}
        rate = 100.0 + sum(self.rates[name] for name in chosen)
        if self.hindering <= chosen and self.hindering:
            rate = 100.0
        simulation: Any = SimpleNamespace(throughput=SimpleNamespace(tokens_per_second=rate))
        planned: Any = SimpleNamespace(simulation=simulation)
        return Pulled(levers=tuple(levers), planned=planned)


def together(machine: Machine, levers: Sequence[Lever]) -> list[tuple[str, float]]:
    """What is pulled together, and its rate."""
    alone = [machine.pull((lever,)) for lever in levers]
    return [(pulled.name, pulled.tokens_per_second) for pulled in combined(alone, 100.0, machine.pull)]


def test_what_helps_is_pulled_together() -> None:
    """The best first; nothing that does not help, changes numbers, is of a kind that is there, or hinders."""
    levers = [
        Lever(name="a", kind="a"),
        Lever(name="b", kind="b"),
        Lever(name="other b", kind="b"),
        Lever(name="useless", kind="c"),
        Lever(name="numbers", kind="d", numbers="8 bits"),
        Lever(name="hinders", kind="e"),
    ]
    rates = {"a": 5.0, "b": 9.0, "other b": 2.0, "useless": 0.0, "numbers": 50.0, "hinders": 4.0}
    machine = Machine(rates, frozenset({"b", "hinders"}))
    assert together(machine, levers) == [("b + a", 114.0)]
    assert together(machine, levers[:1]) == [], "one alone has its row already"
    assert together(machine, levers[3:5]) == []


def planned(host_ms: float, checkpointing: str = "") -> Any:
    """A plan whose step of 100 ms waits so long for the host."""
    return SimpleNamespace(
        plan=SimpleNamespace(settings=SimpleNamespace(job_checkpointing=checkpointing)),
        simulation=SimpleNamespace(
            trace=SimpleNamespace(info=INFO),
            step_ms=100.0,
            breakdown=SimpleNamespace(host_bound_ms=host_ms),
            throughput=SimpleNamespace(tokens_per_second=1.0),
        ),
    )


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (InfeasibleError("no plan"), ("none",)),
        (planned(host_ms=0.0), ("none",)),
        (planned(host_ms=5.0), ("none", "full")),
        (planned(host_ms=0.0, checkpointing="full"), ("none", "full")),
    ],
)
def test_what_levers_compete_with(own: Any, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Full checkpointing, where the host limits the plan without them or it is that plan; of the same stages as without."""
    asked: list[tuple[bool, tuple[str, ...]]] = []

    def captures_of(*_: Any, all_stages: bool, beside: tuple[str, ...]) -> list[Any]:
        asked.append((all_stages, beside))
        return [SimpleNamespace(observed=lambda: SimpleNamespace(trace=SimpleNamespace(info=INFO)))]

    def no_plan(*_: Any) -> tuple[InfeasibleError]:
        return (InfeasibleError("none with it"),)

    monkeypatch.setattr("autosac.jobs.levers.captures_of", captures_of)
    monkeypatch.setattr("autosac.jobs.levers.plans_with_loss", no_plan)
    server: Any = None
    pulled = pull(server, JOB, GOAL, own, "quick", all_stages=False)
    assert [(one.name, one.failure) for one in pulled] == [
        ("loss in chunks", "none with it"),
        ("local batch 2, 2 microbatches", "none with it"),
    ]
    assert set(asked) == {(False, names)} and len(asked) == 2 + isinstance(own, InfeasibleError)


def test_a_levers_captures_begin_before_the_one_before_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture process need not wait for a plan: while one lever is planned, the next one is captured; no further ones."""
    done: list[str] = []

    def captures_of(job: TitanJob, *_: Any, **__: Any) -> str:
        done.append(f"captured with {' '.join(job.overrides[1:2])}")
        return f"planned with {' '.join(job.overrides[1:2])}"

    def no_plan(captures: str, *_: Any) -> tuple[InfeasibleError]:
        done.append(captures)
        return (InfeasibleError("none with it"),)

    monkeypatch.setattr("autosac.jobs.levers.captures_of", captures_of)
    monkeypatch.setattr("autosac.jobs.levers.plans_with_loss", no_plan)
    server: Any = None
    settings = {"training.global_batch_size": "64"}
    info = replace(INFO, job_settings=settings, compiled=True)  # the only levers are the microbatches' sizes
    own = planned(host_ms=0.0)
    own.simulation.trace.info = info
    pull(server, JOB, replace(GOAL, chunk_loss=True), own, "all", all_stages=False)
    assert done == [
        "captured with 8",
        "captured with 2",
        "planned with 8",
        "captured with 1",
        "planned with 2",
        "planned with 1",
    ]
    assert list(one_ahead([])) == [] and list(one_ahead([1, 2, 3])) == [1, 2, 3]
