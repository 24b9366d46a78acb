"""Learning what TorchTitan refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

from autosac.configurations.running.refusals import Refusals, unlike
from autosac.configurations.space.layout import Layout


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
    for layout in layouts(pipeline=(2, 4), expert=(2, 4), microbatch=(1, 2)):
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


def test_what_was_tried_is_not_asked_again() -> None:
    """A layout that was tried has its own answer."""
    refusals = Refusals()
    tried = layouts(tensor=(2, 4), context=(2, 4), microbatch=(1, 2))
    for layout in tried:
        refusals.refused(layout, "no")
        refusals.taken(layout)
    assert all(refusals.reason(layout) is None for layout in tried)
    assert refusals.reason(Layout(gpu="h100", tensor=2, context=8)) == "no"


def test_each_value_of_a_knob_is_tried_once() -> None:
    """Sizes are no reason for another try; the first layout with any new degree or setting is one."""
    plain = Layout(gpu="any", microbatch=2)
    some = [
        plain,
        replace(plain, microbatch=4, shard=2, global_batch=8),
        replace(plain, tensor=2),
        replace(plain, context=2),
        replace(plain, tensor=2, context=2),
        replace(plain, tensor=2, compile=True),
        replace(plain, gpu="other"),
    ]
    assert list(unlike([*some, *some])) == [some[0], some[2], some[3], some[5], some[6]]
