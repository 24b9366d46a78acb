"""Whether and in how many chunks a plan computes the loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autosac.errors import InfeasibleError
from autosac.planning.closed_loop import ALSO_FITS, Planned
from autosac.planning.loss_chunks import chunks_of, competing
from autosac.plans import Plan, Prediction, Settings
from autosac.trace import Op, Phase, Signature, TensorMeta, Trace
from plans import MADE_FOR
from traces import trace_of

GIB = 2**30


def planned(step_ms: float, *, recompute_ms: float = 1.0, chunks: int = 1, notes: tuple[str, ...] = ()) -> Planned:
    """A plan with this step time; without checkpointing the step takes a millisecond for each chunk."""
    one = Prediction(
        step_ms=step_ms, peak_active_bytes=1, peak_reserved_bytes=None, fits=True, recompute_ms=recompute_ms
    )
    predictions = {"autosac": one, "none": replace(one, step_ms=float(chunks))}
    plan = Plan(made_for=MADE_FOR, units=(), settings=Settings(loss_chunks=chunks), predictions=predictions)
    simulation: Any = SimpleNamespace(trace=trace_of())
    return Planned(plan=plan, simulation=simulation, notes=notes)


def own() -> dict[str, Prediction]:
    """The job's own ways of checkpointing, with its own loss."""
    return {"full": Prediction(step_ms=2.0, peak_active_bytes=2, peak_reserved_bytes=3, fits=True, recompute_ms=1.0)}


def step_of(rows: int, classes: int, module: str, phase: Phase) -> Trace:
    """A step with one tensor in float32, made by this module in this phase."""
    meta = TensorMeta((rows, classes), (classes, 1), "float32")
    signature = Signature("aten._log_softmax.default", (), (meta,))
    op = Op(0, 0, 0, phase, 0, (), (0,))
    return trace_of([op], signatures=[signature], modules=[module])


@pytest.mark.parametrize(
    ("rows", "classes", "module", "phase", "chunks"),
    [
        (16_384, 131_072, "", Phase.FORWARD, 32),
        (16_384, 131_073, "", Phase.FORWARD, 64),
        (1024, 65_536, "", Phase.FORWARD, 1),
        (1024, 65_537, "", Phase.FORWARD, 2),
        (2**22, 2**20, "", Phase.FORWARD, 1024),
        (16_384, 131_072, "layers.0", Phase.FORWARD, 1),
        (16_384, 131_072, "", Phase.OPTIMIZER, 1),
    ],
)
def test_a_chunk_has_no_tensor_above_256_mib(rows: int, classes: int, module: str, phase: Phase, chunks: int) -> None:
    """8 GiB of float32 are 32 chunks, a byte more 64; what modules or the optimizer make does not count."""
    assert chunks_of(step_of(rows, classes, module, phase)) == chunks


def test_a_step_without_a_loss() -> None:
    """Nothing outside of modules: one chunk."""
    assert chunks_of(trace_of()) == 1


def test_the_shorter_step_of_each_budget() -> None:
    """The plan in chunks where its step is shorter, beside the job's own baselines; each says what chunks gave or would."""
    plain = (planned(100.0), planned(80.0), InfeasibleError("too little"), planned(60.0))
    other = (planned(90.0, chunks=8), planned(81.0, chunks=8), planned(120.0, chunks=8), InfeasibleError("none"))
    first, second, third, last = competing(plain, 8, lambda: other, own)
    assert isinstance(first, Planned) and first.plan.settings.loss_chunks == 8
    assert first.plan.predictions["none"].step_ms == 1.0, "of the job's own loss"
    assert "10.0 ms shorter" in first.notes[-1] and "the order of summation" in first.notes[-1]
    assert isinstance(second, Planned) and second.plan.settings.loss_chunks == 1
    assert "1.0 ms longer" in second.notes[-1]
    assert isinstance(third, Planned) and "without that no plan would fit" in third.notes[-1]
    assert third.plan.predictions == {"autosac": other[2].plan.predictions["autosac"], **own()}
    assert isinstance(last, Planned) and last.plan.settings.loss_chunks == 1 and "no plan fits" in last.notes[-1]


@pytest.mark.parametrize(
    ("peak_in", "told"),
    [
        ("loss", "with the loss in 8 chunks no plan meets 9 GiB: it needs 12"),
        ("", "no plan meets 9 GiB: it needs 15; nor does any with the loss in 8 chunks"),
    ],
)
def test_nothing_fits_in_chunks_either(peak_in: str, told: str) -> None:
    """The error is that of the step that needs less: with chunks, if memory peaks in the loss without."""
    plain = InfeasibleError("no plan meets 9 GiB: it needs 15", peak_in=peak_in)
    (found,) = competing((plain,), 8, lambda: (InfeasibleError("no plan meets 9 GiB: it needs 12"),), own)
    assert str(found) == told


def test_nothing_is_planned_where_nothing_can_be_gained() -> None:
    """A step that recomputes nothing, and a loss that is small: the second planning does not happen."""

    def never() -> tuple[Planned, ...]:
        raise AssertionError

    assert competing((planned(5.0, recompute_ms=0.0),), 8, never, own) == (planned(5.0, recompute_ms=0.0),)
    (small,) = competing((planned(5.0),), 1, never, own)
    assert isinstance(small, Planned) and "too small" in small.notes[-1]


def test_plans_in_chunks_are_compared_with_the_jobs_own_ways() -> None:
    """What is told of checkpointing with a chunked loss, which the job does not have, is taken back; what the job does by
    itself within the budget, and faster, is told.
    """
    told = (f"the job's own full{ALSO_FITS} by 7.0 ms", "the peak is somewhere")
    for budget_bytes, count in ((3, 1), (2, 0)):
        other = planned(9.0, chunks=8, notes=told)
        made_for = replace(MADE_FOR, budget_bytes=budget_bytes, budget_kind="reserved")
        other = replace(other, plan=replace(other.plan, made_for=made_for))
        (found,) = competing((InfeasibleError("no"),), 8, lambda other=other: (other,), own)
        assert isinstance(found, Planned)
        first, *quicker, _ = found.notes
        assert first == "the peak is somewhere" and len(quicker) == count
        assert all(note.startswith("the job's own full also fits and is faster by 7.0 ms: ") for note in quicker)
