"""The trade-off curve: its budgets, the files' names, and what is drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autosac.jobs.tasks import between
from autosac.plans import Plan
from autosac.report.pareto import pareto_html, pareto_png, points
from plans import LLAMA_8B, prediction

GIB = 2**30


def plan(gib: float, step_ms: float, *, fits: bool = True) -> Plan:
    """A plan for a budget, beside full and no checkpointing."""
    return Plan(
        made_for=replace(LLAMA_8B, budget_bytes=int(gib * GIB)),
        units=(),
        predictions={
            "autosac": prediction(step_ms, gib, fits=fits),
            "none": prediction(900.0, 120, fits=False),
            "full": prediction(1200.0, 40),
        },
    )


def test_peaks_between_the_budgets_are_budgets_too() -> None:
    """Of peaks at 30, 40, 55 and 90 those inside of 40 to 80 count, once each; 40 is a budget already."""
    assert between([90, 55, 40, 55, 30], (40, 60, 80)) == (55,)


def test_points_that_do_not_fit_say_so() -> None:
    """By peak; what is out of memory on the GPU is told apart."""
    curve, others = points([plan(100, 950, fits=False), plan(50, 1100)])
    assert [(p.peak_gib, p.fits) for p in curve] == [(50.0, True), (100.0, False)]
    assert {p.name: p.fits for p in others} == {"none": False, "full": True}
    assert curve[1].text.endswith("out of memory on this GPU")


def test_curves_are_drawn(tmp_path: Path) -> None:
    """A page and a picture, with the policies named."""
    plans = [plan(100, 950, fits=False), plan(50, 1100)]
    pareto_html(tmp_path / "p.html", plans)
    pareto_png(tmp_path / "p.png", plans)
    page = (tmp_path / "p.html").read_text()
    assert "none, out of memory on this GPU" in page and "AutoSAC (hollow: out of memory on this GPU)" in page
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
