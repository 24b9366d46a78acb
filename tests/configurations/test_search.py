"""Searches of TorchTitan's debug model on two GPUs: bounds against simulations, the best against all, ends of every kind."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from searches import BUDGET, SIZE, TINY, inputs

from autosac.capture.process.server import CaptureServer
from autosac.cli.parser import main
from autosac.configurations.bounds.beside import own_parameters
from autosac.configurations.bounds.bounds import memory_bound_bytes
from autosac.configurations.bounds.hosts import NO_HOST
from autosac.configurations.bounds.sheets import Sheet
from autosac.configurations.evaluating.evaluations import LayoutTask, PlanTask, SheetTask
from autosac.configurations.evaluating.workers import ThreadWorker
from autosac.configurations.found.results import SearchResult
from autosac.configurations.running.engine import PendingWork, Value
from autosac.configurations.running.jobs import check_space
from autosac.configurations.running.search import TitanSearch
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.offers import Offer
from autosac.configurations.space.space import Space
from autosac.errors import CaptureError, UsageError
from autosac.jobs.tasks import TitanJob, simulate_in
from autosac.plans import Plan
from autosac.report.search_files import completed_search


@pytest.fixture(scope="module", autouse=True)
def _shared(module_shares_captures: None) -> None:
    """Searches capture in processes that are there already, and what has not been captured yet."""


@pytest.fixture(scope="module", autouse=True)
def known(job: Path) -> Iterator[dict[Any, dict[str, Any]]]:
    """Evaluations of this module by what they are of: equal ones are made once."""
    answers: dict[Any, dict[str, Any]] = {}
    patch = pytest.MonkeyPatch()
    for kind in (LayoutTask, PlanTask, SheetTask):
        run = kind.run

        def answered(self: Any, server: CaptureServer, run: Any = run) -> dict[str, Any]:
            key = (
                type(self),
                Path(self.job.config_file).read_text(),
                self.job.overrides,
                getattr(self, "goal", None),
                getattr(self, "checkpointing", None),
                getattr(self, "own_full", None),
                getattr(self, "plan", None),
                self.job.target.gpu,
            )
            if key not in answers:
                answers[key] = run(self, server)
            return answers[key]

        patch.setattr(kind, "run", answered)
    yield answers
    patch.undo()


@pytest.fixture(scope="module")
def study(job: Path) -> Path:
    """Where the search below keeps what it learns."""
    return job.parent / "study"


@pytest.fixture(scope="module")
def everything(job: Path, capture_server: CaptureServer) -> dict[Layout, dict[str, Any]]:
    """The answers for all layouts, without any bound."""
    with searching(inputs(job)) as found:
        return {layout: found.task(layout, math.inf).run(capture_server) for layout in found.layouts}


@pytest.fixture(scope="module")
def search(job: Path, study: Path, everything: dict[Layout, dict[str, Any]]) -> Iterator[TitanSearch]:
    """A search that has run to its end."""
    with searching(inputs(job, study=study)) as found:
        found.run()
        yield found


def fitting_ms(answer: dict[str, Any]) -> float:
    """The best step of a layout that fits."""
    return min((row["step_ms"] for row in answer.get("rows", ()) if row["fits"]), default=math.inf)


def test_the_best_is_that_of_exhaustive_search(search: TitanSearch, everything: dict[Layout, dict[str, Any]]) -> None:
    """Nothing that bounds left out is faster, and the best is proven."""
    result = search.result()
    assert result.proven and result.best is not None
    assert result.best.score == pytest.approx(min(map(fitting_ms, everything.values())), rel=1e-12)
    assert result.counts.bounded + result.counts.evaluated + result.counts.refused == len(search.layouts)


def test_bounds_hold(search: TitanSearch, everything: dict[Layout, dict[str, Any]]) -> None:
    """Both bounds of every layout are no more than its best step, and no more than its step without checkpointing."""
    first = search.first_bounds()
    for layout, answer in everything.items():
        tight = search.sheet_bound(layout)
        assert first[layout] <= fitting_ms(answer)
        assert tight is not None and tight <= fitting_ms(answer)
        assert search.sheet_bound(layout, 79 * 2**30) <= answer["at_least_ms"]


def test_memory_bounds_hold(search: TitanSearch, everything: dict[Layout, dict[str, Any]]) -> None:
    """No way of checkpointing needs less than the memory bound."""
    for layout, answer in everything.items():
        least = min((row["peak_reserved_bytes"] for row in answer["rows"]), default=math.inf)
        assert search.least_bytes(layout) <= least


def test_errors_of_what_computation_hides_lengthen_no_step(everything: dict[Layout, dict[str, Any]]) -> None:
    """The error of collectives is a part of the communication that is exposed."""
    rows = [row for answer in everything.values() for row in answer["rows"]]
    assert any("log-sigmoid" in row["errors_ms"] for row in rows)
    for row in rows:
        assert row["errors_ms"].get("log-sigmoid", 0.0) <= row["parts"]["exposed_communication_ms"] + 1e-9


def test_a_sheet_tells_what_fsdp_does_with_a_layer(search: TitanSearch) -> None:
    """Messages of two bytes a parameter, two of them at once, on streams of their own; the message before a layer's is still
    there as its backward ends; copies take no less than memory allows.
    """
    sheet = search.sheet_of(search.layouts[0])
    assert isinstance(sheet, Sheet)
    known = sheet.sharding
    assert (known.gathers_at_once, known.gradients_apart, known.scatter_waits) == (2, True, True)
    assert known.gathered_bytes == 2 * sheet.layer_parameters
    assert known.gather_ns >= 2 / 3350 and known.scatter_ns >= 1.5 / 3350  # an H100's GB/s


def test_a_finished_search_resumes_without_captures(search: TitanSearch, study: Path, job: Path) -> None:
    """Every question has been answered: the same best, and no evaluation."""
    with searching(inputs(job, study=study, resume=True)) as again:
        result = again.run()
    assert result.counts.captured == 0 and result.counts.reused > 0
    assert result.best == search.result().best


def test_a_space_too_large_to_list_is_sampled(search: TitanSearch, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one layout too many for a list, the sampler finds what the exhaustive search found, and proves nothing."""
    monkeypatch.setattr("autosac.configurations.running.search.MOST_LAYOUTS", len(search.layouts) - 1)
    with searching(inputs(job)) as found:
        result = found.run()
        assert found.sampled and set(found.layouts) == set(search.layouts)
    assert result.best == search.result().best
    assert not result.proven


def test_a_study_is_of_one_job(search: TitanSearch, study: Path, job: Path) -> None:
    """Another budget, another job and a folder without a study are refused with a remedy."""
    with pytest.raises(UsageError, match="belongs to another search: its budget is") as error:
        with searching(inputs(job, study=study, resume=True, budget="10GiB")):
            pass
    assert "give another folder" in str(error.value)
    with pytest.raises(UsageError, match="there is no study"):
        with searching(inputs(job, study=study / "none", resume=True)):
            pass
    with pytest.raises(UsageError, match="holds a study: --resume"):
        with searching(inputs(job, study=study, resume=False)):
            pass


def test_a_worker_that_dies_is_asked_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation's process is lost; the search starts it again and ends as it would have."""
    from concurrent.futures import Future

    from autosac.configurations.evaluating.workers import WorkerLost

    ask, lost = ThreadWorker.submit, []

    def submit(self: ThreadWorker, task: Any) -> Any:
        if not lost:
            lost.append(task)
            future: Future[Any] = Future()
            future.set_exception(WorkerLost("killed"))
            return future
        return ask(self, task)

    monkeypatch.setattr(ThreadWorker, "submit", submit)
    with searching(inputs(job, space=TINY)) as found:
        result = found.run()
    assert lost and result.best is not None and not result.refused


def test_an_evaluation_that_fails_is_no_end(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layout's failure is kept with its reason; the others are searched."""
    run = LayoutTask.run

    def fails(self: LayoutTask, server: CaptureServer) -> dict[str, Any]:
        if "always" in self.job.overrides:
            raise RuntimeError("out of luck")
        return run(self, server)

    monkeypatch.setattr(LayoutTask, "run", fails)
    space = TINY.model_copy(update={"reshard_after_forward": ("always", "never")})
    with searching(inputs(job, space=space)) as found:
        result = found.run()
    assert list(result.failed.values()) == ["RuntimeError: out of luck"]
    assert not result.proven  # nobody knows whether it would have been faster
    assert result.best is not None and result.best.layout.reshard == "never"


def test_the_command_writes_a_job_that_takes_the_step_it_says(
    job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], capture_server: CaptureServer
) -> None:
    """The written job, simulated as it is, has the step time and the peak of the search's best; the page is there."""
    space = tmp_path / "space.toml"
    space.write_text(
        "tensor_parallel = 1\ncontext_parallel = 1\npipeline_parallel = 1\nmicrobatch = 8\ncheckpointing = 'autosac'\n"
        "reshard_after_forward = 'always'\ndata_parallel_replicate = 1\n"
    )
    best, page = tmp_path / "best.toml", tmp_path / "page.html"
    words = ["search", job, "--gpu", "h100-sxm-80gb", "--world-size", 2, "--budget", BUDGET, "--space", space]
    words += ["-o", best, "--html", page, "--study", tmp_path / "study", "--workers", 1, "--json", "--quiet"]
    assert main([*map(str, words), "--", *SIZE]) == 0
    document = json.loads(capfd.readouterr().out)
    row = document["best"]
    assert row["checkpointing"] == "autosac" and row["peak_reserved_bytes"] <= 560 * 2**20
    written = TitanJob.of(str(best), gpu="h100-sxm-80gb", world_size=2)
    simulation, _ = simulate_in(capture_server, written, plan_file=str(tmp_path / "best.plan.json"))
    assert simulation.step_ms == pytest.approx(row["step_ms"])
    assert simulation.peak_reserved_bytes == row["peak_reserved_bytes"]
    with pytest.raises(UsageError, match=f"checkpointed by a plan: give --plan {tmp_path}/best.plan.json, or --ac"):
        simulate_in(capture_server, written)
    assert "Plotly" in page.read_text() and 'plan = "best.plan.json"' in best.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h100-sxm-80gb", "--world-size", "7", "--space", "SPACE"], "no configuration of the space is legal"),
        (["--gpu", "h100-sxm-80gb", "--gpus", "a:1"], "give --gpu with --world-size, or --gpus"),
        (["--gpus", "h100-sxm-80gb"], "expected NAME:COUNT"),
        (
            ["--gpus", "h100-sxm-80gb:2", "--objective", "cost-per-token"],
            "needs the price of one h100-sxm-80gb per hour",
        ),
        (["--gpus", "h100-sxm-80gb:2", "--price", "h200=1"], "there are no such GPUs"),
        (["--gpu", "h100-sxm-80gb", "--space", "none.toml"], "No such file"),
        (["--gpu", "h100-sxm-80gb", "--gap", "2"], "gap 2.0: expected a share"),
        (["--gpu", "h100-sxm-80gb", "--resume", "none"], "there is no study"),
        (["--gpu", "h100-sxm-80gb", "--world-size", "2", "--space", "EXPERTS"], "is not known to have experts"),
        (["--gpu", "h100-sxm-80gb", "-o", "FOLDER/best.toml"], "best.plan.json is a folder"),
        (
            ["--gpu", "h100-sxm-80gb", "--", "--training.seq_lenght", "8"],
            "there is no such setting; perhaps --training.seq_len",
        ),
        (["--gpu", "h100-sxm-80gb", "--", "foo"], "argument foo: expected --section.setting, or a value behind one"),
        (["--gpu", "h100-sxm-80gb", "--", "--model.flavor", "9B"], "unknown flavor '9B' of llama3; it has: debugmodel"),
        (["--gpu", "h100-sxm-80gb", "--", "--model.name", "llama9"], "unknown model 'llama9'; TorchTitan has: "),
        (["--gpu", "h100-sxm-80gb", "--", "--parallelism.tensor_parallel_degree", "2"], "is a knob of the search"),
    ],
)
def test_wrong_input_is_one_line(
    job: Path, words: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each mistake ends before any capture with one line that names the remedy, and exit code 2."""
    space = tmp_path / "space.toml"
    space.write_text("tensor_parallel = [2]\n")
    experts = tmp_path / "experts.toml"
    experts.write_text("expert_parallel = [2]\n")
    (tmp_path / "best.plan.json").mkdir()
    places = {"SPACE": str(space), "EXPERTS": str(experts), "FOLDER/best.toml": str(tmp_path / "best.toml")}
    given = [places.get(word, word) for word in words]
    before, after = (given[: given.index("--")], given[given.index("--") :]) if "--" in given else (given, [])
    study = [] if "--resume" in before else ["--study", str(tmp_path / "study")]
    code = main(["search", str(job), *before, *study, "--quiet", *after])
    complaint = capfd.readouterr().err
    assert code == 2 and message in complaint and complaint.count("\n") == 1
    assert not (tmp_path / "study").exists()  # which the corrected command would be refused for


def test_float8_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space that has it, alone or beside other values, is refused without torchao, and taken with it."""
    with_float8 = Space(float8=(False, True))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs torchao, which is not installed \(pip install torchao\)"):
        check_space(with_float8, None)
    check_space(Space(), None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_space(with_float8, None)


def test_the_search_from_python_does_what_the_command_does(search: TitanSearch, job: Path, tmp_path: Path) -> None:
    """Two kinds of GPUs by cost, with TorchTitan's own arguments: the cheaper one's job is written, and the page."""
    import tomllib

    import autosac

    best, page = tmp_path / "best.toml", tmp_path / "page.html"
    request = autosac.SearchRequest(
        job=str(job),
        offers=[
            autosac.Offer(gpu="h200-sxm-141gb", world_size=2, price=9.0),
            autosac.Offer(gpu="h100-sxm-80gb", world_size=2, price=2.0),
        ],
        objective="cost-per-token",
        space=TINY.model_dump(exclude_none=True),
        overrides=["--training.steps", "7"],
        gap=0.5,
        output=best,
        html=page,
    )
    result = autosac.search(request)
    assert result.best is not None and result.best.offer.gpu == "h100-sxm-80gb"
    assert result.best.measured.checkpointing == "none"
    written = tomllib.loads(best.read_text())
    assert written["training"]["local_batch_size"] == 8 and written["training"]["steps"] == 7
    assert "2 x h100-sxm-80gb" in page.read_text()


def test_ctrl_c_leaves_the_files_of_the_best_so_far(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is interrupted after its end: who is told gets the result, and the job is written."""
    run = TitanSearch.run

    def interrupted(self: TitanSearch) -> SearchResult:
        run(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(TitanSearch, "run", interrupted)
    told: list[tuple[SearchResult, Sequence[Path]]] = []
    request = inputs(job, space=TINY, budget="79GiB", output=tmp_path / "best.toml")
    with pytest.raises(KeyboardInterrupt):
        completed_search(request, interrupted=lambda result, files: told.append((result, files)))
    ((result, files),) = told
    assert result.best is not None and files == [tmp_path / "best.toml"] and files[0].is_file()


def test_each_kind_of_gpu_is_simulated(job: Path) -> None:
    """H100s and dearer H200s, by cost: both take the same step, and the cheaper ones win; told is what a step costs."""
    offers = (
        Offer(gpu="h200-sxm-141gb", world_size=2, price=3.0),
        Offer(gpu="h100-sxm-80gb", world_size=2, price=2.0),
    )
    space = TINY.model_copy(update={"checkpointing": ("none",)})
    told: list[str] = []
    wanted = inputs(job, offers=offers, space=space, budget="85%", objective="cost-per-token", gap=0.5)
    with searching(wanted, told.append) as found:
        asked = [found.workers.submit(found.task(layout, math.inf)).result() for layout in found.layouts]
        result = found.run()
    bounds = [float(found[1]) for text in told if (found := re.search(r"at least ([\d.e-]+) a step", text))]
    assert bounds and all(0 < bound < 1e-3 for bound in bounds)
    assert len(asked) == 2 and not any("refused" in answer for answer in asked)
    assert result.best is not None and result.best.offer.gpu == "h100-sxm-80gb" and not result.refused


def test_what_was_not_tried_says_nothing_of_memory(job: Path, capture_server: CaptureServer) -> None:
    """Full checkpointing that is too slow to be the best is left out, and the answer says so."""
    with searching(inputs(job, space=TINY, budget="300MiB")) as found:
        task = replace(found.task(found.layouts[0], 1e9), least_ms={"full": 2e9})
    answer = task.run(capture_server)
    assert answer["skipped"] == {"full": 2e9} and [row["checkpointing"] for row in answer["rows"]] == ["none"]


def test_a_job_that_cannot_be_planned_for_is_simulated_as_it_runs(
    job: Path, capture_server: CaptureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchTitan's own ways of checkpointing are the same rows; there is no plan, and the reason why is told."""
    space = TINY.model_copy(update={"checkpointing": ("none", "full", "autosac")})
    with searching(inputs(job, space=space, overrides=SIZE)) as found:
        task = replace(found.task(found.layouts[0], math.inf), least_ms={})
    planned = task.run(capture_server)

    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError("no plan beside this")

    monkeypatch.setattr("autosac.configurations.evaluating.evaluations.captures_of", refuse)
    unplanned = replace(task, checkpointing=task.checkpointing[::-1]).run(capture_server)  # `known` has no answer to it
    own = [row for row in planned["rows"] if row["checkpointing"] != "autosac"]
    assert [row["checkpointing"] for row in own] == ["none", "full"] and "plan" in planned
    assert unplanned == {"rows": own, "at_least_ms": own[0]["step_ms"], "unplanned": "no plan beside this"}

    def only_full(*given: Any, checkpointing: str, **more: Any) -> Any:
        return simulate_in(*given, checkpointing=checkpointing, **more) if checkpointing == "full" else refuse()

    monkeypatch.setattr("autosac.configurations.evaluating.evaluations.simulate_in", only_full)
    without = replace(task, checkpointing=("full", "none")).run(capture_server)
    assert without == {"rows": own[1:], "unplanned": "no plan beside this"}


def test_frozen_parameters_have_neither_gradients_nor_states(search: TitanSearch, everything: Any) -> None:
    """The debug model trains all of its parameters; were half of their states missing, bounds would count none of them."""
    layout = next(iter(everything))
    sheet = search.sheet_of(layout)
    assert isinstance(sheet, Sheet)
    sheet = replace(sheet, host=NO_HOST)  # which decides, of so small a model
    assert sheet.trains_everything(2.0) and sheet.states_share == pytest.approx(2.0, 1e-4)
    frozen = replace(sheet, states_share=1.0)
    assert not frozen.trains_everything(2.0) and not replace(sheet, gradients_share=0.9).trains_everything(2.0)
    known, less = (search.bounds.shape(layout, one) for one in (sheet, frozen))
    parameters = own_parameters(layout, known, known.layers, 0)
    assert memory_bound_bytes(layout, less) < memory_bound_bytes(layout, known) - 8 * parameters
    assert memory_bound_bytes(layout, less) > 4 * parameters
    assert 0 < search.bounds.least(layout, less, math.inf) < search.bounds.least(layout, known, math.inf)
    assert search.bounds.first(layout, frozen) < 0.5 * search.bounds.first(layout, sheet)


def test_what_was_left_out_is_asked_for_when_it_may_be_better(job: Path) -> None:
    """Full checkpointing takes 90 ms at least: of no interest beside 80 ms, to be looked at where the plan takes 100."""
    with searching(inputs(job, space=TINY)) as found:
        layout, answer = found.layouts[0], {"rows": [], "skipped": {"full": 90.0}}
        assert found.decided(layout, answer, 80.0, math.inf) == Value(80.0)
        assert found.decided(layout, answer, 100.0, 85.0) == Value(100.0)
        asked = found.decided(layout, answer, 100.0, 95.0)
    assert isinstance(asked, PendingWork) and asked.content.least_ms == {} and asked.content.cutoff_ms == 95.0


def test_a_plan_that_does_not_fit_as_captured_is_made_again(
    job: Path, capture_server: CaptureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that keeps everything does not fit: the evaluation finds one that does, which the search takes in its place."""
    space = TINY.model_copy(update={"checkpointing": ("autosac",)})
    with searching(inputs(job, space=space, overrides=SIZE)) as found:
        (layout,) = found.layouts
        asked = found.task(layout, math.inf)
        derived = Plan.from_bytes(asked.run(capture_server)["plan"].encode())
        nothing = (
            replace(derived, units=(), settings=replace(derived.settings, job_checkpointing="")).to_bytes().decode()
        )
        task = PlanTask(job=asked.job, goal=asked.goal, plan=nothing, own_full=asked.own_full)
        again = task.run(capture_server)
        assert again["row"]["fits"] and Plan.from_bytes(again["plan"].encode()) == derived
        monkeypatch.setattr(PlanTask, "run", lambda self, server: {**again, "plan": "the other one"})
        result = found.run()
    assert result.best is not None and result.plans[result.best.plan_key] == "the other one"


def test_a_plan_that_cannot_be_captured_is_not_the_best(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was derived, and nothing else fits: there is no best, nothing is proven, and the reason is told."""
    space = TINY.model_copy(update={"checkpointing": ("autosac",)})
    monkeypatch.setattr(PlanTask, "run", lambda self, server: {"refused": "no such operator"})
    with searching(inputs(job, space=space)) as found:
        result = found.run()
    assert result.best is None and not result.proven
    assert list(result.failed.values()) == ["its step cannot be captured under the plan: no such operator"]


def test_steps_without_a_plan_are_told_once(job: Path) -> None:
    """With and without offloading by plans, the step without a plan is one row, of the layout without."""
    space = TINY.model_copy(update={"activation_offload": (False, True), "checkpointing": ("none", "autosac")})
    with searching(inputs(job, space=space, budget="79GiB")) as found:
        answers = [found.workers.submit(found.task(layout, math.inf)).result() for layout in found.layouts]
        for layout, answer in zip(found.layouts, answers, strict=True):
            found.noted(layout, "key", answer)
        rows = found.result().rows
    assert len(answers) == 2 and [row.name for row in rows] == ["fsdp 2, batch 8 x 1, none"]


def test_products_may_be_as_narrow_as_the_jobs_converters_make_them(job: Path) -> None:
    """With float8 of the job's own, the first bound counts products at twice the rate."""
    arithmetic = []
    for words in ((), ("quantize.linear.float8",), ("quantize.linear.mx",)):
        overrides = tuple(word for one in words for word in ("--model.converters", one))
        with searching(inputs(job, space=TINY, overrides=overrides)) as found:
            layout = found.layouts[0]
            arithmetic.append(found.bounds.fastest_arithmetic(layout))
            assert found.bounds.fastest_arithmetic(replace(layout, float8=True)) == arithmetic[-1] or not words
    assert arithmetic == ["bfloat16", "float8", "float4"]


def test_what_only_plans_do_is_not_tried_where_none_is_needed(job: Path) -> None:
    """The step without a plan fits, and no plan shortens it: layouts that let plans do more are ruled out by it."""
    changes = {"activation_offload": (False, True), "chunk_loss": (False, True), "checkpointing": ("none", "autosac")}
    with searching(inputs(job, space=TINY.model_copy(update=changes), budget="79GiB", gap=0.0)) as found:
        result = found.run()
        assert result.best is not None and result.proven
        assert (result.counts.legal, result.counts.evaluated, result.counts.bounded) == (4, 1, 3)
        plain = result.best.layout
        assert plain == plain.without_plans and set(found.outcome.pruned.values()) == {result.best.score}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_what_was_found_is_told_where_its_file_cannot_be_written(job: Path) -> None:
    """A full disk ends the command with its reason, after the best has been told."""
    told: list[SearchResult] = []
    request = inputs(job, space=TINY, budget="85%", output="/dev/full")
    with pytest.raises(OSError, match="No space left"):
        completed_search(request, interrupted=lambda result, _: told.append(result))
    assert [result.best is not None for result in told] == [True]
