"""The host: launches, queues, waits, and what every event costs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autosac.errors import SimulationError
from autosac.runtime_sim import INSTANT_HOST, HostModel
from autosac.runtime_sim.host import host_costs
from autosac.trace import Alloc, Free, GraphLaunch, Op, Phase, RecordStream, Signature, StreamWait, TensorMeta
from traces import trace_of

SLOW = replace(INSTANT_HOST, eager_op_us=500.0)  # 0.5 ms for each operator


def test_host_bound_launches(job, run):
    """Four 0.125-ms kernels, a launch each 0.5 ms: starts at 0.5, 1, 1.5, 2, the end at 2.125."""
    step = job().op(0.125).op(0.125).op(0.125).op(0.125)
    timeline = run(step, host=SLOW)
    assert timeline.ranks[0].start_ms.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert timeline.makespan_ms == 2.125
    assert timeline.breakdown().host_bound_ms == 1.625


def test_a_host_bound_job_repeats_with_the_hosts_time(job, run):
    """In the steady state the same step takes what its four launches take: 2 ms."""
    assert run(job().op(0.125).op(0.125).op(0.125).op(0.125), host=SLOW, steps=2).makespan_ms == 2.0


def test_a_device_bound_job_hides_the_host(job, run):
    """Two 4-ms kernels: only the very first launch is seen, and not in the steady state."""
    step = job().op(4).op(4)
    assert run(step, host=SLOW).makespan_ms == 8.5
    assert run(step, host=SLOW, steps=2).makespan_ms == 8.0


def test_launch_latency(job, run):
    """A kernel reaches the device 0.25 ms after its launch; a busy device hides it."""
    timeline = run(job().op(1).op(1), host=replace(SLOW, launch_latency_us=250.0))
    assert timeline.ranks[0].start_ms.tolist() == [0.75, 1.75]


def test_item_waits_for_the_stream(job, run):
    """Kernel 0.5 to 4.5, its item() until 4.75; the host pays 0.125 and launches the next at 5.375, a gap of
    0.625 ms.
    """
    step = job().op(4).op(0.25, kind="item").sync(stream=0, reason="item").op(1)
    timeline = run(step, host=replace(SLOW, sync_us=125.0))
    rank = timeline.ranks[0]
    assert rank.start_ms[[0, 1, 3]].tolist() == [0.5, 4.5, 5.375]
    assert (rank.host_start_ms[2], rank.host_end_ms[2]) == (1.0, 4.875)
    assert timeline.makespan_ms == 6.375
    assert timeline.breakdown().host_bound_ms == 0.5 + 0.625


def test_the_host_waits_for_what_it_names(job, run):
    """With 2 ms on compute, 5 on another stream: stream waits end at 2 and 5, an event's at 2, the device's
    at 5.
    """
    base = job().op(2).record(1, 0).op(5, stream=3, kind="h2d")
    waits = {"stream": {"stream": 0}, "other": {"stream": 3}, "event": {"event": 1}, "device": {}}
    ends = {}
    for name, arguments in waits.items():
        step = job().op(2).record(1, 0).op(5, stream=3, kind="h2d").sync(**arguments)
        ends[name] = run(step).ranks[0].host_end_ms[-1]
    assert ends == {"stream": 2, "other": 5, "event": 2, "device": 5}
    assert run(base).ranks[0].host_end_ms[-1] == 0


def test_a_wait_for_what_is_long_done_costs_no_time(job, run):
    """The kernel ends at 0.625, while the host issues until 1.5 and only then waits for it: the last launch is at 2."""
    step = job().op(0.125).op(0.125).op(0.125, stream=3, kind="h2d").sync(stream=0, reason="stream").op(1)
    timeline = run(step, host=SLOW)
    assert timeline.ranks[0].host_end_ms[3] == 1.5
    assert timeline.ranks[0].start_ms[4] == 2.0


def test_the_launch_queue_is_finite(job, run):
    """With room for two launches the host issues the third of five 4-ms kernels when the first is done, at 4,
    and so on.
    """
    step = job().op(4).op(4).op(4).op(4).op(4)
    timeline = run(step, host=replace(SLOW, queue_depth=2))
    assert timeline.ranks[0].host_end_ms.tolist() == [0.5, 1.0, 4.5, 8.5, 12.5]
    assert timeline.makespan_ms == 20.5


def test_queues_are_per_stream(job, run):
    """A full compute queue does not keep the host from another stream's first launch."""
    step = job().op(4).op(4).op(1, stream=3, kind="h2d")
    timeline = run(step, host=replace(SLOW, queue_depth=2))
    assert timeline.ranks[0].start_ms[2] == 1.5


def test_what_each_event_costs(job):
    """Every kind of event is charged its own field, allocations nothing."""
    host = HostModel(
        eager_op_us=1,
        backward_op_us=2,
        view_op_us=3,
        compiled_op_us=4,
        list_tensor_us=0.5,
        recompute_op_us=20,
        collective_us=5,
        stream_op_us=6,
        module_us=7,
        sync_us=8,
    )
    step = (
        job()
        .op(1)
        .op(1, phase=Phase.BACKWARD)
        .op(1, phase=Phase.RECOMPUTE)
        .op(0, kind="view", phase=Phase.RECOMPUTE)
        .op(1, kind="triton")
        .op(1, kind="foreach")
        .collective(1)
        .record(1, 0)
        .wait(1, 0)
        .wait_stream(0, 1)
        .sync()
        .enter(1)
        .exit(1)
        .enter(1, Phase.BACKWARD)
        .add(Alloc(0))
        .add(Free(0))
        .add(RecordStream(0, 1))
    )
    costs = host_costs(step.trace, host) * 1e3
    np.testing.assert_allclose(costs, [1, 2, 21, 3, 4, 1 + 10 * 0.5, 5, 6, 6, 6, 8, 7, 7, 0, 0, 0, 6])


def test_what_takes_calls_apart_costs(job):
    """Each of an operator's two wrappers costs its 10, a view's too, and each of 10 more tensors of a list 3; a collective
    that returns new tensors costs its own price and its wrapper's.
    """
    host = replace(
        INSTANT_HOST,
        eager_op_us=1,
        view_op_us=2,
        collective_us=5,
        functional_collective_us=7,
        wrapper_us=10,
        wrapped_tensor_us=3,
    )
    step = job().op(1).op(0, kind="view").op(1, kind="foreach").collective(1).collective(1).trace
    signatures = [signature._replace(wrappers=2) for signature in step.signatures]
    issued = [event.signature for event in step.events]
    signatures[issued[2]] = signatures[issued[2]]._replace(wrappers=1)
    functional = signatures[issued[4]]._replace(name="_c10d_functional.all_reduce.default", wrappers=1)
    last = step.events[4]._replace(signature=len(signatures))
    wrapped = replace(step, signatures=(*signatures, functional), events=(*step.events[:4], last))
    assert (host_costs(wrapped, host) * 1e3).tolist() == pytest.approx([21, 22, 1 + 10 + 30, 5 + 20, 7 + 10])


def test_fsdps_hooks_cost_with_their_copies(job):
    """A gathering of two parameters costs its 1, its hooks' 10 and 3 for each, a reduction its 1, 20 and 5 for each."""
    host = replace(
        INSTANT_HOST,
        eager_op_us=1,
        gather_us=10,
        gathered_parameter_us=3,
        reduction_us=20,
        reduced_parameter_us=5,
    )
    step = job().op(1).op(1).op(1).trace
    pair = step.signatures[0]._replace(inputs=(TensorMeta((8,), (1,), "float32"),) * 2)
    names = ("fsdp.all_gather_copy_in.default", "fsdp.split_with_sizes_copy.default", "fsdp.chunk_cat.default")
    signatures = tuple(pair._replace(name=name) for name in names)
    events = tuple(event._replace(signature=i) for i, event in enumerate(step.events))
    sharded = replace(step, signatures=signatures, events=events)
    assert (host_costs(sharded, host) * 1e3).tolist() == pytest.approx([1 + 10 + 6, 1, 1 + 20 + 10])


def test_the_host_goes_through_what_it_works_on(job):
    """Two lists of 500,000 float32 and one of 1,000,000 bool on the host are 5 MB; a copy from the device is the device's."""
    host = replace(INSTANT_HOST, optimizer_op_us=2.0, host_gb_us=1000.0)
    step = job().op(1, phase=Phase.OPTIMIZER).trace
    number = TensorMeta((500_000,), (1,), "float32", "cpu")
    metas = (number, number, TensorMeta((1_000_000,), (1,), "bool", "cpu"))

    def cost_us(**changes: Any) -> float:
        signature = step.signatures[0]._replace(inputs=metas, outputs=(), **changes)
        return 1e3 * host_costs(replace(step, signatures=(signature,)), host)[0]

    assert cost_us() == pytest.approx(2.0 + 5.0)
    assert cost_us(mutates=(0,)) == pytest.approx(2.0 + 5.0)
    assert 1e3 * host_costs(step, host)[0] == 2.0
    mixed = step.signatures[0]._replace(inputs=metas, outputs=(number._replace(place="device"),))
    assert 1e3 * host_costs(replace(step, signatures=(mixed,)), host)[0] == 2.0


def test_each_recomputation_costs_its_beginning(job):
    """Two recomputations (of a with a.b in it, and of c) pay 40 us where they begin, not inside."""
    host = replace(INSTANT_HOST, checkpoint_us=40.0)
    again = Phase.RECOMPUTE
    step = (
        job()
        .enter(1, again)
        .enter(2, again)
        .op(1, module=2, phase=again)
        .exit(2, again)
        .exit(1, again)
        .op(1, phase=Phase.BACKWARD)
        .enter(3, again)
        .op(1, module=3, phase=again)
        .exit(3, again)
    )
    np.testing.assert_allclose(host_costs(step.trace, host) * 1e3, [40, 0, 0, 0, 0, 0, 40, 0, 0])


def selective_step(job, recomputed):
    """Two operators and a view of a.b, one of c; then `recomputed` of a.b's again."""
    step = job().op(0, module=2).op(0, module=2).op(0, module=2, kind="view").op(0, module=3)
    for _ in range(recomputed):
        step.op(0, module=2, phase=Phase.RECOMPUTE)
    return step


def test_selective_checkpointing_costs_the_host(job, run):
    """Under module a's policy its three forward and one recomputed operator pay 1 us each, c's none.

    Two of the three are saved, at 10 us each: they are charged to the recomputed one, or, with no
    recomputation, all three (30 us) to the forward, 10 for each operator.
    """
    host = replace(INSTANT_HOST, selective_op_us=1.0, saved_op_us=10.0)
    some, none = selective_step(job, 1), selective_step(job, 0)
    np.testing.assert_allclose(host_costs(some.trace, host, ["a"]) * 1e3, [1, 1, 1, 0, 1 + 20])
    np.testing.assert_allclose(host_costs(none.trace, host, ["a"]) * 1e3, [11, 11, 11, 0])
    assert run(some, host=host).makespan_ms == 0
    assert run(some, host=host, selective_modules=["a"]).makespan_ms == pytest.approx(0.024)


def test_saving_everything_is_the_slowest_for_the_host(job, run):
    """A launch-bound toy: none < full < selective that recomputes all < selective that saves all."""

    def step(recomputed):
        made = job()
        for _ in range(50):
            made.op(0.0001, module=1)
        for _ in range(recomputed):
            made.op(0.0001, module=1, phase=Phase.RECOMPUTE)
        for _ in range(100):
            made.op(0.0001, module=1, phase=Phase.BACKWARD)
        return made

    none, full = (run(step(n), host=HostModel(), steps=2).makespan_ms for n in (0, 50))
    selective = {"host": HostModel(), "steps": 2, "selective_modules": ["a"]}
    recomputing, saving = (run(step(n), **selective).makespan_ms for n in (50, 0))
    assert none < full < recomputing < saving


def test_an_unknown_selective_module(job):
    """A name that the trace does not have is refused."""
    with pytest.raises(SimulationError, match="no module named 'b'"):
        host_costs(job().op(1).trace, HostModel(), ["b"])


def test_compiled_code_is_cheaper_than_eager(job, run):
    """The default host issues generated kernels faster than eager operators, forward slower than backward."""
    eager, backward = job(), job()
    compiled = job()
    for _ in range(100):
        eager.op(0.0001)
        backward.op(0.0001, phase=Phase.BACKWARD)
        compiled.op(0.0001, kind="triton")
    times = [run(step, host=HostModel()).makespan_ms for step in (compiled, backward, eager)]
    assert times == sorted(times)
    assert times[0] < times[1] < times[2]


def test_scaled_host():
    """A host with operators twice as slow is so in everything but the launch latency and the queue."""
    host = HostModel()
    slow = host.scaled(2 * host.eager_op_us)
    assert slow.selective_op_us == 2 * host.selective_op_us
    assert (slow.launch_latency_us, slow.queue_depth) == (host.launch_latency_us, host.queue_depth)
    with pytest.raises(SimulationError, match="only a host whose eager operators cost time"):
        INSTANT_HOST.scaled(5.0)


def test_a_cuda_graph_is_one_launch() -> None:
    """Its nodes cost the host nothing, whatever they are; what comes after it costs as ever."""
    product = Op(0, 0, 0, Phase.FORWARD, -1, (), ())
    wait = StreamWait(0, 1)
    events = [product, GraphLaunch(3), product, wait, product, product, wait, GraphLaunch(0), product]
    trace = trace_of(events, signatures=[Signature("aten.mm.default", (), ())])
    host = replace(INSTANT_HOST, eager_op_us=8.0, stream_op_us=0.5)
    np.testing.assert_allclose(host_costs(trace, host) * 1e3, [8, 8, 0, 0, 0, 8, 0.5, 8, 8])
