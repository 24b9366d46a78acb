"""Degrees of one change nothing, and one rank of every distinct kind tells what all ranks would."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.simulation import TITAN_ALLOCATOR, Simulation, Target, execute_together, simulation_of
from autosac.trace import Trace

Ranks = Callable[..., list[Trace]]
MIXTURE = ("--model.name", "deepseek_v3", "--model.flavor", "debugmodel", "--training.seq_len", "256")
STEP_MS = 1e-9  # relative: sums of the same numbers in another order


@pytest.mark.parametrize("degree", ["tensor", "context", "pipeline"])
def test_a_degree_of_one_is_none(ranks: Ranks, degree: str) -> None:
    """The job of 2 ranks whose TP, CP or PP degree is set to one is the job where it is not set, event for event."""
    (plain,) = ranks(2)
    (same,) = ranks(2, **{f"{degree}_parallel_degree": 1})
    assert (same.events, same.prologue) == (plain.events, plain.prologue)
    assert (same.storages, same.signatures, same.groups) == (plain.storages, plain.signatures, plain.groups)


def test_expert_parallelism_of_one_is_none(ranks: Ranks) -> None:
    """So it is for experts, in a model that has some."""
    (plain,) = ranks(2, model=MIXTURE)
    (same,) = ranks(2, model=MIXTURE, expert_parallel_degree=1, expert_tensor_parallel_degree=1)
    assert (same.events, same.storages, same.groups) == (plain.events, plain.storages, plain.groups)


EIGHT = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "local_batch_size": 2}


def test_one_rank_a_stage_stands_for_all(ranks: Ranks) -> None:
    """PP 2 x FSDP 2 x TP 2: ranks 0 and 4 executed together take as long as all eight that meet in every collective and
    every transfer; each has the memory of its stage's first rank.
    """
    target = Target.of("h100-sxm-80gb", 8, allocator=TITAN_ALLOCATOR)
    every = [simulation_of(trace, target) for trace in ranks(8, every=True, **EIGHT)]
    distinct = [simulation_of(trace, target) for trace in ranks(8, **EIGHT)]
    assert [s.trace.info.rank for s in every] == list(range(8))
    assert [s.trace.info.rank for s in distinct] == [0, 4]
    together, alone = execute_together(every), execute_together(distinct)
    assert together.makespan_ms == pytest.approx(alone.makespan_ms, rel=STEP_MS)
    for rank, simulation in enumerate(every):
        first = distinct[rank // 4]
        assert figures(simulation) == figures(first)


def figures(simulation: Simulation) -> tuple[int, int, int, float]:
    """What is said of one rank by itself."""
    return (
        simulation.peak_active_bytes,
        simulation.peak_reserved_bytes,
        sum(1 for _ in simulation.trace.operators()),
        simulation.pricing.event_ms.sum(),
    )
