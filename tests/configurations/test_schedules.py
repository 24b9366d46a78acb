"""Orders of pipeline ranks against PyTorch's own schedules; what ranks hold, by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac.configurations.space.layout import Layout
from autosac.configurations.space.schedules import Moment, PipelineRank, moments, order, places

_SHORT = {"FORWARD": "F", "FULL_BACKWARD": "B"}


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many ranks, of which this is the first."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("Interleaved1F1B", 4)],
)
def test_orders_are_those_of_pytorch(ranks: int, schedule: str, stages: int) -> None:
    """Every rank's forwards and backwards, in the order of PyTorch's schedule, for few and for many microbatches."""
    built = [
        PipelineStage(torch.nn.Linear(1, 1), i * ranks, stages * ranks, torch.device("cpu")) for i in range(stages)
    ]
    for microbatches in (1, 2, 3, 4, 8, 12):
        if schedule == "1F1B" and microbatches < ranks:  # which PyTorch refuses
            continue
        made = get_schedule_class(schedule)(built[0] if stages == 1 else built, microbatches, loss_fn=torch.sum)
        theirs = made._get_pipeline_order() if stages == 1 else made.pipeline_order
        for rank in range(ranks):
            named = [(action.computation_type.name, action.stage_index // ranks) for action in theirs[rank] if action]
            found = [(_SHORT[name], stage) for name, stage in named if name in _SHORT]
            assert order(schedule, ranks, microbatches, stages, rank) == found


def test_what_the_first_of_two_ranks_holds() -> None:
    """1F1B with 4 microbatches: two before the first backward, and two again, with gradients, before the second."""
    assert moments("1F1B", 2, 4, 1, 0) == (Moment((2,), (False,), False, 0), Moment((2,), (True,), False, 0))
    assert moments("1F1B", 2, 1, 1, 1) == (Moment((1,), (False,), True, 0),)


def test_what_interleaved_ranks_hold() -> None:
    """Two ranks, two stages on each, 4 microbatches: the first rank runs F F f f F before its first backward."""
    first = moments("Interleaved1F1B", 2, 4, 2, 0)
    assert first[0] == Moment((3, 2), (False, False), False, 1)
    assert first[1] == Moment((4, 1), (False, True), False, 1)
    last = moments("Interleaved1F1B", 2, 4, 2, 1)
    assert last[0] == Moment((2, 1), (False, False), True, 1)


def test_gradients_are_whole_between_a_stages_first_and_last_backward() -> None:
    """GPipe with 3 microbatches: none before the first backward; complete, and reduced, after the last."""
    assert moments("GPipe", 2, 3, 1, 0) == (Moment((3,), (False,), False, 0), Moment((2,), (True,), False, 0))
    assert moments("GPipe", 2, 1, 1, 0) == (Moment((1,), (False,), False, 0),)


def test_stages_of_a_v_go_forth_and_back() -> None:
    """Of four stages on two ranks in a V, the first rank has the first and the last."""
    layout = Layout(gpu="any", pipeline=2, schedule="ZBVZeroBubble", global_batch=4)
    assert places(layout, (1, 2, 3, 4), 3) == [
        PipelineRank(0, (1, 4), True, (1, 0)),
        PipelineRank(1, (2, 3), False, (2, 0)),
    ]


def test_stages_of_a_loop_are_dealt_out() -> None:
    """Of six stages on two ranks, each rank has every second one."""
    layout = Layout(gpu="any", pipeline=2, schedule="Interleaved1F1B", stages=3, global_batch=4)
    assert places(layout, (1, 2, 3, 4, 5, 6), 0) == [
        PipelineRank(0, (1, 3, 5), False, (0, 0, 0)),
        PipelineRank(1, (2, 4, 6), True, (0, 0, 0)),
    ]
