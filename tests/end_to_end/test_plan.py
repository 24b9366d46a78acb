"""From a TorchTitan job file to a verified plan, and what is done with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autosac.errors import PlanError
from autosac.integrations.apply import apply
from autosac.jobs.titan import STOPPING_EARLY
from autosac.plans import Plan

EXAMPLES = Path(__file__).parents[2] / "examples"
GPU = ("--gpu", "h100-sxm-80gb", "--world-size", "2")
SLOW_GPU = ("--gpu", "a40", "--world-size", "2")  # on which the host does not limit the step of so small a model
WIDE = ("--", "--training.local_batch_size", "128")
Run = Callable[..., Any]


def test_plan_simulate_explain(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """The plan fits its budget and uses it; the job, captured anew under the written plan, gives the figures it states."""
    path = tmp_path / "plan.json"
    ran = autosac("plan", job_file, *SLOW_GPU, "--budget", "1.1GiB", "-o", path)
    assert ran.code == 0, ran.err
    assert "AutoSAC" in ran.out and "selective-op" in ran.out and "\x1b" not in ran.out

    plan = Plan.load(path)
    stated = plan.predictions["autosac"]
    budget = plan.made_for.budget_bytes
    assert stated.peak_reserved_bytes is not None
    assert 0.9 * budget <= stated.peak_reserved_bytes <= budget
    assert plan.predictions["none"].peak_reserved_bytes > budget  # type: ignore[operator]
    assert plan.made_for.job_settings["training.seq_len"] == "2048"
    assert set(plan.predictions) == {"autosac", "none", "full", "selective-op"}

    anew = ("--", "--job.description", "of no captured job")
    simulated = autosac("simulate", job_file, *SLOW_GPU, "--plan", path, "--json", *anew).document
    assert simulated["peak_active_bytes"] == stated.peak_active_bytes
    assert simulated["peak_reserved_bytes"] == stated.peak_reserved_bytes
    assert abs(simulated["step"]["step_ms"] - stated.step_ms) < 1e-6

    explained = autosac("explain", path, "--module", plan.units[0].fqn)
    assert plan.units[0].fqn in explained.out and "recompute" in explained.out
    assert "does not checkpoint the module 'head'" in autosac("explain", path, "--module", "head").err

    other = autosac("simulate", job_file, *SLOW_GPU, "--quiet", "--plan", path, "--", "--training.seq_len", "1024")
    assert other.code == 2
    assert other.err == "autosac: the plan was made for training.seq_len = 2048; this job has 1024\n"


def test_a_budget_that_needs_no_plan(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """Where the step fits without checkpointing, the plan checkpoints nothing."""
    path = tmp_path / "plan.json"
    ran = autosac("plan", job_file, *GPU, "--budget", "90%", "-o", path)
    assert ran.code == 0 and "without any checkpointing" in ran.out
    assert Plan.load(path).units == ()


def test_a_budget_that_cannot_be_met(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """The error says the smallest budget that works; no file is written."""
    path = tmp_path / "plan.json"
    ran = autosac("plan", job_file, *GPU, "--quiet", "--budget", "300MiB", "-o", path)
    assert ran.code == 1 and ran.out == "" and not path.exists()
    assert "the smallest budget found to work is" in ran.err and ran.err.count("\n") == 1


def test_pictures_and_exports(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """Every file that simulate can write is written, and the memory tables are shown."""
    files = {
        "--memory-html": "m.html",
        "--memory-png": "m.png",
        "--trace": "t.json",
        "--save-capture": "c.gz",
        "--memory-snapshot": "s.pickle",
    }
    options = [part for option, name in files.items() for part in (option, tmp_path / name)]
    ran = autosac("simulate", job_file, *GPU, "--ac", "selective-2", "--memory", *options)
    assert ran.code == 0, ran.err
    assert "Ten largest allocations" in ran.out and "optimizer state" in ran.out
    assert all((tmp_path / name).stat().st_size > 1000 for name in files.values())
    assert "What checkpointing would change" in ran.out

    again = autosac("simulate", tmp_path / "c.gz", *GPU, "--json").document
    assert again["job"]["checkpointing"] == "selective-2" and again["verdict"] == "fits"
    refused = autosac("simulate", tmp_path / "c.gz", *GPU, "--ac", "full")
    assert refused.code == 2 and "is a captured step" in refused.err


def test_several_budgets_and_their_differences(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """More memory never means a slower plan; there is one at the peak of each usual policy, no slower than it; each plan is
    written; diff names what changes. (Of a batch that keeps the GPU busy: what a plan costs the host is hidden then.)
    """
    ran = autosac(
        "plan",
        job_file,
        *GPU,
        "--pareto",
        "3",
        "-o",
        tmp_path / "p.json",
        "--json",
        "--pareto-html",
        tmp_path / "p.html",
        "--pareto-png",
        tmp_path / "p.png",
        *WIDE,
    )
    assert ran.code == 0, ran.err
    predictions = [document["predictions"]["autosac"] for document in ran.document]
    others = [other for name, other in ran.document[0]["predictions"].items() if name != "autosac"]
    budgets = {document["made_for"]["budget_bytes"]: document["predictions"]["autosac"] for document in ran.document}
    between = [other for other in others if other["peak_reserved_bytes"] <= max(budgets)]
    assert all(budgets[other["peak_reserved_bytes"]]["step_ms"] <= other["step_ms"] * 1.0001 for other in between)
    assert len(between) >= 2 and len(budgets) == len(predictions) == len({*budgets}) >= 3
    times = [prediction["step_ms"] for prediction in predictions]
    assert times == sorted(times, reverse=True)
    files = sorted(tmp_path.glob("p-*GiB.json"))
    assert len(files) == len(budgets)
    assert (tmp_path / "p.html").stat().st_size > 1000 and (tmp_path / "p.png").stat().st_size > 1000

    assert "the plans are the same" in autosac("diff", files[0], files[0]).out
    differing = autosac("diff", files[0], files[1])
    assert differing.code == 0 and "budget" in differing.out and "layers." in differing.out


def test_budgets_given_twice(autosac: Run, job_file: str) -> None:
    """Two equal budgets are refused, as is a curve without budgets."""
    twice = autosac("plan", job_file, *GPU, "--budgets", "1GiB,1024MiB")
    assert twice.code == 2 and "a budget is given twice" in twice.err
    assert autosac("plan", job_file, *GPU, "--pareto-png", "x.png").code == 2


def test_never_slower_than_what_the_job_offers(autosac: Run, tmp_path: Path) -> None:
    """Llama-3 8B at 76.8 GiB reserved: TorchTitan's selective checkpointing fits, for it the allocator reserves 1 GiB less
    than for plans of the same active peak.
    """
    path = tmp_path / "plan.json"
    job = Path(__file__).parents[2] / "examples" / "llama3_8b.toml"
    ran = autosac("plan", job, "--gpu", "h100-sxm-80gb", "--world-size", "8", "--budget", "76.8GiB", "-o", path)
    assert ran.code == 0, ran.err
    stated = Plan.load(path).predictions
    assert stated["selective-op"].peak_reserved_bytes <= 76.8 * 2**30  # type: ignore[operator]
    assert stated["autosac"].peak_reserved_bytes <= 76.8 * 2**30  # type: ignore[operator]
    fitting = [p for name, p in stated.items() if name in ("full", "selective-op")]
    assert all(stated["autosac"].step_ms <= p.step_ms * (1 + 1e-6) for p in fitting)


def test_offloading_is_asked_for_by_a_flag(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """The plan is made, and what came of offloading is told."""
    plan = tmp_path / "plan.json"
    for gpu, said in (SLOW_GPU, "offload"), (GPU, "no plan that offloads to host memory has a shorter step"):
        ran = autosac("plan", job_file, *gpu, "--budget", "1.1GiB", "--offload", "-o", plan)
        assert ran.code == 0 and said in " ".join(ran.out.split())
    assert plan.exists()


def test_a_compiled_job(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """The observed step is not compiled, those that the plan is verified by and shown beside are: they take what
    `autosac simulate` says of the compiled job, and no host pays for selective checkpointing.
    """
    path, machine = tmp_path / "plan.json", (*GPU, "--budget", "1GiB", "--budget-kind", "active")
    compiling = ("--", "--compile.enable", "--compile.components", "model")
    ran = autosac("plan", job_file, *machine, "-o", path, *compiling)
    assert ran.code == 0, ran.err
    plan = Plan.load(path)
    stated, none = plan.predictions["autosac"], plan.predictions["none"]
    assert plan.units and plan.made_for.job_settings["compile.enable"] == "True"
    assert stated.peak_active_bytes <= 2**30 < none.peak_active_bytes
    assert none.step_ms < stated.step_ms < plan.predictions["full"].step_ms
    assert stated.recompute_ms == stated.step_ms - none.step_ms

    def simulated(*arguments: object) -> Any:
        return autosac("simulate", job_file, *GPU, *arguments, "--json", *compiling).document

    assert simulated("--plan", path)["peak_active_bytes"] == stated.peak_active_bytes
    assert simulated("--ac", "none")["step"]["step_ms"] == none.step_ms
    compiled, eager = (
        simulated("--ac", "selective-op"),
        autosac("simulate", job_file, *GPU, "--ac", "selective-op", "--json"),
    )
    assert compiled["step"]["step_ms"] < eager.document["step"]["step_ms"]


def test_the_loss_in_chunks(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """Two GiB of float32 logits become eight chunks; the written plan says so, and simulating the job under it gives the
    figures that it states.
    """
    path = tmp_path / "plan.json"
    budget = ("--budget", "9GiB", "--budget-kind", "active", "--chunk-loss")
    ran = autosac("plan", job_file, *GPU, *budget, "-o", path, *WIDE)
    assert ran.code == 0, ran.err
    plan = Plan.load(path)
    assert plan.settings.loss_chunks == 8 and "chunks of rows" in " ".join(ran.out.split())
    simulated = autosac("simulate", job_file, *GPU, "--plan", path, "--json", *WIDE).document
    assert simulated["peak_active_bytes"] == plan.predictions["autosac"].peak_active_bytes <= plan.made_for.budget_bytes


@pytest.mark.long
def test_the_optimizer_in_slices(autosac: Run, tmp_path: Path) -> None:
    """The square roots of two billion parameters take 7.5 GiB beside 30 of parameters, gradients and states: 34 GiB are enough
    in slices only. Simulating the job under the written plan gives the figures that it states.
    """
    path = tmp_path / "plan.json"
    job = (str(EXAMPLES / "llama3_8b.toml"), "--gpu", "h100-sxm-80gb", "--world-size", "4")
    small = (
        "--",
        "--optimizer.implementation",
        "foreach",
        "--training.local_batch_size",
        "1",
        "--training.seq_len",
        "1024",
    )
    ran = autosac("plan", *job, "--budget", "34GiB", "--budget-kind", "active", "-o", path, *small)
    assert ran.code == 0, ran.err
    plan = Plan.load(path)
    assert plan.settings.optimizer_slice_bytes and "without that no plan would fit" in " ".join(ran.out.split())
    simulated = autosac("simulate", *job, "--plan", path, "--json", *small).document
    assert simulated["peak_active_bytes"] == plan.predictions["autosac"].peak_active_bytes <= 34 * 2**30
    assert simulated["step"]["step_ms"] == plan.predictions["autosac"].step_ms


def test_where_the_loss_is_the_peak_its_option_is_named(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """With everything recomputed the two GiB of logits are the peak: the error names the option, with as many chunks."""
    ran = autosac("plan", job_file, *GPU, "--budget", "2GiB", "-o", tmp_path / "plan.json", *WIDE)
    assert ran.code == 1
    assert "--chunk-loss may compute the loss in 8 chunks, which takes less" in ran.err


def test_no_plan_loses_to_the_jobs_own_full_checkpointing(autosac: Run, job_file: str, tmp_path: Path) -> None:
    """Where the host is the limit (512 tokens of the debug model), that is the plan, stopping early. It is simulated as
    planned, shown, and refused outside of TorchTitan; its peak is the smallest budget that works.
    """
    path, small = tmp_path / "plan.json", ("--", "--training.local_batch_size", "1", "--training.seq_len", "512")
    ran = autosac("plan", job_file, *GPU, "--budget", "172MiB", "-o", path, *small)
    assert ran.code == 0, ran.err
    plan = Plan.load(path)
    stated = plan.predictions["autosac"]
    assert plan.units == () and plan.settings.job_checkpointing == "full" and plan.settings.early_stop
    assert "(early_stop), which saves" in " ".join(ran.out.split())
    assert 0.9 * plan.predictions["full"].step_ms < stated.step_ms < plan.predictions["full"].step_ms
    assert stated.step_ms < 0.7 * plan.predictions["selective-op"].step_ms
    assert "the plan is the job's own full checkpointing" in " ".join(ran.out.split())
    assert "is faster by" not in ran.out

    own = ("--activation_checkpoint.mode", "full", STOPPING_EARLY)
    for words in (("--plan", path, "--json", *small), ("--json", *small, *own)):
        simulated = autosac("simulate", job_file, *GPU, *words).document
        figures = simulated["step"]["step_ms"], simulated["peak_active_bytes"], simulated["peak_reserved_bytes"]
        assert figures == (stated.step_ms, stated.peak_active_bytes, stated.peak_reserved_bytes)
    assert "TorchTitan's own full checkpointing" in autosac("explain", path).out
    assert autosac("explain", path, "--module", "layers.0").err.endswith(
        "which makes no decisions about single modules\n"
    )
    with pytest.raises(PlanError, match="only a TorchTitan job can follow it"):
        apply(nn.Linear(1, 1), plan)

    refused = autosac("plan", job_file, *GPU, "--budget", "171.9MiB", *small)
    assert refused.code == 1 and "the smallest budget found to work is 172.0 MiB" in refused.err


def test_levers_of_a_job_that_does_not_fit(autosac: Run, job_file: str) -> None:
    """No plan fits, but one of half the local batch does: the report says so, and then the error."""
    some = ("--", "--training.local_batch_size", "16")
    ran = autosac("plan", job_file, *GPU, "--budget", "1GiB", "--levers", "quick", "--json", *some)
    assert ran.code == 1 and "no plan meets" in ran.err
    (batch,) = (row for row in ran.document["levers"] if row["prediction"])
    assert ran.document["plan"] is None
    assert batch["how"] == "--training.local_batch_size 8 --training.global_batch_size 32"
    assert batch["prediction"]["peak_reserved_bytes"] <= 2**30


def test_a_job_that_has_all_levers(autosac: Run, job_file: str) -> None:
    """The report says that there is none to try; as JSON they are an empty list."""
    one = ("--", "--training.local_batch_size", "1", "--training.seq_len", "512")
    options = ("--budget", "90%", "--levers", "quick", "--chunk-loss")
    assert "there is no lever to try" in autosac("plan", job_file, *GPU, *options, *one).out
    assert autosac("plan", job_file, *GPU, *options, "--json", *one).document["levers"] == []
