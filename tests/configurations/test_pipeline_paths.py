"""The longest path through a pipeline's schedule, against schedules that are executed and against what a person can add up."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.configurations.bounds.pipeline_paths import StageTimes, longest_path_ms, works_ms
from autosac.configurations.space.schedules import order

MS = st.floats(0.0, 10)
SCHEDULES = st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B"])


def executed_ms(
    schedule: str,
    ranks: int,
    m: int,
    stages: list[StageTimes],
    again_ms: list[float],
    hop_ms: float,
) -> float:
    """The first rank's step when every operation begins as soon as it can. `again_ms`: recomputation of each stage and
    microbatch; `hop_ms`: between stages.
    """
    last, before, works = len(stages) - 1, {}, []
    for rank in range(ranks):
        counts: dict[tuple[str, int], int] = {}
        own = []
        for kind, position in order(schedule, ranks, m, len(stages) // ranks, rank):
            stage = position * ranks + rank
            own.append((kind, stage, counts.get((kind, stage), 0)))
            counts[kind, stage] = own[-1][2] + 1
        before |= {work: earlier for earlier, work in pairwise(own)}
        works.append(own)
    follows_forward = set()
    for own in works:
        for stage in {work[1] for work in own}:
            of_stage = [work for work in own if work[1] == stage]
            follows_forward |= {of_stage[0], *(b for a, b in pairwise(of_stage) if a[0] == "F")}

    @cache
    def end_ms(kind: str, stage: int, i: int) -> float:
        waits = [end_ms(*before[kind, stage, i])] if (kind, stage, i) in before else [0.0]
        if kind == "F":
            waits += [end_ms("F", stage - 1, i) + hop_ms] if stage else []
        else:
            waits.append(end_ms("B", stage + 1, i) + hop_ms if stage < last else end_ms("F", stage, i))
        times = stages[stage]
        own_ms = times.forward if kind == "F" else times.backward + again_ms[stage] + bool(i) * times.accumulated
        if (kind, stage, i) in follows_forward:
            own_ms += times.gathered + (times.awaited if kind == "F" and i else 0.0)
        return max(waits) + own_ms

    return end_ms(*works[0][-1])


@given(SCHEDULES, st.integers(2, 4), st.integers(1, 3), st.integers(2, 4), st.data())
def test_no_schedule_is_faster_than_its_longest_path(
    schedule: str, ranks: int, rounds: int, several: int, data: st.DataObject
) -> None:
    """However a rank's recomputation is divided over its stages; with one stage on a rank the path is what it takes."""
    of_rank, m = several if schedule == "Interleaved1F1B" else 1, ranks * rounds
    count = of_rank * ranks
    stages = [StageTimes(*data.draw(st.tuples(*[MS] * 5))) for _ in range(count)]
    again = data.draw(st.lists(MS, min_size=count, max_size=count))
    extra = [m * sum(again[rank::ranks]) for rank in range(ranks)]
    hop_ms = data.draw(MS)
    found = longest_path_ms(schedule, ranks, m, stages, extra, hop_ms=hop_ms, after_ms=1.0)
    taken = executed_ms(schedule, ranks, m, stages, again, hop_ms) + 1.0
    assert found <= taken * (1 + 1e-9)
    if of_rank == 1:
        assert found == pytest.approx(taken)


@given(SCHEDULES, st.integers(1, 4), st.integers(1, 3), st.integers(2, 3), st.data())
def test_no_schedule_is_faster_than_its_path_at_the_clock_of_each_rank(
    schedule: str, ranks: int, rounds: int, several: int, data: st.DataObject
) -> None:
    """Ranks whose operations take longer, each kind by a factor of its own that only has to make the whole work of the rank
    longer by what is told.
    """
    of_rank, m = several if schedule == "Interleaved1F1B" else 1, ranks * rounds
    count = of_rank * ranks
    stages = [StageTimes(*data.draw(st.tuples(*[MS] * 5))) for _ in range(count)]
    again = data.draw(st.lists(MS, min_size=count, max_size=count))
    extra = [m * sum(again[rank::ranks]) for rank in range(ranks)]
    factors = [
        StageTimes(*data.draw(st.tuples(*[st.floats(1.0, 2.0)] * 4)), awaited=1.0) for _ in range(count)
    ]  # of products, which are another part of each kind
    real = [
        StageTimes(*(ms * factor for ms, factor in zip(times, some, strict=True)))
        for times, some in zip(stages, factors, strict=True)
    ]
    known, taken = works_ms(stages, ranks, m), works_ms(real, ranks, m)
    longer = [after - before for before, after in zip(known, taken, strict=True)]
    hop_ms = data.draw(MS)
    found = longest_path_ms(schedule, ranks, m, stages, extra, hop_ms=hop_ms, lengthened_ms=longer)
    assert found <= executed_ms(schedule, ranks, m, real, again, hop_ms) * (1 + 1e-9) + 1e-9


def test_a_slower_clock_lengthens_the_path() -> None:
    """Four equal ranks, 8 microbatches of 1 + 2 ms: each rank's 24 ms take 6 ms longer, so a path of 33 ms takes a quarter
    longer; one rank alone takes 3 ms longer.
    """
    stages = [StageTimes(1, 2)] * 4
    assert longest_path_ms("1F1B", 4, 8, stages, [0.0] * 4, lengthened_ms=[6.0] * 4) == pytest.approx(33 * 1.25)
    assert longest_path_ms("1F1B", 1, 8, stages[:1], [0.0], lengthened_ms=[3.0]) == 27


def test_backwards_but_the_first_add_gradients() -> None:
    """Three backwards, 1 ms to add gradients: twice."""
    assert longest_path_ms("1F1B", 1, 3, [StageTimes(0, 0, 0, 1)], [0.0]) == 2
    assert works_ms([StageTimes(1, 2, 3, 4)], 1, 3) == [3 * (1 + 2) + 4 * 3 + 2 * 4]


def test_two_stages_of_a_rank_share_its_recomputation_as_is_best() -> None:
    """Two ranks, four stages, two microbatches: of 101 ways to share 6 ms on the first rank, none is below the bound, and the
    best one is hardly above it.
    """
    stages = [StageTimes(1, 2), StageTimes(2, 1), StageTimes(1, 1), StageTimes(0.5, 3)]
    ways = [
        executed_ms("Interleaved1F1B", 2, 2, stages, [3 * i / 100, 0.0, 3 - 3 * i / 100, 0.0], 0.25) for i in range(101)
    ]
    found = longest_path_ms("Interleaved1F1B", 2, 2, stages, [6.0, 0.0], hop_ms=0.25)
    assert 0.99 * min(ways) <= found <= min(ways)


def test_equal_stages() -> None:
    """Four ranks, 8 microbatches of 1 + 2 ms: 8 and 3 more; two stages on each rank halve the bubble."""
    assert longest_path_ms("1F1B", 4, 8, [StageTimes(1, 2)] * 4, [0.0] * 4) == 11 * 3
    assert longest_path_ms("Interleaved1F1B", 4, 8, [StageTimes(0.5, 1)] * 8, [0.0] * 4) == 8 * 3 + 3 * 1.5


def test_recomputation_of_the_first_rank_holds_all_up() -> None:
    """Two ranks, 4 microbatches, 1 ms more in each backward of the first: the step waits for three of the four."""
    stages = [StageTimes(1, 2)] * 2
    assert longest_path_ms("1F1B", 2, 4, stages, [0.0, 0.0]) == 5 * 3
    assert longest_path_ms("1F1B", 2, 4, stages, [4.0, 0.0]) == 5 * 3 + 3


def test_parameters_are_gathered_after_every_forward() -> None:
    """One rank alone: GPipe gathers before each of 3 forwards and before the first backward; 1F1B after each forward, too."""
    assert longest_path_ms("GPipe", 1, 3, [StageTimes(0, 0, 1)], [0.0]) == 4
    assert longest_path_ms("1F1B", 1, 3, [StageTimes(0, 0, 1)], [0.0]) == 4


def test_forwards_that_gather_wait_for_it() -> None:
    """One rank alone, three microbatches: GPipe's second and third forward gather, 1F1B's follow a backward, which frees
    nothing. A rank's work does not grow by that.
    """
    waiting = [StageTimes(1, 2, awaited=5)]
    assert longest_path_ms("GPipe", 1, 3, waiting, [0.0]) == 3 * 3 + 2 * 5
    assert longest_path_ms("1F1B", 1, 3, waiting, [0.0]) == 3 * 3
    assert works_ms(waiting, 1, 3) == [9]
