"""The search for the local batch size, with a job that is three functions of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.cli.parser import main
from autosac.errors import CaptureError, InfeasibleError, UsageError
from autosac.planning.batch_search import BatchSizes, Unplanned, best_of, search_batches
from autosac.planning.closed_loop import Planned
from autosac.trace import Parallelism, TraceInfo


class Fake:
    """With everything recomputed a batch of b needs b bytes, without checkpointing 3b; it then trains on `plain[b]` tokens/s
    and under a plan on `plain[b] - lost[b]`, on all of them if it fits without checkpointing.
    """

    def __init__(
        self, plain: dict[int, float], lost: dict[int, float], budget: int, broken: tuple[int, ...] = ()
    ) -> None:
        self.plain, self.lost, self.budget, self.broken = plain, lost, budget, broken
        self.asked: dict[str, list[int]] = {"least": [], "unplanned": [], "planned": []}

    def _ask(self, what: str, size: int) -> None:
        self.asked[what].append(size)
        if size in self.broken:
            raise CaptureError("fewer microbatches than stages")

    def least_bytes(self, size: int) -> int:
        self._ask("least", size)
        return size

    def unplanned(self, size: int) -> Unplanned:
        self._ask("unplanned", size)
        return Unplanned(self.plain[size], 3 * size)

    def rate(self, size: int) -> float:
        return self.plain[size] - (self.lost[size] if 3 * size > self.budget else 0.0)

    def planned(self, size: int) -> Planned | InfeasibleError:
        self._ask("planned", size)
        if size > self.budget:
            return InfeasibleError("no plan")
        throughput = SimpleNamespace(tokens_per_second=self.rate(size))
        plan: Any = None
        simulation: Any = SimpleNamespace(throughput=throughput)
        return Planned(plan=plan, simulation=simulation)


def sizes_of(count: int, own: int = 1) -> BatchSizes:
    """All sizes up to a count."""
    return BatchSizes(sizes=tuple(range(1, count + 1)), own=own, data_parallel=1)


def test_what_is_asked_and_what_is_not() -> None:
    """Budget 12: sizes up to 12 fit recomputed, up to 4 without it. 12, 11 and 10 lose much, 9 little, and 8 has no bound
    above what 9 reaches: five sizes without checkpointing, four plans. Above 12, two are asked for their least memory.
    """
    plain = {size: 100.0 + size for size in range(1, 33)}
    fake = Fake(plain, {**dict.fromkeys(range(1, 33), 50.0), 9: 0.5}, 12)
    trials = search_batches(fake, sizes_of(32, own=8), 12)
    assert best_of(trials).local_batch_size == 9 and best_of(trials).tokens_per_second == 108.5
    assert fake.asked == {"least": [8, 9, 11, 15, 13, 12], "unplanned": [12, 11, 10, 9, 8], "planned": [12, 11, 10, 9]}
    outcomes = {trial.local_batch_size: trial.outcome for trial in trials}
    planned = dict.fromkeys((9, 10, 11, 12), "planned")
    assert outcomes == {8: "not faster", **planned, 13: "too large", 15: "too large"}


def test_no_plan_is_made_for_what_can_at_best_be_as_fast() -> None:
    """Under its plan a batch of 3 trains on 6 tokens/s, as one of 2 would without checkpointing."""
    fake = Fake({1: 6.0, 2: 6.0, 3: 10.0}, dict.fromkeys((1, 2, 3), 4.0), 3)
    trials = search_batches(fake, sizes_of(3), 3)
    assert [(trial.local_batch_size, trial.outcome) for trial in trials] == [(2, "not faster"), (3, "planned")]
    assert fake.asked["planned"] == [3]


def test_a_size_that_fits_without_checkpointing_ends_the_search() -> None:
    """If the largest size fits as it is, nothing smaller is looked at."""
    fake = Fake({size: float(size) for size in range(1, 9)}, {}, 100)
    trials = search_batches(fake, sizes_of(8, own=2), 100)
    assert [trial.local_batch_size for trial in trials] == [8] and fake.asked["planned"] == [8]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), count=st.integers(1, 40), budget=st.integers(1, 50))
def test_the_best_of_all_sizes_is_found(data: st.DataObject, count: int, budget: int) -> None:
    """Whatever the rates, if they rise with the size, the search finds what trying every size finds."""
    rises = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    plain = {size: 100.0 + sum(rises[:size]) for size in range(1, count + 1)}
    lost = {size: float(data.draw(st.integers(0, 20))) for size in plain}
    fake = Fake(plain, lost, budget)
    trials = search_batches(fake, sizes_of(count, own=data.draw(st.integers(1, count))), budget)
    assert best_of(trials).tokens_per_second == max(fake.rate(size) for size in plain if size <= budget)
    assert len(fake.asked["least"]) <= 2 * count.bit_length() + 1


def test_sizes_with_which_the_job_cannot_run() -> None:
    """Too small for the pipeline: they are named and do not count as too large; the job's own size has to run."""
    fake = Fake(dict.fromkeys(range(1, 9), 100.0), dict.fromkeys(range(1, 9), 1.0), 6, broken=(1, 2, 3, 7, 8))
    trials = search_batches(fake, sizes_of(8, own=4), 6)
    assert best_of(trials).tokens_per_second == 99.0
    assert {t.local_batch_size for t in trials if t.outcome.startswith("cannot run: fewer")} == {1, 2, 3, 7}
    with pytest.raises(CaptureError, match="fewer microbatches"):
        search_batches(fake, sizes_of(8, own=2), 6)


def test_no_size_fits() -> None:
    """The error says what the smallest needs."""
    big = BatchSizes(sizes=(2048, 4096), own=4096, data_parallel=1)
    with pytest.raises(InfeasibleError, match=r"meets 1\.0 KiB: the smallest that can run is 2048, 2\.0 KiB with"):
        search_batches(Fake({}, {}, 1024), big, 1024)


def info(global_batch: str, pp: int = 1) -> TraceInfo:
    """Of a trace: four data-parallel ranks, local batch 6."""
    degrees = Parallelism(pp=pp) if pp > 1 else Parallelism(dp_replicate=2, dp_shard=2, tp=8)
    return TraceInfo(parallelism=degrees, local_batch_size=6, job_settings={"training.global_batch_size": global_batch})


def test_a_fixed_global_batch_leaves_divisors() -> None:
    """48 sequences on 4 data-parallel ranks are 12 each: its divisors, and accumulation makes up the rest."""
    sizes = BatchSizes.of(info("48"))
    assert sizes.sizes == (1, 2, 3, 4, 6, 12) and sizes.own == 6
    assert [sizes.accumulation(size) for size in sizes.sizes] == [12, 6, 4, 3, 2, 1]
    assert BatchSizes.of(info("48"), (12, 4)).sizes == (4, 12)
    with pytest.raises(UsageError, match="a local batch of 5 does not divide the 12 sequences"):
        BatchSizes.of(info("48"), (4, 5))


def test_a_free_batch_follows_a_grid() -> None:
    """Powers of two and three times them, and no accumulation."""
    sizes = BatchSizes.of(info("-1"))
    assert sizes.sizes[:9] == (1, 2, 3, 4, 6, 8, 12, 16, 24) and sizes.accumulation(24) == 1
    assert BatchSizes.of(info("-1"), (7, 5)).sizes == (5, 7)


def test_a_pipeline_needs_a_bound() -> None:
    """With pipeline stages a free batch has no best size; named sizes and a fixed global batch do."""
    staged = info("-1", pp=2)
    with pytest.raises(UsageError, match=r"give --batch-sizes, or the job a training\.global_batch_size"):
        BatchSizes.of(staged)
    assert BatchSizes.of(staged, (4, 8)).sizes == (4, 8)
    assert BatchSizes.of(info("8", pp=2)).sizes == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "4"], "--batch-sizes needs --maximize tokens-per-second"),
        (["--maximize", "tokens-per-second", "--batch-sizes", "4,0"], "expected whole numbers from 1 to"),
        (["--maximize", "tokens-per-second", "--batch-sizes", "4,x"], "expected whole numbers from 1 to"),
        (["--maximize", "tokens-per-second", "--batch-sizes", "4,4"], "a batch size is given twice"),
        (["--maximize", "tokens-per-second", "--pareto", "3"], "--maximize needs one budget"),
        (["--maximize", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert main(["plan", "job.toml", "--gpu", "h100-sxm-80gb", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
