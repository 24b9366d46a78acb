"""The fuzz finds what is wrong: deliberately wrong ways to apply a plan, and everything else that it has to tell apart."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosac.errors import AutosacError, PlanError

LEGAL, HOSTILE = 1, 3


@pytest.fixture
def judged() -> Callable[..., Any]:
    """``judged(apply, family="ema_before", number=LEGAL)``: the outcome of a trial whose plan `apply` applies."""
    import torch._dynamo  # noqa: F401 # the first trial would import it, within its time limit

    import benchmarks.fuzz.families  # noqa: F401
    from benchmarks.fuzz.family import FAMILIES
    from benchmarks.fuzz.trial import Session, trial

    def judge(apply: Any, family: str = "ema_buffer", number: int = LEGAL, **changes: Any) -> Any:
        return trial(dataclasses.replace(FAMILIES[family], **changes), number, Session(apply=apply))

    return judge


def hooked(action: Callable[[nn.Module, torch.Tensor], Any]) -> Callable[..., nn.Module]:
    """A way to apply a plan: do something with the output of the first unit."""

    def apply(model: nn.Module, plan: Any) -> nn.Module:
        model.get_submodule(plan.units[0].fqn).register_forward_hook(lambda module, args, out: action(module, out))
        return model

    return apply


def nothing(model: nn.Module, plan: Any) -> nn.Module:
    """Apply nothing."""
    return model


def test_a_model_that_is_left_alone_is_right(judged: Any) -> None:
    """Without any change, one trial of each of these families is right: the comparison finds nothing by itself."""
    names = (
        "ema_buffer",
        "gpt",
        "python_random",
        "own_generator",
        "batch_norm_1d",
        "numpy_writes",
        "state_dict",
        "lstm",
    )
    assert {name: judged(nothing, name).kind for name in names} == dict.fromkeys(names, "right")


def test_a_perturbed_activation_is_wrong(judged: Any) -> None:
    """A unit's output that is larger by one part in a million changes the loss."""
    outcome = judged(hooked(lambda module, out: out * (1 + 1e-6)))
    assert (outcome.kind, outcome.detail.split(" (")[0]) == ("wrong", "loss: 0 differs")


def test_a_gradient_that_is_wrong_alone_is_found(judged: Any) -> None:
    """The forward is right, the gradient of the unit's output is doubled."""

    def double(module: nn.Module, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: gradient * 2)

    outcome = judged(hooked(double))
    assert (outcome.kind, outcome.detail.split(":")[0]) == ("wrong", "gradient")


def test_a_buffer_that_is_updated_twice_is_found(judged: Any) -> None:
    """The moving average moves again after the forward."""

    def again(module: nn.Module, out: torch.Tensor) -> None:
        module.m.mul_(0.9)

    outcome = judged(hooked(again), number=5)
    assert outcome.kind == "wrong"
    assert outcome.detail.startswith(("buffer: blocks", "loss", "gradient"))


@pytest.mark.parametrize(
    ("action", "name"),
    [(lambda: torch.rand(1), "torch"), (random.random, "python")],
)
def test_random_numbers_that_are_drawn_in_addition_are_found(judged: Any, action: Any, name: str) -> None:
    """Results are right, but the generator's state is another one."""
    outcome = judged(hooked(lambda module, out: action() and None))
    assert (outcome.kind, outcome.detail.split(" differs")[0]) == ("wrong", f"rng: {name}")


def test_a_python_attribute_that_differs_is_found(judged: Any) -> None:
    """A counter that a unit raises once too often."""

    def count(module: Any, out: torch.Tensor) -> None:
        module.seen += 1

    outcome = judged(hooked(count), "own_attribute")
    assert (outcome.kind, outcome.detail.split(" (")[0]) == ("wrong", "python: blocks.0.seen differs")


def test_an_error_that_names_the_module_is_a_refusal_and_others_are_obscure(judged: Any) -> None:
    """What `apply` raises: an AutosacError with a name, one without, one of several lines, and a TypeError."""

    def raising(error: Exception) -> Callable[..., nn.Module]:
        def apply(model: nn.Module, plan: Any) -> nn.Module:
            raise error

        return apply

    assert judged(raising(PlanError("blocks.0 draws from hidden state"))).kind == "refused"
    assert judged(raising(PlanError("this cannot be done"))).kind == "obscure"
    assert judged(raising(AutosacError("blocks.0\nfails"))).kind == "obscure"
    assert judged(raising(TypeError("blocks.0 cannot be pickled"))).kind == "obscure"


def test_an_error_in_a_step_is_a_stop_if_it_says_where(judged: Any) -> None:
    """What a step raises: a RuntimeError that names the unit, one that does not, and a KeyError."""

    def raising(error: Exception) -> Callable[..., nn.Module]:
        def fail(module: nn.Module, out: torch.Tensor) -> None:
            raise error

        return hooked(fail)

    assert (
        judged(raising(RuntimeError("blocks.0 changed what its plan keeps: remove it from the plan"))).kind == "stopped"
    )
    assert judged(raising(RuntimeError("shapes differ"))).kind == "obscure"
    assert judged(raising(KeyError("blocks.0"))).kind == "obscure"


def test_a_step_that_stops_after_it_has_changed_parameters_is_wrong(judged: Any) -> None:
    """The error is clear, but it comes too late."""

    def fail(module: Any, out: torch.Tensor) -> None:
        with torch.no_grad():
            module.a.weight.add_(1.0)
        raise RuntimeError("blocks.0 failed")

    assert judged(hooked(fail)).kind == "wrong"


def test_compiled_models_are_compared_with_the_compiled_model(judged: Any) -> None:
    """Under aot_eager, a model that is left alone is right, and one whose activations are perturbed is wrong."""
    from benchmarks.fuzz.compiling import family_of
    from benchmarks.fuzz.trial import Session, trial

    family = family_of("ema_before@aot_eager")
    assert family is not None and family.compiled and family.base is not None and family.base.name == "ema_before"
    perturbed = hooked(lambda module, out: out * 1.001)
    assert [trial(family, LEGAL, Session(apply=apply)).kind for apply in (nothing, perturbed)] == ["right", "wrong"]


@pytest.mark.parametrize(
    "name", ["nobody@aot_eager", "gpt@nobody", "compiled_regions@aot_eager", "ddp_two_ranks@aot_eager"]
)
def test_what_is_not_compiled_again(name: str) -> None:
    """No family or backend of that name, one that compiles by itself, one of several ranks."""
    import benchmarks.fuzz.families  # noqa: F401
    from benchmarks.fuzz.compiling import family_of

    assert family_of(name) is None


def test_a_trial_that_hangs_ends(judged: Any) -> None:
    """A forward that computes for longer than the family's limit is obscure."""

    def compute(module: nn.Module, out: torch.Tensor) -> None:
        while True:
            pass

    outcome = judged(hooked(compute), limit_s=1.0)
    assert (outcome.kind, outcome.detail) == ("obscure", "the trial did not end within its time limit")


def test_a_process_that_dies_is_one_obscure_trial(tmp_path: Path) -> None:
    """Workers that end without a word (here: of a family that does not exist) cost one trial each; the others are run."""
    from benchmarks.fuzz.run import run
    from benchmarks.fuzz.table import Results

    results = Results()
    run([("no_such_family", [1]), ("own_attribute", [1])], results.add, jobs=1, plans=tmp_path)
    assert [(number, outcome.detail) for number, outcome in results.rows["no_such_family"].failures] == [
        (1, "the process ended with code 1")
    ]
    assert results.rows["own_attribute"].trials == 1
    assert not results.good


def test_plans_load_and_hostile_ones_are_of_many_kinds() -> None:
    """Of 40 hostile plans all pass the checks of a file; some keep too little of a group, some name other modules."""
    import torch._dynamo  # noqa: F401 # the first trial would import it, within its time limit

    import benchmarks.fuzz.families  # noqa: F401
    from benchmarks.fuzz import plans
    from benchmarks.fuzz.family import FAMILIES
    from benchmarks.fuzz.trial import Session, course_of

    session, family = Session(), FAMILIES["gpt"]
    course = course_of(family, HOSTILE)
    job = family.build(random.Random(course.variant))
    calls = session.calls(family, course)
    made = [plans.hostile(job, calls, random.Random(i), session.foreign()) for i in range(40)]
    assert len({plan.hash() for plan in made}) == 40
    assert any(unit.fqn not in job.units for plan in made for unit in plan.units)
    assert any(plan.offloads for plan in made)
    legal = plans.legal(job, calls, random.Random(0))
    groups = plans.groups_of(next(iter(calls.values())))
    for unit in legal.units:
        keeps = [decision.keep for decision in unit.decisions]
        assert all(len({keeps[i] for i in group}) == 1 for group in groups)


def test_trials_are_shared_as_equally_as_slow_families_allow() -> None:
    """Ten trials for three families, one of which takes at most one."""
    from benchmarks.fuzz.__main__ import all_numbers, quick_numbers, shares

    assert shares(["a", "b", "c"], {"a": None, "b": 1, "c": None}, 10) == {"a": 5, "b": 1, "c": 4}
    assert all_numbers(2, 3) == [2_000_000, 2_000_001, 2_000_002]
    assert quick_numbers(0, 5) == [1, 3, 5, 7, 9]


def test_the_table_counts_and_names_the_first_failure() -> None:
    """Two trials of one family, the second wrong."""
    from benchmarks.fuzz.table import Results
    from benchmarks.fuzz.trial import Outcome

    results = Results(skipped={"hf_llama": "the package transformers is not installed"})
    results.add("gpt", 6, Outcome("right", plan_kind="legal"))
    results.add("gpt", 7, Outcome("wrong", "loss: 0 differs", plan_kind="hostile"))
    assert "| gpt | 2 | 1 |  |  |  | 1 |  |  | 7 |" in results.markdown().splitlines()
    assert results.markdown().splitlines()[-1] == "Left out: hf_llama (the package transformers is not installed)."
    assert not results.good


def test_the_pages_count_families_and_trials() -> None:
    """As many kinds of models as there are families; every run had all of its time but those that it left out, and every
    trial has one outcome.
    """
    import benchmarks.fuzz.families  # noqa: F401
    from benchmarks.fuzz.family import FAMILIES

    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "fuzz.md").read_text()
    for other in ("benchmarks.md", "guarantee.md"):
        assert re.findall(r"models of (\d+) kinds", (docs / other).read_text()) == [str(len(FAMILIES))]
    ((first, trials, *found),) = re.findall(r"^\| (\d+) families \|" + r" *(\d*) *\|" * 8, page, re.MULTILINE)
    left_out = re.findall(r"(\w+) \(the package", page)
    (newer,) = re.findall(r"that the table does not have:(.*?)\.\n", page, re.DOTALL)
    assert len(FAMILIES) == int(first) + len(left_out) + len(re.findall(r"`(\w+)`", newer))
    later = re.split(r"^- `python", page, flags=re.MULTILINE)[1:]
    assert len(later) == 8
    runs = [(int(trials), sum(int(number or 0) for number in found))]
    for run in later:
        (wanted,) = re.findall(r"--trials (\d+)", run)
        outcomes = r"(\d+) (?:right|warned|refused|stopped|wrong|obscure|without)"
        runs.append((int(wanted), sum(map(int, re.findall(outcomes, " ".join(run.split()))))))
    assert all(wanted == counted for wanted, counted in runs)
    thousands = re.findall(r"about (\d+),000 trials", (docs / "guarantee.md").read_text())
    assert int(*thousands) == sum(wanted for wanted, _ in runs) // 1000
