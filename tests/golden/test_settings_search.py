"""The search over settings of an eager step, on a stored step: its work is the batch that a setting names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autosac.configurations.eager import Choice, EagerResult, EagerSearch, combinations
from autosac.configurations.space.offers import Objective, Offer
from autosac.errors import CaptureError, InfeasibleError, UsageError
from autosac.planning.planner import Goal
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Trace

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def step() -> Callable[[str], Simulation]:
    """A stored step on H100s."""
    target = Target.of("h100-sxm-80gb", 8)
    known = {name: simulation_of(Trace.load(FOLDER / f"{name}.trace"), target) for name in ("observed", "selective")}
    return known.__getitem__


class Captures:
    """The captures of one setting: a step that fits as it is or has to be planned for, which here cannot be done."""

    def __init__(self, step: Simulation) -> None:
        self._step = step

    def observed(self) -> Simulation:
        """The step."""
        return self._step

    def baselines(self) -> Mapping[str, Simulation]:
        """None can be captured."""
        raise CaptureError("no baselines here")


def searched(
    step: Callable[[str], Simulation],
    budget: int,
    batches: Any,
    told: list[str] | None = None,
    offers: Sequence[Offer] = (Offer(gpu="h100"),),
    objective: Objective = "tokens-per-second",
) -> EagerResult:
    """The search over batches and two ways of checkpointing. 7 cannot be captured; the caller's function fails for 9."""

    def captures(choice: Choice) -> Any:
        if choice.settings["batch"] == 7:
            raise CaptureError("seven is too odd")
        if choice.settings["batch"] == 9:
            raise ValueError("nine is\nnot divided")
        return Captures(step(choice.settings["how"]))

    space = {"batch": batches, "how": ["observed", "selective"]}
    goal = Goal(budget_bytes=budget, budget_kind="active")
    note = (told if told is not None else []).append
    choices = [Choice(settings=settings, offer=offer) for offer in offers for settings in combinations(space)]
    return EagerSearch(choices, captures, lambda settings: settings["batch"], lambda _: goal, note, objective).run()


def test_all_combinations_are_tried() -> None:
    """Every choice of one value for each name, in order; none, and too many, are refused."""
    assert list(combinations({"a": [1, 2], "b": ["x"]})) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert list(combinations({})) == [{}]
    with pytest.raises(UsageError, match="space: b has no values"):
        list(combinations({"a": [1], "b": []}))
    assert len(list(combinations({"a": range(10_000)}))) == 10_000
    with pytest.raises(UsageError, match="more than 10,000 combinations"):
        list(combinations({"a": range(10_001)}))


def test_the_fastest_setting_is_found(step: Callable[[str], Simulation]) -> None:
    """Work in a second, best first; what cannot be captured has its reason and no rate; progress names each setting."""
    told: list[str] = []
    found = searched(step, 2**40, [8, 4, 7], told)
    assert found.best.settings == {"batch": 8, "how": "observed"} and found.best.plan is None
    assert found.best.rate == pytest.approx(8 / step("observed").step_ms * 1e3)
    assert [row.reason for row in found.rows if row.settings["batch"] == 7] == ["seven is too odd"] * 2
    assert [row.rate for row in found.rows] == sorted((row.rate for row in found.rows), reverse=True)
    assert found.ruled_out + len(found.rows) == 6
    assert told == [
        f"simulating {dict(settings)} on h100"
        for settings in combinations({"batch": [8, 4, 7], "how": ["observed", "selective"]})
    ]


def test_the_cheapest_gpu_is_found(step: Callable[[str], Simulation]) -> None:
    """The same step on two GPUs: by cost the one at a third of the price is the best."""
    offers = (Offer(gpu="dear", price=3.6), Offer(gpu="cheap", price=1.2))
    found = searched(step, 2**40, [3, 4], offers=offers, objective="cost-per-token")
    assert found.best.offer.gpu == "cheap" and found.best.settings["batch"] == 4
    assert found.best.cost == pytest.approx(1.2 / 3600 * step("observed").step_ms / 1e3 / 4)
    costs = [row.cost for row in found.rows]
    assert costs == sorted(costs)
    assert searched(step, 2**40, [4], offers=offers).best.offer.gpu == "dear"  # as fast, and named first


def test_what_does_not_fit_is_planned_for(step: Callable[[str], Simulation]) -> None:
    """A step at the budget fits as it is; one above it needs a plan, and is no answer if there is none."""
    low, high = step("selective").peak_active_bytes, step("observed").peak_active_bytes
    assert low < high
    found = searched(step, low, [4])
    assert found.best.settings["how"] == "selective" and found.best.simulation is step("selective")
    reasons = {row.settings["how"]: row.reason for row in found.rows}
    assert reasons == {"selective": "", "observed": "no baselines here"}
    assert searched(step, high, [4]).best.settings["how"] == "observed"
    with pytest.raises(InfeasibleError, match=r"no settings fit: no baselines here$"):
        _ = searched(step, low - 1, [4]).best


def test_a_result_is_printed_row_by_row(step: Callable[[str], Simulation]) -> None:
    """Each setting with its step, peak and rate, or why it has none; never the captured steps themselves."""
    found = searched(step, 2**40, [8, 7])
    first, second, _, last = str(found).splitlines()
    assert first.startswith("1. {'batch': 8, 'how': 'observed'} on h100: step ")
    assert first.endswith(f" reserved, {found.best.rate:,.1f}/s")
    assert second == "2. {'batch': 7, 'how': 'observed'} on h100: seven is too odd"
    assert last == "1 ruled out by their bounds"
    many = searched(step, 2**40, [7] * 6)
    assert str(many).splitlines()[-1] == "2 more"


def test_work_must_be_above_nothing(step: Callable[[str], Simulation]) -> None:
    """A batch of 0 is refused with its settings."""
    with pytest.raises(
        UsageError, match=r"work of \{'batch': 0, 'how': 'observed'\} is 0: it must be a number above 0"
    ):
        searched(step, 2**40, [0])


def test_a_function_that_fails_is_a_row(step: Callable[[str], Simulation]) -> None:
    """An error of the caller's own function for some settings is their reason, on one line, and not the end."""
    found = searched(step, 2**40, [9, 4])
    assert found.best.settings["batch"] == 4
    assert {row.reason for row in found.rows if row.settings["batch"] == 9} == {"ValueError: nine is not divided"}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (["a"], r"space: \['a'\] is not a mapping"),
        ({"a": 3}, "space: a is 3: give a list"),
        ({"a": "12"}, "space: a is '12': give a list"),
    ],
)
def test_a_space_of_settings_names_their_values(space: Any, message: str) -> None:
    """Neither a number nor a text, whose letters would be values, stands for a list."""
    with pytest.raises(UsageError, match=message):
        list(combinations(space))


def test_work_that_cannot_be_told_is_one_line(step: Callable[[str], Simulation]) -> None:
    """An error of the function for work is named with the settings; numpy's numbers are numbers."""
    choice = Choice(settings={"batch": 4}, offer=Offer(gpu="h100"))

    def search(work: Callable[[Any], Any]) -> EagerResult:
        goal = Goal(budget_bytes=2**40, budget_kind="active")
        return EagerSearch([choice], lambda _: Captures(step("observed")), work, lambda _: goal, lambda _: None).run()  # type: ignore[arg-type,return-value]

    with pytest.raises(UsageError, match=r"work of \{'batch': 4\} failed: KeyError: 'tokens'"):
        search(lambda settings: settings["tokens"])
    with pytest.raises(UsageError, match=r"is 'x': it must be a number above 0"):
        search(lambda settings: "x")
    assert search(lambda settings: np.float32(4)).best.rate == pytest.approx(4 / step("observed").step_ms * 1e3)
