"""What becomes of a stored step, pinned word by word and byte by byte: reports, files, plans, the allocator.

Nothing is captured here, so a change of any simulator, model, solver or report shows within seconds.
``AUTOSAC_UPDATE_GOLDEN=1 pytest tests/golden`` writes the expectations anew; look at what changed before committing.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pinned
import pytest
from pinned import digest, rounded

import autosac
from autosac.chakra.schema import unpacked
from autosac.cli.parser import main
from autosac.derivation.deriver import Deriver
from autosac.errors import InfeasibleError
from autosac.memory_sim import AllocatorConfig, replay_allocator
from autosac.planning.closed_loop import Planned, make_plans
from autosac.planning.planner import Goal, full_plan
from autosac.plans import Plan
from autosac.report.summaries import console, plan_summary
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Trace

FOLDER = Path(__file__).parent
MIB = 2**20


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of one width."""
    monkeypatch.setenv("COLUMNS", "150")


def check(name: str, text: str) -> None:
    """Compare with a file of this folder."""
    pinned.check(FOLDER / name, text)


@pytest.fixture(scope="module")
def trace() -> Callable[[str], Trace]:
    """One of the stored traces."""
    return lambda name: Trace.load(FOLDER / f"{name}.trace")


class Stored:
    """The captures of planning, derived from stored ones."""

    def __init__(self, trace: Callable[[str], Trace]) -> None:
        self._target = Target.of("h100-sxm-80gb", 8)
        self._observed = simulation_of(trace("observed"), self._target)
        self._deriver = Deriver(self._observed.trace)
        for name in ("outer", "inner"):
            self._deriver.add(trace(name))

    def observed(self) -> Simulation:
        """The step without checkpointing."""
        return self._observed

    def baselines(self) -> Mapping[str, Simulation]:
        """Without checkpointing, and with all of it."""
        return {"none": self._observed, "full": self.under(full_plan(self._observed))}

    def failures(self) -> Mapping[str, str]:
        """None."""
        return {}

    def begin(self, plan: Plan) -> None:
        """Nothing takes long."""

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        if not plan.units:
            return self._observed
        return simulation_of(self._deriver.under(plan), self._target, plan)

    begin_template, template = begin, under

    def between(self, kind: str, *shares: float) -> tuple[int, ...]:
        """Budgets between the peaks with and without all checkpointing."""
        low, high = (self.baselines()[name].peak_bytes(kind) for name in ("full", "none"))
        return tuple(int(low + share * (high - low)) for share in shares)


@pytest.fixture(scope="module")
def stored(trace: Callable[[str], Trace]) -> Stored:
    """The captures of planning."""
    return Stored(trace)


@pytest.mark.parametrize(("name", "gpu"), [("observed", "h100-sxm-80gb"), ("selective", "mi300x"), ("outer", "a40")])
def test_reports(name: str, gpu: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Memory and time of the step, all tables."""
    assert main(["simulate", str(FOLDER / f"{name}.trace"), "--gpu", gpu, "--memory", "--time", "--quiet"]) == 0
    check(f"report-{name}.txt", capfd.readouterr().out)


def test_the_world_of_a_stored_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The number of GPUs that it was captured with may be given, and no other; it can be saved as it is."""
    command = ["simulate", str(FOLDER / "selective.trace"), "--gpu", "h100-sxm-80gb", "--quiet"]
    assert main([*command, "--world-size", "8", "--save-capture", str(tmp_path / "again.trace")]) == 0
    assert Trace.load(tmp_path / "again.trace") == Trace.load(FOLDER / "selective.trace")
    capfd.readouterr()
    assert main([*command, "--world-size", "4"]) == 2
    assert "was captured in a world of 8 GPUs: --world-size 4 needs the job" in capfd.readouterr().err


def test_summaries(stored: Stored) -> None:
    """What `print` shows of a trace, a simulation and a plan, and their reports as text."""
    plan = full_plan(stored.observed())
    predicted = replace(plan, predictions={"autosac": stored.under(plan).prediction()})
    shown = (stored.observed().trace, stored.observed(), plan, predicted)
    check(
        "summaries.txt", "\n".join([*map(str, shown), autosac.summary(stored.observed()), autosac.summary(predicted)])
    )


def test_documents(capfd: pytest.CaptureFixture[str]) -> None:
    """The same as JSON, under other settings of the allocator and the collectives."""
    words = ["--alloc-conf", "max_split_size_mb:64", "--collectives", "chunks", "--interference", "off", "--json"]
    assert main(["simulate", str(FOLDER / "selective.trace"), "--gpu", "h100-sxm-80gb", "--quiet", *words]) == 0
    document = rounded(json.loads(capfd.readouterr().out))
    check("document.json", json.dumps(document, indent=1))


def test_machines(capfd: pytest.CaptureFixture[str]) -> None:
    """The lists of GPUs and clusters, and one of each in detail."""
    for command in (["gpus"], ["gpus", "h100-sxm-80gb"], ["gpus", "mi300x"], ["clusters"], ["clusters", "hgx-h100"]):
        assert main(command) == 0
    check("machines.txt", capfd.readouterr().out)


def test_files(tmp_path: Path) -> None:
    """The timeline, the snapshot and the execution traces."""
    message_as_dict = pytest.importorskip("google.protobuf.json_format").MessageToDict
    files = {"--trace": "t.json", "--memory-snapshot": "s.pickle", "--chakra": "chakra"}
    words = [word for option, file in files.items() for word in (option, str(tmp_path / file))]
    assert main(["simulate", str(FOLDER / "selective.trace"), "--gpu", "h100-sxm-80gb", "--quiet", *words]) == 0
    found = {
        "timeline": digest(json.loads((tmp_path / "t.json").read_text())),
        "snapshot": digest(pickle.loads((tmp_path / "s.pickle").read_bytes())),
        **{
            path.name: digest([message_as_dict(message) for message in unpacked(path.read_bytes())])
            for path in sorted((tmp_path / "chakra").iterdir())[:2]
        },
    }
    check("files.json", json.dumps(found, indent=1))


def told(planned: Planned | InfeasibleError) -> Iterator[str]:
    """A plan as it is shown, and its document's hash; or why there is none."""
    if isinstance(planned, InfeasibleError):
        yield str(planned)
        return
    out = console()
    with out.capture() as page:
        out.print(plan_summary(planned.plan, planned.notes))
    yield page.get()
    yield digest(json.loads(planned.plan.to_bytes()))


@pytest.mark.parametrize(
    ("solver", "kind", "shares"),
    [("ilp", "active", (-1, 0.2, 0.6)), ("knapsack", "reserved", (0.5,)), ("greedy", "active", (0.4,))],
)
def test_plans(solver: Any, kind: Any, shares: tuple[float, ...], stored: Stored) -> None:
    """Of budgets between too little and enough."""
    goal = Goal(budget_bytes=1, budget_kind=kind, solver=solver)
    found = make_plans(stored, goal, stored.between(kind, *shares))
    check(f"plans-{solver}-{kind}.txt", "\n".join(line for planned in found for line in told(planned)))


def test_why_operators_are_kept(stored: Stored, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`explain` of a plan and its modules, and `diff` of two plans."""
    goal = Goal(budget_bytes=1, budget_kind="active")
    plans = make_plans(stored, goal, stored.between("active", 0.3, 0.7))
    for name, planned in zip(("a", "b"), plans, strict=True):
        assert isinstance(planned, Planned)
        planned.plan.save(tmp_path / f"{name}.json")
    first = Plan.load(tmp_path / "a.json")
    commands = [
        ["explain", "a.json"],
        *(["explain", "a.json", "--module", unit.fqn] for unit in first.units),
        ["diff", "a.json", "b.json"],
    ]
    for command in commands:
        assert main([str(tmp_path / word) if word.endswith(".json") else word for word in command]) == 0
    check("explained.txt", capfd.readouterr().out.replace(f"{tmp_path}/", ""))


@pytest.mark.parametrize("name", ["observed", "selective"])
def test_the_allocator(name: str, trace: Callable[[str], Trace]) -> None:
    """What it reserves under each of its settings, and of how much memory it runs out."""
    settings = (
        "",
        "expandable_segments:True",
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.6",
    )
    found = {}
    for text in settings:
        for capacity in (None, 700 * MIB, 500 * MIB):
            report = replay_allocator(trace(name), config=AllocatorConfig.parse(text), capacity_bytes=capacity)
            figures = (
                report.verdict.outcome.name,
                report.reserved_peak_bytes,
                report.active_peak_bytes,
                report.retries,
            )
            found[f"{text or 'default'}, {capacity or 'no'} limit"] = [*figures, digest(repr(report))]
    check(f"allocator-{name}.json", json.dumps(found, indent=1))
