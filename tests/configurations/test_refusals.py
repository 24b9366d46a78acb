"""Learning what TorchTitan refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.configurations.bounds.sheets import runs_as_its_sheet
from autosac.configurations.evaluating.evaluations import LayoutTask
from autosac.configurations.running.refusals import Refusals, hopeful, unlike
from autosac.configurations.space.layout import Layout
from autosac.errors import CaptureError
from autosac.jobs.titan import TitanJob
from autosac.planning.closed_loop import Goal
from autosac.simulation import Target


def layouts(**degrees: tuple[int, ...]) -> list[Layout]:
    """All with these degrees, on one kind of GPU."""
    return [
        Layout(gpu="h100", **dict(zip(degrees, values, strict=True))) for values in itertools.product(*degrees.values())
    ]


def test_a_pair_of_settings_is_to_blame() -> None:
    """Tensor with context parallelism, refused eight times and never taken, is refused with other experts, too."""
    refusals = Refusals()
    for layout in layouts(tensor=(2, 4), context=(2,), expert=(2, 4), microbatch=(1, 2)):
        assert refusals.reason(layout) is None
        refusals.refused(layout, "no such attention")
    for layout in [*layouts(tensor=(2, 4)), *layouts(context=(2,)), *layouts(expert=(2, 4, 8))]:
        refusals.taken(layout)
    (unseen,) = layouts(tensor=(8,), context=(2,), expert=(8,), microbatch=(4,))
    assert refusals.reason(unseen) == "no such attention"
    assert all(refusals.reason(layout) is None for layout in layouts(tensor=(8,), expert=(8,), microbatch=(4,)))
    (other,) = layouts(tensor=(8,), context=(4,), expert=(8,))
    assert refusals.reason(other) is None, "only one context degree was refused"
    refusals.taken(other)
    assert refusals.reason(unseen) == "no such attention", "with a context degree of two it always was"


def test_replicas_and_pipelines_are_tried_once() -> None:
    """Experts that twelve ranks do not divide, four may: what is refused without replicas refuses none with as many shards."""
    refusals = Refusals()
    for layout in layouts(shard=(12,), expert=(2, 4), tensor=(1, 2), microbatch=(1, 2, 4)):
        refusals.refused(layout, "uneven")
    assert refusals.reason(Layout(gpu="h100", shard=12, expert=2, microbatch=8)) == "uneven"
    for kind in ({"replicate": 3}, {"pipeline": 3}):
        first, second = (Layout(gpu="h100", shard=4, expert=2, microbatch=size, **kind) for size in (1, 2))
        assert refusals.reason(first) is None
        refusals.refused(first, "uneven")
        assert refusals.reason(second) == "uneven"


@pytest.mark.parametrize(
    ("degrees", "alike"),
    [({"shard": 12}, True), ({"shard": 4, "replicate": 3}, False), ({"shard": 6, "pipeline": 2}, False), ({}, False)],
)
def test_a_sheet_is_refused_for_layouts_with_as_many_shards(degrees: dict[str, int], alike: bool) -> None:
    """Those that FSDP shares out among all ranks: with replicas or stages, fewer ranks share parameters."""
    assert runs_as_its_sheet(Layout(gpu="h100", **degrees)) is alike


def test_a_layout_with_nothing_else_is_refused() -> None:
    """It has exactly what the refused ones have in common, and nothing was ever taken."""
    refusals = Refusals()
    for layout in layouts(tensor=(2,), context=(1, 2), expert=(1, 2), microbatch=(1, 2)):
        refusals.refused(layout, "no")
    assert refusals.reason(Layout(gpu="h100", tensor=2, microbatch=4)) == "no"
    assert refusals.reason(Layout(gpu="h100", microbatch=4)) is None


def test_seven_are_too_few() -> None:
    """A layout is tried until eight with one of its features were refused for one reason."""
    refusals = Refusals()
    *first, last = layouts(pipeline=(2, 4), expert=(2, 4), microbatch=(1, 2))
    for number, layout in enumerate(first):
        refusals.refused(layout, "no pipelines" if number else "another reason")
    refusals.refused(last, "no pipelines")
    (unseen,) = layouts(pipeline=(8,), tensor=(8,))
    assert refusals.reason(unseen) is None
    refusals.refused(Layout(gpu="h100", pipeline=2, microbatch=16), "no pipelines")
    assert refusals.reason(unseen) == "no pipelines"


def test_what_else_was_alike_could_be_to_blame() -> None:
    """Refusals that differ from each other in one more knob only blame nothing; nor does one degree blame another."""
    refusals = Refusals()
    for layout in layouts(tensor=(2,), microbatch=(1, 2, 4, 8, 16, 32, 64, 128)):
        refusals.refused(layout, "no")
    assert refusals.reason(Layout(gpu="h100", tensor=2, expert=2)) is None
    refusals.refused(Layout(gpu="h100", tensor=2, expert=2, microbatch=3), "no")
    assert refusals.reason(Layout(gpu="h100", tensor=2, expert=4)) == "no"
    assert refusals.reason(Layout(gpu="h100", tensor=4, expert=4)) is None


def test_schedules_answer_for_themselves() -> None:
    """A schedule that is refused says nothing of another one."""
    refusals = Refusals()
    for layout in layouts(pipeline=(2, 4), expert=(1, 2), microbatch=(1, 2)):
        refusals.taken(layout)
        refusals.refused(
            Layout(
                gpu="h100",
                pipeline=layout.pipeline,
                expert=layout.expert,
                microbatch=layout.microbatch,
                schedule="GPipe",
            ),
            "no",
        )
    assert refusals.reason(Layout(gpu="h100", pipeline=8, schedule="GPipe")) == "no"
    assert refusals.reason(Layout(gpu="h100", pipeline=8, schedule="ZBVZeroBubble")) is None


def test_what_all_layouts_have_is_not_to_blame() -> None:
    """Eight layouts with context parallelism are refused, all with an allocator that every layout of the space has, and that
    no layout was taken with yet: the allocator alone, or another degree, refuses nothing.
    """
    refusals = Refusals()
    every = layouts(context=(1, 2), pipeline=(2, 4), expert=(1, 2, 4), microbatch=(1, 2), allocator=("expandable",))
    with_context = [layout for layout in every if layout.context > 1]
    for layout in with_context[:8]:
        refusals.refused(layout, "no such attention")
    assert all(refusals.reason(layout) == "no such attention" for layout in with_context[8:])
    assert all(refusals.reason(layout) is None for layout in every if layout.context == 1)


def test_what_was_tried_is_not_asked_again() -> None:
    """A layout that was tried has its own answer."""
    refusals = Refusals()
    tried = layouts(tensor=(2, 4), context=(2, 4), microbatch=(1, 2))
    for layout in tried:
        refusals.refused(layout, "no")
        refusals.taken(layout)
    assert all(refusals.reason(layout) is None for layout in tried)
    assert refusals.reason(Layout(gpu="h100", tensor=2, context=8)) == "no"


def test_each_value_of_a_knob_is_tried_once_and_each_pair_after_them() -> None:
    """Sizes are no reason for another try; the first layout with any new degree or setting is one, and then that with a new
    pair of them.
    """
    plain = Layout(gpu="any", microbatch=2)
    some = [
        plain,
        replace(plain, microbatch=4, shard=2, global_batch=8),
        replace(plain, tensor=2),
        replace(plain, context=2),
        replace(plain, tensor=2, context=2),
        replace(plain, tensor=2, compile=True),
        replace(plain, gpu="other"),
        replace(plain, tensor=2, context=2, compile=True),
        replace(plain, tensor=2, context=2, compile=True, microbatch=8),
    ]
    assert list(unlike([*some, *some])) == [some[i] for i in (0, 2, 3, 5, 6, 4, 7)]


def test_eight_times_the_same_words_end_the_tries() -> None:
    """Other words among them say that settings matter: then all are tried."""
    every = layouts(tensor=(1, 2, 4, 8), context=(1, 2, 4))
    reasons: list[str] = []
    for _ in hopeful(every, reasons):
        reasons.append("no such model")
    assert len(reasons) == 8
    reasons = []
    for layout in hopeful(every, reasons):
        reasons.append("no such attention" if layout.context > 1 else "no such model")
    assert len(reasons) == len(every)


def test_any_pair_of_values_is_found_that_alone_can_run() -> None:
    """Whichever two settings need each other, a layout with both is among those that are tried."""
    every = layouts(tensor=(1, 2, 4), context=(1, 2), expert=(1, 2), microbatch=(1, 2))
    tried = list(unlike(every))
    assert len(tried) < len(every) / 2
    for pair in itertools.product((1, 2, 4), (1, 2)):
        assert any((layout.tensor, layout.context) == pair for layout in tried)
        assert any((layout.tensor, layout.expert) == pair for layout in tried)


def test_what_torchtitan_itself_refuses_is_tried_twice_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that cannot be planned for is tried as it runs, unless the same words came of that before; other words say nothing
    of what runs.
    """
    tried: list[str] = []
    words = {"plan": "no such attention", "run": "no such attention"}

    def refusing(way: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            tried.append(way)
            raise CaptureError(words[way])

        return refuse

    module = "autosac.configurations.evaluating.evaluations"
    monkeypatch.setattr(f"{module}.captures_of", refusing("plan"))
    monkeypatch.setattr(f"{module}.simulate_in", refusing("run"))
    server = CaptureServer()  # nothing begins
    job = TitanJob(config_file="job.toml", target=Target.of("h100-sxm-80gb", 2))
    task = LayoutTask(job=job, goal=Goal(budget_bytes=1), checkpointing=("none",), cutoff_ms=1.0)
    assert task.run(server) == {"refused": "no such attention", "as_it_runs": True}
    assert tried == ["plan", "run"]
    again = replace(task, refusals=frozenset({"no such attention"}))
    assert again.run(server) == {"refused": "no such attention"} and tried == ["plan", "run", "plan"]
    full = replace(task, checkpointing=("none", "full", "selective-op"))
    assert full.run(server)["as_it_runs"] and tried[3:] == ["plan", *["run"] * 3]
    words["plan"] = "no plan beside this"
    del tried[3:]
    assert again.run(server) == {"refused": "no plan beside this"} and tried[3:] == ["plan", "run"]
