"""What pages and pictures show, pinned: memory over a step, trade-off curves, `autosac bench`, `autosac search`.

See `test_stored_step` for how to write the expectations anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pictures import Pictures, plotly_figures, without_figures
from pinned import check, digest, lines_of

from autosac.bench.case_study import BudgetChoice, CaseResult, ModuleChoice, OperatorRow
from autosac.bench.figures import Figure, Series
from autosac.bench.report import markdown, picture, write_document, write_report
from autosac.bench.results import MeasuredRun as MeasuredStep
from autosac.bench.results import PolicyRow as BenchRow
from autosac.bench.results import Results
from autosac.bench.solver_times import SolverTiming
from autosac.configurations.evaluating.evaluations import PredictedStep
from autosac.configurations.found.results import ConfigurationRow, Counts, SearchResult
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Offer
from autosac.errors import UsageError
from autosac.plans import MadeFor, Plan, Prediction
from autosac.report.memory_pictures import draw_memory
from autosac.report.pareto import pareto_html, pareto_png
from autosac.report.search_pictures import search_html
from autosac.report.search_tables import search_document, search_summary
from autosac.report.summaries import console
from autosac.simulation import Target, simulation_of
from autosac.trace import Trace
from plans import LLAMA_8B, prediction

FOLDER = Path(__file__).parent
GIB = 2**30


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What matplotlib draws from now on."""
    return Pictures(monkeypatch).drawn


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of one width."""
    monkeypatch.setenv("COLUMNS", "150")


def shortened(value: Any) -> Any:
    """Long lists of numbers as their hashes."""
    if isinstance(value, dict):
        return {key: shortened(of) for key, of in value.items()}
    if isinstance(value, list):
        return digest(value) if len(json.dumps(value)) > 600 and not _has_tables(value) else [*map(shortened, value)]
    return value


def _has_tables(value: list[Any]) -> bool:
    return any(isinstance(of, dict) or (isinstance(of, list) and _has_tables(of)) for of in value)


@pytest.mark.parametrize(("name", "budget_gib", "kind"), [("observed", 0.5, "active"), ("outer", 60, "reserved")])
def test_memory_over_a_step(name: str, budget_gib: float, kind: Any, drawn: list[Any], tmp_path: Path) -> None:
    """The page and the picture, with a budget in the picture and one above it."""
    simulation = simulation_of(Trace.load(FOLDER / f"{name}.trace"), Target.of("h100-sxm-80gb", 8))
    html, png = tmp_path / "m.html", tmp_path / "m.png"
    draw_memory(simulation, html=html, png=png, made_for=made_for(int(budget_gib * GIB), kind))
    assert png.read_bytes().startswith(b"\x89PNG")
    found = {"html": plotly_figures(html.read_text()), "png": drawn}
    check(FOLDER / f"memory-{name}.txt", lines_of(shortened(found)))


def made_for(budget_bytes: int, kind: Any) -> MadeFor:
    """A plan's budget."""
    return replace(LLAMA_8B, model="llama3 <8B>", budget_bytes=budget_bytes, budget_kind=kind)


def step(step_ms: float, gib: float, *, fits: bool = True) -> Prediction:
    """A step of this time and peak; what is reserved is 2 GiB more, and without recomputation it would take 800 ms."""
    return prediction(step_ms, gib, more_reserved_gib=2, fits=fits, recompute_ms=step_ms - 800)


@pytest.mark.parametrize("kind", ["active", "reserved"])
def test_trade_off_curves(kind: Any, drawn: list[Any], tmp_path: Path) -> None:
    """Three plans, one of which the GPU has no memory for, beside the usual policies."""
    plans = [
        Plan(
            made_for=made_for(int(gib * GIB), kind),
            units=(),
            predictions={
                "autosac": step(step_ms, gib, fits=gib < 80),
                "none": step(900.0, 120, fits=False),
                "selective-op": step(950.0, 70),
                "full": step(1200.0, 40),
                "mine": step(1100.0, 45),
            },
        )
        for gib, step_ms in ((90.0, 905.0), (50.0, 1000.5), (65.0, 940.0))
    ]
    pareto_html(tmp_path / "p.html", plans)
    pareto_png(tmp_path / "p.png", plans)
    check(
        FOLDER / f"curve-{kind}.txt",
        lines_of({"html": plotly_figures((tmp_path / "p.html").read_text()), "png": drawn}),
    )


# ---- autosac bench --------------------------------------------------------------------------------------------------


def bench_row(policy: str, peak: int, recompute_ms: float, configuration: str = "C1", **more: Any) -> BenchRow:
    """A row with a budget of 10 GiB; full checkpointing recomputes 4 ms."""
    return BenchRow(
        model="net",
        configuration=configuration,
        policy=policy,
        budget_bytes=10 * GIB,
        peak_active_bytes=peak * GIB // 10,
        peak_reserved_bytes=peak * GIB // 8,
        recompute_ms=recompute_ms,
        **{
            "budget_kind": "active",
            "step_ms": 10 + recompute_ms,
            "reference_ms": 10.0,
            "full_recompute_ms": 4.0,
            "fits_gpu": True,
            **more,
        },
    )


def bench_results() -> Results:
    """Two configurations, one with measurements, a policy that failed, and solvers' times."""
    failed = BenchRow(
        model="net", configuration="C2", policy="ilp", budget_bytes=10 * GIB, budget_kind="active", error="no <plan>"
    )
    return Results(
        suite="Tiny & <small>",
        gpu="h100",
        rows=(
            bench_row("none", 120, 0.0, measured=MeasuredStep(step_ms=20.0, peak_active_bytes=12 * GIB)),
            bench_row("full", 50, 4.0, measured=MeasuredStep(step_ms=25.0, peak_active_bytes=5 * GIB)),
            bench_row("selective-2", 80, 2.0),
            bench_row("greedy", 97, 1.2),
            bench_row("ilp", 99, 1.0, measured=MeasuredStep(error="out of memory")),
            bench_row("none", 90, 0.0, "C2"),
            bench_row("full", 40, 4.0, "C2", fits_gpu=False),
            failed,
        ),
        solvers=(
            ("net C1", (SolverTiming("greedy", 0.001, 1.0, 0.02), SolverTiming("ilp", 0.1, 1.0, 0.0))),
            ("net C2", (SolverTiming("greedy", 0.002, 2.0, 0.01),)),
        ),
    )


CASE = CaseResult(
    model="net <1>",
    configuration="C1",
    module="layers.1",
    budgets=(
        BudgetChoice("40GB", 8.0, 40 * GIB, (ModuleChoice("layers.0", 0.9, 4.0), ModuleChoice("layers.1", 0.8, 4.0))),
        BudgetChoice("20GB", 18.0, 20 * GIB, (ModuleChoice("layers.0", 1.0, 9.0),)),
        BudgetChoice("10GB", 0.0, 0, (), "no plan meets 10 GB"),
    ),
    operators=(OperatorRow(0, "pow", 0.1, 64), OperatorRow(1, "mm", 2.5, 2**20)),
    curve=((0.0, 0.0), (0.5, 0.04), (0.7, 0.2), (1.0, 1.0)),
    forward_ms=5.0,
    step_ms=100.0,
    alike=4,
)


@pytest.mark.parametrize("case", [CASE, None], ids=["case", "plain"])
def test_the_report_of_a_bench(case: CaseResult | None, drawn: list[Any], tmp_path: Path) -> None:
    """Its page, tables and pictures, with and without the case study; the page for the documentation."""
    results = (
        bench_results() if case is not None else Results(suite="One", gpu="h100", rows=(bench_row("none", 90, 0.0),))
    )
    written = write_report(tmp_path, results, case)
    write_document(tmp_path / "page.md", results, case, "autosac bench x.toml")
    page = (tmp_path / "results.html").read_text()
    assert page.count("Plotly.newPlot(") == len(drawn)
    found = {"files": sorted(path.name for path in written), "html": plotly_figures(page), "png": drawn}
    texts = [(tmp_path / name).read_text() for name in ("results.csv", "results.md", "page.md")]
    name = "bench-case.txt" if case is not None else "bench-plain.txt"
    check(FOLDER / name, "\n".join([lines_of(found), without_figures(page), *texts]))
    assert markdown(results, case, ()) in texts[2]


@pytest.mark.parametrize(("letters", "rotation"), [(90, 0.0), (91, 30.0)])
def test_long_names_below_bars_are_turned(letters: int, rotation: float, drawn: list[Any]) -> None:
    """More than ninety letters in all; a value that is missing has no height, and the bars of two series share a place."""
    names = ("a" * 45, "b" * (letters - 45))
    series = (Series("one", (1.0, None), "#111111"), Series("two", (2.0, 3.0), "#222222"))
    picture(Figure(key="k", title="t", value_title="v", categories=names, series=series, lines=((2.5, "limit"),)))
    ((axes),) = drawn[-1]
    assert [tick[1:] for tick in axes["ticks"]] == [[rotation, "right" if rotation else "center"]] * 2
    heights = [round(max(y for _, y in corners), 6) for _, corners in axes["bars"]]
    lefts = [round(min(x for x, _ in corners), 6) for _, corners in axes["bars"]]
    assert heights == [1.0, 0.0, 2.0, 3.0] and lefts == [-0.4, 0.6, 0.0, 1.0]


# ---- autosac search -------------------------------------------------------------------------------------------------


def search_row(
    step_ms: float, gib: float, checkpointing: str, price: float, gpu: str = "h100", **knobs: Any
) -> ConfigurationRow:
    """A configuration of 8 GPUs. What computation does not take is shared by the other parts."""
    rest = step_ms - 70
    measured = PredictedStep(
        checkpointing=checkpointing,
        step_ms=step_ms,
        recompute_ms=knobs.pop("recompute_ms", 0.0),
        peak_reserved_bytes=int(gib * GIB),
        fits=gib <= 60,
        tokens_per_second=1e6 / step_ms,
        mfu=40 / step_ms,
        parts={
            "compute_ms": 70.0,
            "exposed_communication_ms": 0.5 * rest,
            "exposed_copy_ms": 0.1 * rest,
            "bubble_ms": 0.3 * rest if "pipeline" in knobs else 0.0,
            "host_bound_ms": 0.1 * rest,
            "recompute_ms": 9.0 if checkpointing != "none" else 0.0,
        },
        errors_ms={"gemm": knobs.pop("gemm_ms", 1.0), "nccl": 0.5},
    )
    layout = Layout(gpu=gpu, **{"shard": 8, "global_batch": 16, **knobs})
    offer = Offer(gpu=gpu, world_size=8, price=price)
    return ConfigurationRow(
        layout=layout, measured=measured, score=step_ms * offer.weight("cost-per-token"), offer=offer
    )


def search_result(rows: Sequence[ConfigurationRow], **more: Any) -> SearchResult:
    """A search that simulated these rows."""
    counts = dict.fromkeys(Counts.__dataclass_fields__, 1) | {"configurations": 4000, "legal": 1203, "bounded": 1200}
    settings = {"counts": Counts(**counts), "objective": "cost-per-token", "gap": 0.01, "proven": True}
    offers = tuple(dict.fromkeys(row.offer for row in rows))
    budgets = {offer.gpu: (60 if offer.gpu == "h100" else 70) * GIB for offer in offers}
    return SearchResult(
        rows=tuple(rows), **{**settings, "budgets_bytes": budgets, "seconds": 12.5, "offers": offers, **more}
    )


def search_rows() -> list[ConfigurationRow]:
    """Of two kinds of GPUs, by price."""
    rows = [
        search_row(100.0, 50, "none", 2.0, tensor=2, shard=4),
        search_row(100.6, 59, "full", 2.0, microbatch=2),
        search_row(110.0, 40, "autosac", 2.0, pipeline=2, shard=4, recompute_ms=25.0),
        search_row(95.0, 70, "none", 2.0, compile=True),
        search_row(99.0, 30, "selective-op", 2.4, gpu="h200", reshard="never"),
        *(search_row(120.0 + i, 45, "none", 2.5, gpu="h200", context=2, shard=4, microbatch=1 + i) for i in range(8)),
    ]
    return sorted(rows, key=lambda row: row.score)


RESULTS = {
    "proven": search_result(search_rows()),
    "alone": search_result(
        search_rows()[1:2], confidence=0.99, closest=(Layout(gpu="h100", tensor=2), 1.05 * search_rows()[1].score)
    ),
    "sampled": search_result(
        search_rows()[:2],
        proven=False,
        sampled=True,
        objective="tokens-per-second",
        refused={Layout(gpu="h100", tensor=3): "3 heads", Layout(gpu="h100", tensor=5): "3 heads"},
    ),
    "failed": search_result(
        [search_row(90.0, 61, "none", 2.0)],
        proven=False,
        counts=Counts(
            configurations=9,
            legal=5,
            bounded=1,
            evaluated=1,
            derived=1,
            confirmed=1,
            captured=1,
            sheets=2,
            refused=0,
            induced=0,
            failed=1,
            reused=2,
        ),
        failed={Layout(gpu="h100", tensor=3): "lost"},
    ),
}


@pytest.mark.parametrize("name", list(RESULTS))
def test_the_report_of_a_search(name: str, tmp_path: Path) -> None:
    """Its page, its tables and its document: proven, sampled, and with nothing that fits."""
    result = RESULTS[name]
    search_html(tmp_path / "s.html", result)
    page = (tmp_path / "s.html").read_text()
    out = console()
    with out.capture() as told:
        out.print(search_summary(result))
    found = {"html": plotly_figures(page), "document": search_document(result)}
    check(FOLDER / f"search-{name}.txt", "\n".join([told.get(), without_figures(page), lines_of(found)]))


def test_no_page_without_rows(tmp_path: Path) -> None:
    """A search that simulated nothing has nothing to draw."""
    with pytest.raises(UsageError, match="there is nothing to draw"):
        search_html(tmp_path / "s.html", search_result(()))


@pytest.mark.parametrize(("budget_gib", "is_drawn"), [(200, True), (201, False)])
def test_a_budget_far_beyond_all_points_is_told(budget_gib: int, is_drawn: bool, tmp_path: Path) -> None:
    """Up to four times the highest peak its line is drawn; farther away it would leave no room for the points."""
    result = search_result([search_row(100.0, 50, "none", 2.0)], budgets_bytes={"h100": budget_gib * GIB})
    search_html(tmp_path / "s.html", result)
    layouts = [figure["layout"] for figure in plotly_figures((tmp_path / "s.html").read_text())]
    (layout,) = [found for found in layouts if "against memory" in str(found.get("title"))]
    assert bool(layout.get("shapes")) == is_drawn
    assert ("budget: 201.0" in str(layout["xaxis"]["title"])) != is_drawn
