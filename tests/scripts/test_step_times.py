"""Simulated time of a script's steps, steps that differ from the reported one, and functions that mark them: no captures."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from autosac.capture.jobs.marker import Marker
from autosac.errors import UsageError
from autosac.estimator import Pricing
from autosac.scripts.beginning import Beginning
from autosac.scripts.differences import StepDifferences, StepSize
from autosac.scripts.executed import Mark
from autosac.scripts.timing import CountedTimes, SkippedWaits, StepTimes
from autosac.simulation import Simulation, Target
from autosac.trace import EventRecord, EventWait, HostWait, Trace, WorkWait
from traces import TraceBuilder

GIB = 2**30


class Script:
    """A script that has come to some event of some step; each operator takes as many milliseconds as `ms` says. With `waits`
    the second event of a step is a wait for the device.
    """

    def __init__(self, ms: tuple[float, ...], streams: tuple[int, ...] = (), *, waits: bool = False) -> None:
        self.ms, self.streams, self.waits = ms, streams or (0,) * len(ms), waits
        self.step, self.events, self.changed, self.simulated = 0, 0, False, 0
        self.waited: Mark | None = None
        self.lengths: list[int] = []
        self.times = StepTimes(lambda: (self.step, self.events), self.part, lambda: self.changed, lambda: self.waited)

    def part(self, of: Callable[[Trace], Trace]) -> Simulation:
        """Of a part of the step as far as it has come."""
        whole = self.simulation()
        trace = of(whole.trace)
        self.lengths.append(len(trace.events))
        first = len(whole.trace.events) - len(trace.events)
        pricing = replace(
            whole.pricing, event_ms=whole.pricing.event_ms[first:], event_source=whole.pricing.event_source[first:]
        )
        return replace(whole, trace=trace, other_prices=pricing)

    def simulation(self, events: int | None = None) -> Simulation:
        """Of the step as far as it has come, or of so many events."""
        self.simulated += 1
        count = self.events if events is None else events
        builder = TraceBuilder()
        for number in range(count):
            builder.stream = self.streams[number]
            if self.waits and number == 1:
                builder.add(HostWait(-1, -1, "device"))
            else:
                builder.op(f"o{number}")
        nobody = np.full(count, -1, np.int16)
        prices = Pricing(
            event_ms=np.array(self.ms[:count]),
            source=(),
            event_source=nobody,
            event_rel_std=np.zeros(count, np.float32),
        )
        return Simulation(trace=builder.build(), target=Target.of("h100-sxm-80gb", 1), other_prices=prices)

    def at(self, step: int, events: int) -> StepTimes:
        """It has come there."""
        if step != self.step:
            self.times.begin(step)
            self.step, self.events = step, 0
        self.events = events
        return self.times


def test_nothing_takes_no_time_before_the_first_step() -> None:
    """Nothing has been issued: no seconds, and places that are no time apart."""
    times = Script((1.0,)).times
    here = times.mark(3)
    assert here == Mark(0, 0, 3)
    assert times.elapsed_s() == times.elapsed_ms(here, Mark(0, 0, 0)) == 0.0


def test_what_comes_before_the_first_step_takes_time() -> None:
    """The host waits for the first of three operators, and for all when the first step begins; no piece is executed twice."""
    script = Script((1.0, 0.0, 2.0, 4.0), waits=True)
    seen = [script.at(0, events).elapsed_s() * 1e3 for events in (1, 2, 3, 4, 4)]
    assert 0.0 < seen[0] < 0.1
    assert 1.0 < seen[1] < seen[2] < seen[3] == seen[4] < 1.1
    assert script.lengths == [1, 2, 1, 2]
    assert script.times.elapsed_ms(Mark(0, 1, 0), Mark(0, 4, 0)) == pytest.approx(6.0, abs=0.1)
    assert script.at(1, 0).elapsed_s() * 1e3 == pytest.approx(7.0, abs=0.1)
    assert script.times.elapsed_ms(Mark(0, 1, 0), script.times.mark(0)) == pytest.approx(6.0, abs=0.1)


def test_what_the_host_has_waited_for_is_over() -> None:
    """Waits for an event and a collective of what came before, in a piece of its own, are for nothing."""
    builder = TraceBuilder()
    builder.op("o")
    first = EventRecord(7, 0), HostWait(-1, -1, "device")
    second = EventWait(7, 1), WorkWait(3, 0), HostWait(-1, 7, "event")
    for event in (*first, *second):
        builder.add(event)
    builder.op("o")
    whole = builder.build()

    def simulation(part: Callable[[Trace], Trace]) -> Simulation:
        return Simulation(trace=part(whole), target=Target.of("h100-sxm-80gb", 1))

    beginning = Beginning(simulation)
    before = beginning.host_ms(3)
    assert before < beginning.host_ms(len(whole.events)) < before + 0.1


def test_a_place_on_a_stream_is_when_it_has_done_what_was_issued_before() -> None:
    """Operators of 1, 2 and 4 ms follow each other. A stream without operators is where the host is."""
    script = Script((1.0, 2.0, 4.0))
    marks = [script.at(1, events).mark(0) for events in range(4)]
    times = script.times
    between = [times.elapsed_ms(a, b) for a, b in pairwise(marks)]
    assert between[1:] == pytest.approx([2.0, 4.0])
    assert 1.0 < between[0] < 1.1
    assert times.elapsed_ms(marks[3], marks[0]) == pytest.approx(-sum(between))
    assert 0.0 < times.elapsed_ms(marks[0], times.mark(1)) < 0.1
    other = Script((3.0,), streams=(1,))
    times = other.at(1, 1)
    assert 3.0 < times.elapsed_ms(Mark(1, 0, 1), times.mark(1)) < 3.1
    assert 0.0 < times.elapsed_ms(Mark(1, 0, 0), times.mark(0)) < 0.1


def test_the_host_goes_on_before_the_device_has_done() -> None:
    """Its time is that of issuing an operator; the next step begins when all of this one is done."""
    script = Script((5.0, 7.0))
    seen = [script.at(1, events).elapsed_s() for events in range(3)]
    assert seen[0] == 0.0 < seen[1] < seen[2] < 1e-3
    times = script.times
    times.end(1)
    assert 12e-3 < script.at(2, 0).elapsed_s() < 12.1e-3


def test_time_never_turns_back() -> None:
    """A step that proves shorter than what was told of it is waited for."""
    script = Script((5.0, 7.0))
    times = script.at(1, 2)
    times.keep(script.simulation(), 0.0)
    script.at(2, 2)
    whole = times.elapsed_s()
    script.changed, script.ms = True, (1e-3, 1e-3)
    assert times.elapsed_s() == pytest.approx(whole, rel=1e-12)


def test_later_steps_take_as_long_as_the_kept_one() -> None:
    """Event by event, without being simulated."""
    script = Script((5.0, 7.0))
    kept = script.simulation(2)
    times = script.at(1, 2)
    times.keep(kept, kept.step_ms)
    script.at(2, 0)
    begun, simulated = times.elapsed_s(), script.simulated
    for step in (3, 4):
        script.at(step, 1).end(step - 1)
    script.events = 0
    assert script.simulated == simulated
    first, second = Mark(3, 2, 0), Mark(4, 2, 0)
    assert times.elapsed_ms(first, second) == pytest.approx(kept.step_ms)
    assert times.elapsed_s() == pytest.approx(begun + 2 * kept.step_ms / 1e3)


def test_a_step_that_begins_before_the_device_is_done_takes_no_longer() -> None:
    """Its second event waits for the device. From one such wait to the next it is one step, also past the kept step's end."""
    script = Script((5.0, 0.0, 7.0), waits=True)
    kept = script.simulation(3)
    read = []
    for step in range(1, 6):
        times = script.at(step, 2)
        read.append(times.elapsed_s() * 1e3)
        script.at(step, 3)
        times.end(step)
        if step == 3:
            times.keep(kept, kept.step_ms)
    assert [b - a for a, b in pairwise(read)] == pytest.approx([kept.step_ms] * 4, rel=0.01)


def test_a_wait_that_the_kept_step_has_elsewhere() -> None:
    """A step begins before the device has done with the kept one, and waits for it at once: until all of that is done."""
    script = Script((5.0, 7.0))
    kept = script.simulation(2)
    times = script.at(1, 2)
    times.end(1)
    times.keep(kept, kept.step_ms)
    begun = script.at(2, 0).elapsed_s()
    assert 0.0 < begun < 1e-3
    script.waited = Mark(2, 0, 1)  # another stream, which has nothing to do
    assert script.at(2, 0).elapsed_s() == pytest.approx(begun, abs=1e-4)
    script.waited = Mark(2, 0, -1)
    assert 12e-3 < script.at(2, 0).elapsed_s() < 12.1e-3
    script.waited = Mark(2, 1, 0)  # its first operator as well
    assert 17e-3 < script.at(2, 1).elapsed_s() < 17.2e-3


def test_a_stream_first_has_to_do_with_the_step_before() -> None:
    """A place before anything was issued in a step, which begins before the device has done: others have nothing to do."""
    script = Script((5.0, 7.0))
    kept = script.simulation(2)
    times = script.at(1, 2)
    times.end(1)
    first = times.mark(0)
    times.keep(kept, kept.step_ms)
    script.at(2, 0)
    assert times.elapsed_ms(first, times.mark(0)) == times.elapsed_ms(first, times.mark(-1)) == 0.0
    assert times.elapsed_ms(first, times.mark(1)) == pytest.approx(-12.0, abs=0.1)


def test_waits_of_steps_that_are_not_computed() -> None:
    """For a stream, and for all; events are none."""
    waits = SkippedWaits(lambda stream: Mark(3, 2, stream))
    waits.host_wait(-1, 5, "event")
    assert waits.last is None
    waits.host_wait(4, -1, "stream")
    assert waits.last == Mark(3, 2, 4)
    waits.host_wait(-1, -1, "device")
    assert waits.last == Mark(3, 2, -1)


def test_a_step_that_does_something_else_is_priced_once() -> None:
    """Its time is that of its own events, as much longer as several ranks are; more events are another question."""
    script = Script((5.0, 7.0, 20.0))
    kept = script.simulation(2)
    times = script.at(1, 2)
    times.keep(kept, kept.step_ms / 2)
    script.at(2, 2)
    assert times.price(2) == pytest.approx(2 * kept.step_ms)
    simulated = script.simulated
    assert times.price(2) == pytest.approx(2 * kept.step_ms) and script.simulated == simulated
    script.at(2, 3)
    assert times.price(2) == pytest.approx(2 * script.simulation(3).step_ms) and script.simulated == simulated + 2
    script.changed = True
    script.at(3, 3)
    assert times.elapsed_ms(Mark(3, 2, 0), Mark(3, 3, 0)) == pytest.approx(40.0)


def test_old_steps_are_forgotten() -> None:
    """But for the one before: its events are what marks may lie in."""
    script = Script((5.0, 7.0))
    script.at(1, 2).end(1)
    script.at(2, 1).end(2)
    simulated = script.simulated
    assert script.times.elapsed_ms(Mark(1, 1, 0), Mark(1, 2, 0)) == pytest.approx(7.0)
    assert script.simulated == simulated


def compared(reported: StepSize, *later: StepSize) -> list[str]:
    """The notes of a script with these steps."""
    steps = StepDifferences()
    steps.add(StepSize(1, 10**15, 1e9))  # before the reported one: no later step
    steps.report(reported, Counter({1: 1}), Counter({1: 1}))
    for size in later:
        steps.add(size)
    return steps.notes()


def test_steps_that_take_more_are_named() -> None:
    """The largest and the longest, if they take more than 5 % more; up to that, and unpriced ones, are no news."""
    reported = StepSize(3, 100 * GIB, 100.0)
    assert compared(reported) == []
    assert compared(reported, StepSize(4, 105 * GIB, 105.0), StepSize(5, GIB, None), StepSize(6, GIB, 1.0)) == []
    larger, longer = StepSize(4, 106 * GIB, None), StepSize(5, 100 * GIB, 1200.0)
    assert compared(reported, larger, longer, StepSize(6, 90 * GIB, 130.0)) == [
        "steps differ: step 4 needs 106.00 GiB of active memory, the reported step 100.00 GiB",
        "steps differ: step 5 takes 1,200.0 ms, the reported step 100.0 ms; if they alternate, --optimizer-steps N takes N as "
        "one",
    ]
    assert compared(StepSize(3, 100 * GIB, None), longer) == []
    assert StepDifferences().notes() == []


def test_a_reported_step_that_does_more_than_all_others_is_named() -> None:
    """A checkpoint in the second step: each later one is shorter by more than 5 %. One as long is like it."""
    reported, short, shorter = StepSize(2, GIB, 106.0), StepSize(3, GIB, 100.0), StepSize(4, GIB, 77.7)
    assert compared(reported, short, shorter) == [
        "steps differ: step 3 takes 100.0 ms, the reported step 106.0 ms (which may evaluate, save a checkpoint, or have a "
        "larger batch)"
    ]
    assert compared(reported, short, StepSize(4, GIB, None)) == []
    assert compared(reported, StepSize(3, GIB, 101.0), shorter) == []


def test_calls_that_make_a_step_another_one() -> None:
    """More than 2 % of the reported step's, counted as those that came and those that went."""
    steps = StepDifferences()
    assert not steps.are_many(Counter({1: 1000}))
    steps.report(StepSize(3, GIB, 1.0), Counter({1: 60, 2: 40}), Counter({1: 60}))
    assert not steps.are_many(Counter({1: 60, 2: 40}))
    assert not steps.are_many(Counter({1: 61, 2: 39}))
    assert not steps.are_many(Counter({1: 60, 2: 38}))
    assert steps.are_many(Counter({1: 61, 2: 38}))
    assert steps.are_many(Counter({1: 60, 2: 40, 7: 3}))


def test_what_comes_after_the_update_may_still_come() -> None:
    """Of a step that has made its update, only what the reported one did up to there is missed; what it never did counts."""
    steps = StepDifferences()
    steps.report(StepSize(3, GIB, 1.0), Counter({1: 60, 2: 40}), Counter({1: 60}))
    assert not steps.are_many(Counter({1: 60}), ended=False) and steps.are_many(Counter({1: 60}))
    assert not steps.are_many(Counter({1: 58, 2: 40}), ended=False)
    assert steps.are_many(Counter({1: 57}), ended=False) and steps.are_many(Counter({1: 60, 7: 3}), ended=False)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """A module that a script has imported, with a function and a class."""
    found = ModuleType("pack.inner")
    found.__dict__.update(train=lambda x: x + 1, number=3, Loop=type("Loop", (), {"step": lambda self: self}))
    sys.modules["pack.inner"] = found
    yield found
    del sys.modules["pack.inner"]


def test_a_marked_function_tells_of_each_call(module: ModuleType) -> None:
    """After it has returned, or failed; it keeps its result and its name."""
    calls: list[str] = []
    Marker("pack.inner.train", lambda: calls.append("train")).install()
    Marker("pack.inner.Loop.step", lambda: calls.append("step")).install()
    assert module.train(1) == 2 and calls == ["train"] and module.train.__name__ == "<lambda>"
    loop = module.Loop()
    assert loop.step() is loop and calls == ["train", "step"]
    with pytest.raises(TypeError):
        module.train("text")
    assert calls == ["train", "step", "train"]


def test_the_scripts_own_function_comes_first(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a module, or one that both have."""
    calls: list[int] = []
    script = SimpleNamespace(train=lambda: "own", pack=SimpleNamespace(inner=SimpleNamespace(train=lambda: "also own")))
    monkeypatch.setitem(sys.modules, "__main__", script)
    Marker("train", lambda: calls.append(1)).install()
    Marker("pack.inner.train", lambda: calls.append(2)).install()
    assert (script.train(), script.pack.inner.train(), module.train(1)) == ("own", "also own", 2)
    assert calls == [1, 2]


@pytest.mark.parametrize(
    "name", ["nothing", "pack.inner.nothing", "pack.inner.number", "other.train", "pack.inner.Loop.go"]
)
def test_a_marker_that_is_no_function(module: ModuleType, name: str) -> None:
    """One line with its name."""
    with pytest.raises(UsageError) as error:
        Marker(name, lambda: None).install()
    assert str(error.value) == (
        f"--step-marker {name}: neither the script nor a module that it imports has such a function"
    )


def test_hidden_time_goes_by_events() -> None:
    """Ten microseconds each, on the host as on the device, over all steps: never back."""
    now = [0, 0]
    times = CountedTimes(lambda: (now[0], now[1]))
    assert times.elapsed_s() == 0
    now[:] = 1, 40
    first = times.mark(0)
    now[:] = 1, 60
    assert round(times.elapsed_s(), 9) == 60e-5
    now[:] = 2, 10
    assert round(times.elapsed_s(), 9) == 70e-5
    assert round(times.elapsed_ms(first, times.mark(0)), 9) == 0.3
