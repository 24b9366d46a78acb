"""What cannot be simulated says why."""

from __future__ import annotations

import numpy as np
import pytest

from autosac.errors import SimulationError
from autosac.runtime_sim import ConstantOverlap, HostModel, simulate
from autosac.trace import Group


def test_an_empty_trace(job, run):
    """A trace without events is refused."""
    with pytest.raises(SimulationError, match="empty"):
        run(job())


def test_no_trace_at_all(run):
    """An empty sequence of traces is refused."""
    with pytest.raises(SimulationError, match="no trace"):
        run()


@pytest.mark.parametrize("price", [float("nan"), float("inf"), -1.0])
def test_prices_that_are_no_durations(job, run, price):
    """NaN, infinite and negative prices are refused with the operator's name and source line."""
    with pytest.raises(SimulationError, match=r"aten.mm.default \(event 1, module 'a', model.py:1\) is priced at"):
        run(job().op(1).op(price, module=1))


def test_a_pricing_of_another_trace(job):
    """As many prices as events are needed, and as many pricings as traces."""
    one, two = job().op(1), job().op(1).op(2)
    with pytest.raises(SimulationError, match="1 durations, the trace 2 events"):
        simulate(two.trace, one.priced)
    with pytest.raises(SimulationError, match="2 traces need as many pricings"):
        simulate([one.trace, two.trace], [one.priced])


def test_an_event_that_is_never_recorded(job, run):
    """The error names the stream, the event, and the operator behind the wait."""
    with pytest.raises(SimulationError) as caught:
        run(job().op(1).wait(7, 1).op(2, stream=1, module=2))
    message = str(caught.value)
    assert "deadlock on rank 0: stream 'gather' waits for event 7 at event 1" in message
    assert "aten.mm.default (event 2, module 'a.b', model.py:1) would come next" in message


def test_a_host_that_waits_for_an_event_that_is_never_recorded(job, run):
    """The same for the host."""
    with pytest.raises(SimulationError, match="the host waits for event 7"):
        run(job().op(1).sync(event=7, reason="event"))


def test_work_that_nobody_started(job, run):
    """A wait for a collective that does not exist names it."""
    with pytest.raises(SimulationError, match=r"waits for work 3 .* but no collective starts it"):
        run(job().wait_work(3).op(1))


def test_a_rank_that_never_joins(job, run):
    """Rank 0 gathers twice, rank 1 once: the error names the stream, the call, and who does not come."""
    with pytest.raises(SimulationError) as caught:
        run(job(rank=0).collective(1).collective(1, work=2).wait_work(2).op(1), job(rank=1).collective(1))
    message = str(caught.value)
    assert "rank 0 waits on stream 'group dp' in all_gather (event 1" in message
    assert "number 1 of group 'dp', which rank 1 never issues" in message


def test_transfers_in_opposite_order(job, run):
    """Both ranks receive before they send on one stream: each waits for a send that is behind the other's
    recv. What their hosts have not issued yet is something else.
    """
    groups = (Group.of("pp", range(2)),)
    ranks = [
        job(rank=r, groups=groups)
        .collective(1, kind="recv", peer=1 - r, asynchronous=False)
        .collective(1, kind="send", peer=1 - r, asynchronous=False)
        .sync(stream=0, reason="stream")
        .op(1)
        for r in (0, 1)
    ]
    with pytest.raises(SimulationError) as caught:
        run(*ranks)
    message = str(caught.value)
    assert "rank 0 waits on stream 'compute' in recv from rank 1" in message
    assert "send to rank 0 (event 1, model.py:1) of rank 1, which is behind recv from rank 0" in message


def test_a_host_that_never_issues_the_send(job, run):
    """Rank 1's host waits for a recv before it issues what rank 0 needs first: both sides are named."""
    groups = (Group.of("pp", range(2)),)
    ranks = []
    for r in (0, 1):
        made = job(rank=r, groups=groups)
        made.collective(1, kind="recv", peer=1 - r, work=1).wait_work(1).sync(stream=0, reason="stream")
        ranks.append(made.collective(1, kind="send", peer=1 - r))
    with pytest.raises(SimulationError) as caught:
        run(*ranks)
    message = str(caught.value)
    assert "of rank 1, which the host never issues" in message
    assert "the host of rank 0 waits at HostWait (event 2) for recv from rank 1" in message


@pytest.mark.parametrize("setting", [{"steps": 0}, {"gpus_per_node": 0}])
def test_settings_that_make_no_sense(job, run, setting):
    """At least one step and one GPU a node."""
    with pytest.raises(SimulationError, match="at least 1"):
        run(job().op(1), **setting)


def test_models_that_make_no_sense():
    """Negative host times, an empty launch queue and speed-ups by interference are refused."""
    with pytest.raises(SimulationError, match="eager_op_us is -1"):
        HostModel(eager_op_us=-1)
    with pytest.raises(SimulationError, match="sync_us is nan"):
        HostModel(sync_us=float("nan"))
    with pytest.raises(SimulationError, match="queue_depth is 0"):
        HostModel(queue_depth=0)
    with pytest.raises(SimulationError, match=r"compute_intra is 0\.9"):
        ConstantOverlap(compute_intra=0.9)


def test_an_unknown_selective_module(job, run):
    """A module that no rank has is refused by name."""
    with pytest.raises(SimulationError, match=r"no trace has a module named 'layers\.9'"):
        run(job().op(1), selective_modules=["a", "layers.9"])


def test_throughput_needs_the_tokens(job, run):
    """A trace that does not say how many tokens it trains on has no throughput."""
    with pytest.raises(SimulationError, match="tokens_per_step"):
        run(job().op(1)).throughput(1e15)


def test_a_step_of_host_work_alone(job, run):
    """Nothing on the device is no error: the step takes the host's time."""
    timeline = run(job().op(0, kind="view").op(0, kind="view"), host=HostModel(view_op_us=500.0))
    assert timeline.makespan_ms == 1.0
    assert np.isnan(timeline.ranks[0].end_ms).all()
    assert timeline.breakdown().host_bound_ms == 1.0
