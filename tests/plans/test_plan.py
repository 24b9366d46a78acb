"""The plan file: what is written is read back, and bad files are refused in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import PlanError
from autosac.plans import Decision, Plan, Prediction, Settings, Unit
from plans import LLAMA_8B, MADE_FOR

PARAMETERS = (("layers.0.w", (4, 8)), ("layers.1.w", (4, 8)))


def decision(occurrence: int, keep: bool) -> Decision:
    """One product."""
    return Decision(
        op="aten.mm.default",
        occurrence=occurrence,
        keep=keep,
        outputs=(((2, 8), "bfloat16"),),
        memory_bytes=32,
        runtime_ms=0.5,
        msps=64000.0,
    )


def unit(fqn: str, *keeps: bool) -> Unit:
    """A unit of products."""
    return Unit(
        fqn=fqn,
        discard_fraction=0.25,
        kept_bytes=96,
        recompute_ms=0.125,
        decisions=tuple(decision(i, keep) for i, keep in enumerate(keeps)),
        parameters=(("w", (4, 8)),),
    )


def plan(*units: Unit) -> Plan:
    """A plan of these units, by default of two alike."""
    return Plan(
        made_for=replace(LLAMA_8B, budget_bytes=68 * 2**30, parameters=PARAMETERS),
        units=units or (unit("layers.0", True, False), unit("layers.1", True, False)),
        settings=Settings(preserve_rng_state=True, early_stop=False),
        predictions={
            "autosac": Prediction(
                step_ms=1.5, peak_active_bytes=7, peak_reserved_bytes=None, fits=True, recompute_ms=0.25
            )
        },
    )


def test_a_saved_plan_is_loaded_equal(tmp_path: Path) -> None:
    """Save and load are inverse, and leave no other file."""
    path = tmp_path / "plan.json"
    plan().save(path)
    assert Plan.load(path) == plan()
    assert list(tmp_path.iterdir()) == [path]


def test_units_alike_share_one_table() -> None:
    """Eighty equal layers: one policy and one layout in the file, equal decisions in memory."""
    many = plan(*(unit(f"layers.{i}", True, False, True) for i in range(80)), unit("layers.80", False))
    document = json.loads(many.to_bytes())
    assert [len(document[name]) for name in ("units", "policies", "layouts")] == [81, 2, 1]
    again = Plan.from_bytes(many.to_bytes())
    assert again == many
    assert again.units[0].decisions is again.units[79].decisions


def test_each_decision_and_unit_is_one_line() -> None:
    """The file can be read and compared line by line."""
    lines = plan().to_bytes().decode().splitlines()
    assert sum('"occurrence"' in line for line in lines) == 2
    assert sum('"fqn"' in line for line in lines) == 2
    assert not [line for line in lines if line.count('"fqn"') + line.count('"occurrence"') > 1]


def test_the_hash_is_of_the_content() -> None:
    """Equal plans hash alike, through the file too; one decision more or less changes it."""
    assert plan().hash() == Plan.from_bytes(plan().to_bytes()).hash()
    assert plan().hash() != plan(unit("layers.0", True, True), unit("layers.1", True, False)).hash()
    assert len(plan().hash()) == 64


names = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=8)


@settings(deadline=None, max_examples=40)
@given(
    fqns=st.lists(names, unique=True, max_size=4),
    keeps=st.lists(st.booleans(), max_size=5),
    ms=st.floats(0, 1e15),
    stages=st.integers(1, 9),
)
def test_any_plan_survives_the_file(fqns: list[str], keeps: list[bool], ms: float, stages: int) -> None:
    """Names of any characters, any numbers that make sense: encoding and decoding gives the same plan."""
    base = plan(*(unit(fqn, *keeps) for fqn in fqns))
    prediction = Prediction(step_ms=ms, peak_active_bytes=1, peak_reserved_bytes=2, fits=False, recompute_ms=ms)
    whole = Plan(made_for=base.made_for, units=base.units, predictions={"none": prediction})
    assert Plan.from_bytes(whole.to_bytes()) == whole


def edited(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The plan's JSON after an edit by hand."""
    document = json.loads(plan().to_bytes())
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "p.json is not an AutoSAC plan"),
        (b"\xff\xfe", "p.json is not an AutoSAC plan"),
        (b"[1, 2]", "p.json is not an AutoSAC plan"),
        (b'{"format": "other"}', "p.json is not an AutoSAC plan"),
        (plan().to_bytes()[:-200], "p.json is truncated or damaged"),
        (plan().to_bytes()[:40], "p.json is truncated or damaged"),
        (edited(lambda d: d.update(schema=2)), "p.json has plan schema 2; this version of AutoSAC reads 1"),
        (edited(lambda d: d.pop("units")), "p.json is damaged: units is missing"),
        (edited(lambda d: d.update(color=1)), "p.json is damaged: color is not a known key"),
        (
            edited(lambda d: d["units"][1].update(policy="x")),
            "p.json is damaged: units[1].policy is 'x': expected a whole number",
        ),
        (
            edited(lambda d: d["units"][1].update(policy=3)),
            "p.json is damaged: units[1].policy: there is no policy 3",
        ),
        (
            edited(lambda d: d["units"][1].update(layout=1)),
            "p.json is damaged: units[1].layout: there is no layout 1",
        ),
        (edited(lambda d: d["units"][0].update(fqn="")), "checkpoints the whole model as one unit"),
        (edited(lambda d: d["units"][0].update(fqn="layers.1")), "names the unit layers.1 twice"),
        (edited(lambda d: d["units"][0].update(fqn="layers")), "nests the unit layers.1 in the unit layers"),
        (
            edited(lambda d: d["units"][0].update(discard_fraction=1.5)),
            "damaged: units[0].discard_fraction is 1.5: expected at most 1",
        ),
        (
            edited(lambda d: d["policies"][0][1].update(keep="yes")),
            "policies[0][1].keep is 'yes': expected true or false",
        ),
        (
            edited(lambda d: d["policies"][0][1].update(occurrence=5)),
            "damaged: policies[0][1]: occurrence 5 of aten.mm.default where 1 is due",
        ),
        (
            edited(lambda d: d["policies"][0][1].update(outputs=[[[-2], "f"]])),
            "damaged: policies[0][1].outputs[0][0][0] is -2: expected at least -1",
        ),
        (
            edited(lambda d: d["policies"][0][1].update(runtime_ms=math.nan)),
            "p.json is truncated or damaged: NaN",
        ),
        (
            edited(lambda d: d["made_for"].update(budget_kind="big")),
            "damaged: made_for.budget_kind is 'big': expected active or reserved",
        ),
        (
            edited(lambda d: d["made_for"].update(world_size=0)),
            "damaged: made_for.world_size is 0: expected at least 1",
        ),
        (
            edited(lambda d: d["made_for"].update(world_size=8.0)),
            "damaged: made_for.world_size is 8.0: expected a whole number",
        ),
        (
            edited(lambda d: d["units"][0].update(kept_bytes=True)),
            "damaged: units[0].kept_bytes is True: expected a whole number",
        ),
        (
            edited(lambda d: d["policies"][0][1].pop("memory_bytes")),
            "damaged: policies[0][1].memory_bytes is missing",
        ),
        (edited(lambda d: d["settings"].clear()), "damaged: settings.early_stop is missing"),
        (
            edited(lambda d: d["made_for"].pop("pipeline_stages")),
            "damaged: made_for.pipeline_stages is missing",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(content: bytes, message: str) -> None:
    """What is no plan, is truncated, has another version or was edited to nonsense says so, and where."""
    with pytest.raises(PlanError) as caught:
        Plan.from_bytes(content, name="p.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_truncation_is_refused() -> None:
    """A plan file cut anywhere before its last brace is a PlanError."""
    content = plan().to_bytes().rstrip()
    for length in range(0, len(content) - 1, 37):
        with pytest.raises(PlanError):
            Plan.from_bytes(content[:length])


def test_a_missing_file_and_an_unwritable_path(tmp_path: Path) -> None:
    """Loading names the file and the reason; saving into a missing folder fails and leaves nothing."""
    with pytest.raises(PlanError, match=r"cannot read the plan .*no\.json: No such file"):
        Plan.load(tmp_path / "no.json")
    with pytest.raises(OSError, match="No such file"):
        plan().save(tmp_path / "missing" / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_what_is_offloaded_survives_the_file_and_older_files_have_none() -> None:
    """`offload` is written where it is true only; the unit's total is that of the decisions."""
    first = unit("layers.0", True, True, False)
    first = replace(first, decisions=(replace(first.decisions[0], offload=True), *first.decisions[1:]))
    whole = plan(first, unit("layers.1", True))
    assert Plan.from_bytes(whole.to_bytes()) == whole and whole.offloads and not plan().offloads
    assert whole.to_bytes().count(b'"offload"') == 1 and b'"offload"' not in plan().to_bytes()
    assert [u.offloaded_bytes for u in whole.units] == [32, 0]
    with pytest.raises(PlanError, match=r"offloads aten\.mm\.default of layers\.0, which it does not keep"):
        plan(replace(first, decisions=(replace(first.decisions[0], keep=False), *first.decisions[1:])))


def test_files_of_earlier_versions_lack_what_is_newer() -> None:
    """Without reasons, certainty and overrides a file is read all the same."""

    def older(document: dict[str, Any]) -> None:
        del document["reasons"], document["certainty"], document["made_for"]["overrides"]

    assert Plan.from_bytes(edited(older)) == plan()


def test_what_is_left_to_the_compiler() -> None:
    """A memory budget, of the whole job or of one unit, which a file keeps; graphs count the units' distinct policies."""
    budgeted = replace(unit("layers.2"), memory_budget=0.5)
    several = plan(unit("layers.0", True), unit("layers.1", False), budgeted, unit("layers.3", True))
    assert not plan().needs_compiler and plan().graphs == 1
    assert several.needs_compiler and several.graphs == 3
    assert replace(plan(), settings=Settings(memory_budget=0.5)).needs_compiler
    assert Plan.from_bytes(several.to_bytes()) == several
    assert several.to_bytes().count(b'"memory_budget"') == 1 and b'"memory_budget"' not in plan().to_bytes()


def test_a_plan_may_be_torchtitans_own_checkpointing() -> None:
    """Its file keeps that, it says so in a line, others' files do not have it; it decides on nothing besides."""
    own = replace(plan(), units=(), settings=Settings(job_checkpointing="full"))
    assert Plan.from_bytes(own.to_bytes()) == own and own.hash() != replace(own, settings=Settings()).hash()
    assert "TorchTitan's own full checkpointing" in str(own) and not own.needs_compiler
    assert b"job_checkpointing" not in plan().to_bytes()
    for more in ({"units": plan().units}, {"settings": replace(own.settings, memory_budget=0.5)}):
        with pytest.raises(PlanError, match="own full checkpointing, and decides on modules or memory besides"):
            replace(own, **more)  # type: ignore[arg-type]

    def other(document: dict[str, Any]) -> None:
        document["settings"]["job_checkpointing"] = "selective-op"

    with pytest.raises(PlanError, match="job_checkpointing"):
        Plan.from_bytes(edited(other))


def test_a_file_is_laid_out_by_depth() -> None:
    """A line is indented by as many spaces as brackets are open before it; decisions and parameters take one line each."""
    lines = plan().to_bytes().decode().splitlines()
    depth = 0
    for line in lines:
        depth -= line.lstrip()[0] in "}]"
        assert len(line) - len(line.lstrip()) == depth, line
        depth += line[-1] in "{["
    assert depth == 0 and sum('"op": "aten.mm.default"' in line for line in lines) == 2


def test_the_largest_number_of_bytes() -> None:
    """2^62; a file with more is refused."""
    largest = plan(replace(unit("layers.0", True), kept_bytes=2**62))
    assert Plan.from_bytes(largest.to_bytes()) == largest
    with pytest.raises(PlanError, match=r"units\[0\]\.kept_bytes"):
        Plan.from_bytes(largest.to_bytes().replace(str(2**62).encode(), str(2**62 + 1).encode()))


@pytest.mark.parametrize("ms", [float("inf"), float("nan")])
def test_files_hold_only_numbers_that_are_json(ms: float) -> None:
    """An infinite time is not written."""
    stated = Prediction(step_ms=ms, peak_active_bytes=1, peak_reserved_bytes=1, fits=True, recompute_ms=1.0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        Plan(made_for=MADE_FOR, units=(), predictions={"autosac": stated}).to_bytes()
