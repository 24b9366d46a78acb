"""What `autosac diff` says of two plans."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from autosac.cli.parser import main
from autosac.plans import Decision, Plan, Settings, Unit
from autosac.plans.diff import compare_plans
from autosac.report.summaries import decision_table
from plans import LLAMA_8B, prediction


def unit(number: int, *keeps: bool) -> Unit:
    """A unit of products, and of a view that takes neither memory nor time."""
    products = tuple(
        Decision(
            op="aten.mm.default",
            occurrence=i,
            keep=keep,
            outputs=(((2, 8), "bfloat16"),),
            memory_bytes=2**29,
            runtime_ms=0.5,
            msps=2.0**40,
        )
        for i, keep in enumerate(keeps)
    )
    view = Decision(op="aten._unsafe_view.default", occurrence=0, keep=False, outputs=(((2, 8), "bfloat16"),))
    kept = sum(keeps) * 2**29
    return Unit(
        fqn=f"layers.{number}", discard_fraction=0.5, kept_bytes=kept, recompute_ms=1.25, decisions=(*products, view)
    )


def plan(budget_gib: int, *units: Unit) -> Plan:
    """A plan of these units for a budget."""
    return Plan(
        made_for=replace(LLAMA_8B, budget_bytes=budget_gib * 2**30, budget_kind="active"),
        units=units,
        predictions={"autosac": prediction(1000.0 + budget_gib, budget_gib, more_reserved_gib=None, recompute_ms=9.0)},
    )


@pytest.fixture
def plans() -> tuple[Plan, Plan]:
    """Of layers 0 to 3 the second plan keeps one product more of 0, 1 and 3, and does not checkpoint 2."""
    a = plan(40, *(unit(i, True, False, False) for i in range(4)))
    b = plan(50, *(unit(i, True, True, True) for i in (0, 1, 3)))
    return a, b


def test_equal_layers_are_one_row(plans: tuple[Plan, Plan]) -> None:
    """Layers 0 and 1 differ alike, 2 otherwise, 3 is on its own behind it; bytes are in MiB or GiB."""
    kept, keeps = "keeps 512.0 MiB\nrecomputes 1.25 ms", "keeps 1.50 GiB\nrecomputes 1.25 ms"
    assert compare_plans(*plans).groups() == [
        ("layers.0-1", kept, keeps, "", "mm #1-2"),
        ("layers.2", kept, "not checkpointed", "", ""),
        ("layers.3", kept, keeps, "", "mm #1-2"),
    ]


def test_torchtitans_own_checkpointing_is_a_setting(plans: tuple[Plan, Plan]) -> None:
    """It stands among the settings, and in place of what the other plan does in its modules."""
    own = replace(plans[0], units=(), settings=Settings(job_checkpointing="full"))
    difference = compare_plans(own, plans[0])
    assert difference.settings() == [("job checkpointing", "full", "-")]
    what = "TorchTitan's own full checkpointing"
    assert difference.groups() == [("layers.0-3", what, "keeps 512.0 MiB\nrecomputes 1.25 ms", "", "")]


def test_settings_and_figures_have_units(plans: tuple[Plan, Plan]) -> None:
    """The budget and the peak in GiB, the step in ms."""
    difference = compare_plans(*plans)
    assert difference.settings() == [("budget", "40.00 GiB", "50.00 GiB")]
    assert difference.figures() == [
        ("step", "1,040.0 ms", "1,050.0 ms", "+10.0 ms"),
        ("peak active", "40.00 GiB", "50.00 GiB", "+10.00 GiB"),
    ]


def test_the_command_groups(plans: tuple[Plan, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files in, a row for each group out, within 80 columns."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for each, file in zip(plans, files, strict=True):
        each.save(file)
    assert main(["diff", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert "layers.0-1" in out and "layers.1 " not in out
    assert all(len(line) <= 80 for line in out.splitlines() if "A: " not in line and "B: " not in line)


def test_explain_says_what_it_does_not_list() -> None:
    """The view is not in the table of operators, and the line below says so."""
    table = decision_table(unit(0, True, False))
    out = io.StringIO()
    Console(width=100, file=out).print(table)
    assert table.row_count == 2 and "_unsafe_view" not in out.getvalue()
    assert "not listed: 1 operator that only makes views; they take no memory and no time" in out.getvalue()
    only_products = replace(unit(0, True), decisions=unit(0, True).decisions[:1])
    assert decision_table(only_products).caption == "not listed: views; they take no memory and no time"
