"""How ranks agree on a plan through the job's store; every rank in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from autosac.errors import AutosacError, PlanError
from autosac.integrations.torchtitan.planning import (
    agree_on,
    agree_on_change,
    agree_on_file,
    check_compilable,
    gathered,
    plan_file,
)
from autosac.plans import Decision, Plan, Unit
from plans import LLAMA_8B, MADE_FOR

PLAN, OTHER = Plan(made_for=MADE_FOR, units=()), Plan(made_for=LLAMA_8B, units=())


class OneExchange:
    """A store for one exchange: a key counts from its rank on, for each call in this process has a number of its own."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def _known(self, key: str) -> str:
        return key.removeprefix("autosac/plan/").partition("/")[2]

    def set(self, key: str, value: bytes, /) -> None:
        """Publish a value, once."""
        assert self._known(key) not in self.values
        self.values[self._known(key)] = value

    def get(self, key: str, /) -> bytes:
        """Read a value."""
        return self.values[self._known(key)]

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """What is not there never comes."""
        assert timeout == timedelta(minutes=30)
        if any(self._known(key) not in self.values for key in keys):
            raise RuntimeError("timeout")


def never() -> Plan:
    """Only rank 0 plans."""
    raise AssertionError


def fail() -> Plan:
    """A plan that cannot be made."""
    raise PlanError("no budget")


def test_all_ranks_get_the_plan_of_rank_0() -> None:
    """Which makes it once; without a store a rank makes its own."""
    store = OneExchange()
    assert agree_on(lambda: PLAN, 0, store) == PLAN
    assert [agree_on(never, rank, store) for rank in (1, 2)] == [PLAN, PLAN]
    assert agree_on(lambda: OTHER, 5, None) is OTHER


def test_a_failure_of_rank_0_is_everyones() -> None:
    """With its message."""
    store = OneExchange()
    with pytest.raises(PlanError, match=r"^no budget$"):
        agree_on(fail, 0, store)
    with pytest.raises(PlanError, match=r"^rank 0 could not plan: no budget$"):
        agree_on(never, 1, store)


def test_a_plan_that_arrives_changed() -> None:
    """Its hash is not that of rank 0's."""
    store = OneExchange()
    agree_on(lambda: PLAN, 0, store)
    head, _, _ = store.values[""].partition(b" ")
    store.values[""] = head + b" " + OTHER.to_bytes()
    with pytest.raises(PlanError, match="rank 3 did not receive the plan that rank 0 made"):
        agree_on(never, 3, store)


@pytest.mark.parametrize("made", [PLAN, None], ids=["a plan", "none"])
def test_a_change_of_plans_is_rank_0s(made: Plan | None) -> None:
    """Or there is none, for all ranks."""
    store = OneExchange()
    assert agree_on_change(lambda: made, 0, store) == made
    assert agree_on_change(never, 1, store) == made
    assert agree_on_change(lambda: made, 1, None) is made


def test_every_rank_reads_the_file(tmp_path: Path) -> None:
    """And compares what it finds with rank 0's; a rank that finds another plan, or nothing, says so."""
    path = tmp_path / "plan.json"
    PLAN.save(path)
    store = OneExchange()
    assert [agree_on_file(str(path), rank, store) for rank in (0, 1)] == [PLAN, PLAN]
    assert agree_on_file(str(path), 1, None) == PLAN
    OTHER.save(path)
    own, first = OTHER.hash()[:12], PLAN.hash()[:12]
    with pytest.raises(PlanError, match=f"is plan {own} on rank 1 and {first} on rank 0"):
        agree_on_file(str(path), 1, store)


def test_a_file_that_rank_0_cannot_read(tmp_path: Path) -> None:
    """Ends every rank with the same message."""
    store, missing = OneExchange(), str(tmp_path / "missing.json")
    messages = []
    for rank in (0, 1):
        with pytest.raises(AutosacError) as raised:
            agree_on_file(missing, rank, store)
        messages.append(str(raised.value))
    assert messages[1] == f"rank 0: {messages[0]}"


def test_rank_0_hears_every_rank() -> None:
    """In order; the others hear nothing, and without a store a rank is alone."""
    store = OneExchange()
    assert [gathered(word, rank, 3, store) for rank, word in ((2, b"c"), (1, b"b"))] == [[], []]
    assert gathered(b"a", 0, 3, store) == [b"a", b"b", b"c"]
    assert gathered(b"a", 0, 1, None) == [b"a"]


@pytest.mark.parametrize(
    "ask", [lambda store: agree_on(never, 1, store), lambda store: agree_on_change(never, 1, store)]
)
def test_rank_0_is_not_waited_for_forever(ask: Callable[[OneExchange], object]) -> None:
    """One line says what did not come."""
    with pytest.raises(AutosacError, match="rank 0 has not sent a plan for 0:30:00"):
        ask(OneExchange())


def test_plans_differ() -> None:
    """The two of this file, by their hashes."""
    assert PLAN.hash() != OTHER.hash() == replace(PLAN, made_for=LLAMA_8B).hash()


def test_a_plan_lies_beside_its_job_or_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own neighbour is taken from any working folder; two different files of that name are an error."""
    jobs, here = tmp_path / "jobs", tmp_path / "here"
    for folder in (jobs, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    job = str(jobs / "best.toml")
    assert plan_file("best.plan.json", job) == "best.plan.json"
    (here / "best.plan.json").write_bytes(PLAN.to_bytes())
    assert plan_file("best.plan.json", job) == plan_file("best.plan.json", "module:config") == "best.plan.json"
    (jobs / "best.plan.json").write_bytes(PLAN.to_bytes())
    assert plan_file("best.plan.json", job) == str(jobs / "best.plan.json")
    assert plan_file(str(here / "best.plan.json"), job) == str(here / "best.plan.json")
    (here / "best.plan.json").write_bytes(OTHER.to_bytes())
    with pytest.raises(PlanError, match="ambiguous"):
        plan_file("best.plan.json", job)


def test_a_compiled_job_is_refused_what_it_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading never, decisions before PyTorch 2.12; memory budgets are the compiler's own."""
    kept = Decision(op="aten.mm.default", occurrence=0, keep=True, outputs=())
    unit = Unit(fqn="layers.0", discard_fraction=0.5, kept_bytes=0, recompute_ms=0.0, decisions=(kept,))
    hosted = replace(unit, decisions=(replace(kept, offload=True),))
    budget = replace(unit, decisions=(), memory_budget=0.5)
    modes = "autosac.integrations.recompute.compiled_modes.SEES_RESULTS"
    monkeypatch.setattr(modes, True)
    check_compilable(replace(PLAN, units=(unit,)))
    with pytest.raises(PlanError, match="offloads to host memory, which a compiled model cannot"):
        check_compilable(replace(PLAN, units=(hosted,)))
    monkeypatch.setattr(modes, False)
    check_compilable(replace(PLAN, units=(budget,)))
    with pytest.raises(PlanError, match=r"^the job compiles its model: plans of .* need PyTorch 2\.12 or newer$"):
        check_compilable(replace(PLAN, units=(unit,)))
