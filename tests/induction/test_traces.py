"""Induction over the number of layers, on steps whose form for any number is known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.capture.request import TitanRequest
from autosac.errors import CaptureError, TooFewLayersError
from autosac.induction import Refusal, TraceFamily, capturing, difference, joined
from autosac.induction.alignment import Insertion, insertions
from autosac.induction.captures import Capturing, predicted
from autosac.induction.traces import ends_once
from autosac.plans import Plan, Settings, Unit
from autosac.trace import Alloc, Cut, Free, Label, Op, Phase, Signature, Storage, TensorMeta, Trace
from plans import MADE_FOR
from traces import trace_of

Step = Callable[..., Trace]


def keys(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text])


@given(
    kinds=st.integers(1, 3),
    ops=st.integers(1, 3),
    prefetch=st.integers(0, 2),
    leading=st.integers(0, 2),
    passes=st.integers(0, 3),
    periods=st.integers(2, 9),
)
@settings(deadline=None, max_examples=40)
def test_any_member_of_a_family_is_predicted(
    step: Step, kinds: int, ops: int, prefetch: int, leading: int, passes: int, periods: int
) -> None:
    """Two steps tell every larger one exactly: rows, operands, sizes, allocation order, modules, info.

    So they do where nothing happens between microbatches.
    """
    first = leading + 3 * max(kinds, prefetch) * kinds + kinds

    def of(k: int) -> Trace:
        count = first + k * kinds
        return step(count, kinds=kinds, ops=ops, prefetch=prefetch, leading=leading, passes=passes)

    family = TraceFamily([of(0), of(1)])
    for k in (0, 1, 2, periods):
        assert difference(family.member(k), of(k)) is None


def test_a_rendered_row_is_the_row_that_is_expected(step: Step) -> None:
    """The last operator of 20 layers, from 4 and 5, reads 20 weights and the stacked norms, and the types are the trace's."""
    trace = TraceFamily([step(4), step(5)]).member(16)
    operator = next(event for event in reversed(trace.events) if type(event) is Op)
    norms = len(trace.storages) - 1
    assert operator.inputs == (*range(20), norms)
    assert trace.storages[norms].nbytes == 4 * 20 + 4
    assert type(trace.storages[norms]) is Storage and type(trace.prologue[0]) is Alloc
    assert trace.info.flops_per_token == 150.0
    assert trace.info.fsdp_units[:3] == ("layers.0", "layers.1", "layers.10")


@pytest.mark.parametrize("ends", [(70, 50), (50, 70), (30, 30)])
def test_tensors_of_a_list_are_told_apart_by_their_layouts(ends: tuple[int, int]) -> None:
    """An operator on a stack of all layers, a tensor, one tensor of each layer, and another one."""

    def of(layers: int) -> Trace:
        sizes = (layers, ends[0], *(6,) * layers, ends[1])
        inputs = tuple(TensorMeta((size,), (1,), "float32") for size in sizes)
        signature = Signature("aten._foreach_mul_.List", inputs, inputs)
        return trace_of([Op(0, 0, 0, Phase.OPTIMIZER, -1, (), ())], signatures=[signature])

    assert difference(TraceFamily([of(4), of(5)]).member(6), of(10)) is None


def test_steps_with_another_period_are_no_family(step: Step) -> None:
    """Layers of two kinds in turn do not repeat layer by layer."""
    with pytest.raises(Refusal, match="differ"):
        TraceFamily([step(8, kinds=2), step(9, kinds=2)])


def test_too_few_layers_are_refused(step: Step) -> None:
    """One layer has no other that it could repeat."""
    with pytest.raises(Refusal):
        TraceFamily([step(1), step(2)])


def _cuts(step: Step, total: int) -> list[Trace]:
    return [replace(step(n), info=replace(step(n).info, cut=Cut(n, 1, total))) for n in (4, 5, 6)]


def test_the_third_cut_must_be_as_predicted(step: Step) -> None:
    """A single byte in the largest cut is seen; without it the whole step comes out."""
    cuts = _cuts(step, 12)
    assert difference(joined(cuts), step(12)) is None
    storages = list(cuts[2].storages)
    storages[3] = storages[3]._replace(nbytes=storages[3].nbytes + 1)
    with pytest.raises(Refusal, match=r"storages\[3\]"):
        joined([*cuts[:2], replace(cuts[2], storages=tuple(storages))])


class _Server:
    """Answers captures from `traces` by cut (None: the whole job); what is missing fails with this error."""

    def __init__(self, traces: dict[int | None, Trace], error: str = "cannot be built") -> None:
        self.traces = traces
        self.error = error
        self.asked: list[int | None] = []

    def submit(self, request: TitanRequest) -> Future[Trace]:
        self.asked.append(request.cut)
        future: Future[Trace] = Future()
        if request.cut in self.traces:
            future.set_result(self.traces[request.cut])
        else:
            future.set_exception(CaptureError(self.error.format(cut=request.cut)))
        return future


def test_cuts_that_are_no_family_are_followed_by_a_larger_one(step: Step) -> None:
    """The smallest of four cuts is special; the other three give the whole step, and nothing else is captured."""
    cuts = [replace(step(n), info=replace(step(n).info, cut=Cut(n, 1, 20))) for n in (4, 5, 6, 7)]
    cuts[0] = replace(cuts[0], sources=("odd",))
    server = _Server(dict(enumerate(cuts)))
    assert difference(capturing(server, TitanRequest(config_file=None)).result(), step(20)) is None
    assert server.asked == [0, 1, 2, 3]


@pytest.mark.parametrize("broken", [True, False])
def test_the_whole_job_is_captured_if_cuts_do_not_tell_it(step: Step, broken: bool) -> None:
    """Cuts that cannot be built, or never are a family, end in one capture of the whole job, and the reason is told."""
    cuts = [replace(step(n, kinds=2), info=replace(step(n).info, cut=Cut(n, 1, 40))) for n in (4, 5, 6, 7, 8, 9)]
    whole = step(40, kinds=2)
    server = _Server({None: whole, **({} if broken else dict(enumerate(cuts)))})
    reasons: list[str] = []
    assert capturing(server, TitanRequest(config_file=None), reasons.append).result() is whole
    assert server.asked == ([0, 1, 2, None] if broken else [0, 1, 2, 3, 4, None])
    assert len(reasons) == 1 and reasons[0].startswith("capturing all layers (")


@pytest.mark.parametrize(
    ("error", "asked"),
    [("training step 1: no such kernel", [0, 1, 2]), ("training step 1: {cut} layers", [0, 1, 2, None])],
)
def test_a_step_that_fails_alike_in_all_cuts_fails_with_all_layers(error: str, asked: list[int | None]) -> None:
    """Then the whole job is not tried; and what has failed is not tried again."""
    server = _Server({}, error)
    capture = capturing(server, TitanRequest(config_file=None))
    assert isinstance(capture, Capturing)
    for ask in (capture.early, capture.result, capture.result):
        with pytest.raises(CaptureError, match="training step 1"):
            ask()
    assert server.asked == asked


def test_an_optimizer_in_slices_is_captured_with_all_layers(step: Step, tmp_path: Path) -> None:
    """Slices end where they are full, wherever layers end: cuts, whose parameters fill one, would tell nothing of them. Under
    a plan its own setting counts.
    """
    whole, sliced = step(20), TitanRequest(config_file=None, optimizer_slice_bytes=1)
    server = _Server({None: whole})
    assert capturing(server, sliced).result() is whole
    for slice_bytes in (1, 0):
        own = Settings(job_checkpointing="full", optimizer_slice_bytes=slice_bytes)
        Plan(made_for=MADE_FOR, units=(), settings=own).save(tmp_path / "plan.json")
        capture = capturing(server, replace(sliced, checkpointing="full", plan_file=str(tmp_path / "plan.json")))
        assert isinstance(capture, Capturing) is (slice_bytes == 0)
    assert server.asked == [None, None, 0, 1, 2]


def test_what_nobody_waits_for_yet_goes_ahead(step: Step) -> None:
    """The cut that replaces the smallest is asked for by itself, and once; the result is the same."""
    cuts = [replace(step(n), info=replace(step(n).info, cut=Cut(n, 1, 20))) for n in (4, 5, 6, 7)]
    cuts[0] = replace(cuts[0], sources=("odd",))
    asked = threading.Event()

    class Server(_Server):
        def submit(self, request: TitanRequest) -> Future[Trace]:
            future = super().submit(request)
            if request.cut == 3:
                asked.set()
            return future

    server = Server(dict(enumerate(cuts)))
    capture = capturing(server, TitanRequest(config_file=None))
    assert isinstance(capture, Capturing)
    capture.go_ahead()
    assert asked.wait(60)
    assert difference(capture.result(), step(20)) is None
    assert server.asked == [0, 1, 2, 3]


def test_a_job_that_is_not_cut_fails_once() -> None:
    """Where the 0th cut is the job itself, what it says of the step stands, and nothing is captured again."""

    class Server(_Server):
        def submit(self, request: TitanRequest) -> Future[Trace]:
            future = super().submit(request)
            if not request.cut:
                return future
            future = Future()
            future.set_exception(TooFewLayersError("too few"))
            return future

    server = Server({}, "training step 1: no such kernel")
    with pytest.raises(CaptureError, match="no such kernel"):
        capturing(server, TitanRequest(config_file=None)).result()
    assert server.asked == [0, 1, 2]


class _Known:
    """The step without checkpointing: its cuts from number `first` on have predicted it. Notes what it is asked about."""

    def __init__(self, agrees: bool, first: int = 0) -> None:
        self._agrees, self._first = agrees, first
        self.asked_about: list[Trace] = []

    def first_cut(self) -> int:
        return self._first

    def agrees(self, trace: Trace) -> bool:
        self.asked_about.append(trace)
        return self._agrees


@pytest.mark.parametrize("agrees", [True, False])
def test_two_cuts_are_enough_where_their_prediction_agrees(step: Step, agrees: bool) -> None:
    """The prediction is asked about once; if it does not agree, the third cut is captured, and must be as predicted."""
    cuts = [replace(step(n), info=replace(step(n).info, cut=Cut(n, 1, 20))) for n in (4, 5, 6)]
    server, known = _Server(dict(enumerate(cuts))), _Known(agrees)
    capture = capturing(server, TitanRequest(config_file=None), reference=known)
    assert difference(capture.result(), step(20)) is None
    assert [difference(trace, step(20)) for trace in known.asked_about] == [None]
    assert server.asked == ([0, 1] if agrees else [0, 1, 2])


def test_two_cuts_that_predict_nothing(step: Step) -> None:
    """Nobody is asked about them: larger ones follow."""
    cuts = [replace(step(n), info=replace(step(n).info, cut=Cut(n, 1, 20))) for n in (4, 5, 6, 7)]
    cuts[0] = replace(cuts[0], sources=("odd",))
    server, known = _Server(dict(enumerate(cuts))), _Known(False)
    capture = capturing(server, TitanRequest(config_file=None), reference=known)
    assert isinstance(capture, Capturing)
    assert difference(capture.result(), step(20)) is None
    assert server.asked == [0, 1, 2, 3] and not known.asked_about
    assert capture.first_cut() == 1, "the smallest was left out"


def test_cuts_that_were_special_without_checkpointing_are_left_out(step: Step) -> None:
    """There the second to fourth cut predicted the step. The first is special here too, in what no agreement would notice: the
    second and third predict the step.
    """
    cuts = [replace(step(n), info=replace(step(n).info, cut=Cut(n, 1, 20))) for n in (4, 5, 6, 7)]
    cuts[0] = replace(cuts[0], info=replace(cuts[0].info, flops_per_token=1.0))
    server, known = _Server(dict(enumerate(cuts))), _Known(True, first=1)
    capture = capturing(server, TitanRequest(config_file=None), reference=known)
    assert difference(capture.result(), step(20)) is None
    assert server.asked == [0, 1, 2] and len(known.asked_about) == 1


def test_a_storage_that_would_end_twice_is_refused() -> None:
    """Of two storages the second and then the first one end; of three, by these cuts, the second one twice."""

    def of(layers: int, *ends: int) -> Trace:
        storage = Storage(64, 0, Label.NONE, Phase.FORWARD, -1, 0, "mm")
        events = [*(Alloc(i) for i in range(layers)), *(Free(i) for i in ends)]
        trace = trace_of(events, storages=[storage] * layers)
        return replace(trace, info=replace(trace.info, cut=Cut(layers, 1, 3)))

    assert ends_once(of(2, 1, 0)) and not ends_once(of(2, 1, 1))
    assert not ends_once(replace(of(1), events=(Free(0), Alloc(0))))
    with pytest.raises(Refusal, match="ends where it is not alive"):
        predicted([of(2, 1, 0), of(3, 1, 1)])


def test_a_job_that_is_not_cut_is_taken_as_it_is(step: Step) -> None:
    """The 0th cut of a job with few layers is the job itself."""
    whole = step(3)
    assert capturing(_Server({0: whole}), TitanRequest(config_file=None)).result() is whole


@pytest.mark.parametrize(("planned", "asked"), [((0, 1, 2), [0, 1, 2]), ((0, 2), [None]), ((), [None])])
def test_plans_that_differ_in_layers_are_captured_on_the_whole_job(
    step: Step, tmp_path: Path, planned: tuple[int, ...], asked: list[int | None]
) -> None:
    """Of three layers a plan checkpoints all, two, or none: only the first is asked for by cuts."""
    parameters = tuple((f"layers.{i}.weight", (4,)) for i in range(3))
    units = tuple(
        Unit(fqn=f"layers.{i}", discard_fraction=1.0, kept_bytes=0, recompute_ms=0.0, decisions=()) for i in planned
    )
    Plan(made_for=replace(MADE_FOR, parameters=parameters), units=units).save(tmp_path / "p.json")
    server = _Server({None: step(3), **dict(enumerate(_cuts(step, 12)))})
    request = TitanRequest(config_file=None, checkpointing="plan", plan_file=str(tmp_path / "p.json"))
    capturing(server, request).result()
    assert server.asked == asked


@pytest.mark.parametrize(
    ("shorter", "longer", "expected"),
    [
        ("abcabcabcz", "abcabcabcabcz", [Insertion(6, 3)]),
        ("xaaaayaaaaz", "xaaaaayaaaaaz", [Insertion(4, 1), Insertion(10, 1)]),
        ("abababc", "abababc", []),
    ],
)
def test_insertions_stand_in_the_middle_of_what_repeats(shorter: str, longer: str, expected: list[Insertion]) -> None:
    """Besides the copy that it repeats, the inserted run has as many before it as after it, to within one."""
    assert insertions(keys(shorter), keys(longer), "text") == expected


def test_a_run_with_which_both_sequences_end_is_preferred() -> None:
    """Lists of norms: of 3 and 4 layers (bbaabb) between an a and "ba". Where they part, a single b is a repetition, too, and
    as much agrees after it: all that is left of the shorter one.
    """
    shorter, longer = ("a" + layers * "bbaabb" + "ba" for layers in (3, 4))
    (found,) = insertions(keys(shorter), keys(longer), "text")
    assert found.length == 6


@pytest.mark.parametrize(("shorter", "longer"), [("abcz", "abcdz"), ("abz", "abaz"), ("ab", "cd"), ("abab", "ab")])
def test_what_is_no_repetition_is_refused(shorter: str, longer: str) -> None:
    """New keys, a part of a run, other keys, and fewer keys are no inserted copies."""
    with pytest.raises(Refusal):
        insertions(keys(shorter), keys(longer), "text")


def test_a_run_is_no_longer_than_what_is_too_much() -> None:
    """Four keys repeat, but only two are too many: the place where the sequences part is named."""
    with pytest.raises(Refusal, match="text: rows 4 and 4 differ"):
        insertions(keys("ababcyy"), keys("ababababc"), "text")


@given(
    block=st.text("abcd", min_size=1, max_size=5),
    copies=st.integers(2, 4),
    ends=st.tuples(st.text("abcd", max_size=4), st.text("abcd", max_size=4)),
)
@settings(deadline=None, max_examples=200)
def test_leaving_out_the_insertions_gives_the_shorter_sequence(block: str, copies: int, ends: tuple[str, str]) -> None:
    """Whatever is found, the longer sequence without it is the shorter one, and each run repeats what stands before it.

    Nothing need be found only where the ends have keys of the block: there the place of a copy is ambiguous.
    """
    shorter, longer = (ends[0] + block * n + ends[1] for n in (copies, copies + 1))
    left = longer
    try:
        found = insertions(keys(shorter), keys(longer), "text")
    except Refusal:
        assert set(block) & set(ends[0] + ends[1])
        return
    for first, length in reversed(found):
        assert longer[first - length : first] == longer[first : first + length]
        left = left[:first] + left[first + length :]
    assert left == shorter
