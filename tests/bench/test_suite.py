"""Suites and policies: what a file says, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autosac.bench import suite as suites
from autosac.bench.policies import Policy
from autosac.bench.subjects import titan_job
from autosac.bench.suite import load_suite, make_step_of
from autosac.cli.parser import main
from autosac.errors import UsageError

Write = Callable[..., Path]
TABLE_5_5 = Path(__file__).parents[2] / "benchmarks" / "table_5_5" / "suite.toml"


def test_a_suite_is_read(write_suite: Write) -> None:
    """Models, configurations with their arguments, budgets in bytes and policies come from the file."""
    suite = load_suite(write_suite(budgets=["6MiB", "50%"], policies=["none", "selective-3", "ilp"]))
    (model,) = suite.models
    assert model.make_step == "net.py:make_step"
    assert [(c.name, c.arguments) for c in model.configurations] == [
        ("C1", (("tokens", 512),)),
        ("C2", (("tokens", 1024),)),
    ]
    assert suite.budgets_bytes() == (6 * 2**20, suite.target.hardware.usable_bytes // 2)
    assert [policy.name for policy in suite.policies] == ["none", "selective-3", "ilp"]


def test_a_suite_is_cut_down(write_suite: Write) -> None:
    """Picking a configuration leaves the others out; an unknown one is refused with the names that there are."""
    suite = load_suite(write_suite())
    assert [c.name for c in suite.pick(configurations=["C2"]).models[0].configurations] == ["C2"]
    with pytest.raises(UsageError, match="no configuration 'C3': the suite has C1, C2"):
        suite.pick(configurations=["C3"])
    with pytest.raises(UsageError, match="no model 'mesh': the suite has net"):
        suite.pick(models=["mesh"])


def test_the_configurations_of_table_5_5() -> None:
    """The shipped suite has the eight configurations with the paper's batch sizes, lengths and image sizes, and 68 GiB."""
    suite = load_suite(TABLE_5_5)
    rows = {
        (model.name, c.name): tuple(dict(c.arguments).get(key) for key in ("batch_size", "seq_len", "image_size"))
        for model in suite.models
        for c in model.configurations
    }
    assert rows == {
        ("Stable Diffusion", "C1"): (80, None, 512),
        ("Stable Diffusion", "C2"): (64, None, 512),
        ("Stable Diffusion", "C3"): (192, None, 256),
        ("Stable Diffusion", "C4"): (160, None, 256),
        ("Llama-3.2-1B", "C1"): (6, 4096, None),
        ("Llama-3.2-1B", "C2"): (10, 2048, None),
        ("Llama-3.2-1B", "C3"): (16, 1024, None),
        ("Llama-3.2-1B", "C4"): (12, 1024, None),
    }
    assert suite.budgets_bytes() == (68 * 2**30,)
    assert suite.case_budgets_bytes() == (40 * 10**9, 45 * 10**9, 50 * 10**9)


def test_torchtitan_arguments(tmp_path: Path) -> None:
    """A configuration's keys become TorchTitan's arguments; booleans its pairs of switches."""
    (tmp_path / "job.toml").write_text("")
    (tmp_path / "suite.toml").write_text(
        'policies = ["none"]\n[[models]]\nname = "m"\njob = "job.toml"\nworld_size = 8\n'
        'configurations = [{ name = "c", "training.seq_len" = 128, "compile.enable" = true, "metrics.enable_wandb" = false }]'
    )
    suite = load_suite(tmp_path / "suite.toml")
    job = titan_job(suite, suite.models[0], suite.models[0].configurations[0], lambda _: None)
    assert job.overrides == ("--training.seq_len", "128", "--compile.enable", "--metrics.no-enable_wandb")
    assert job.world_size == 8


@pytest.mark.parametrize(
    "name",
    [
        "none",
        "full",
        "selective-1",
        "selective-12",
        "selective-op",
        "memory-budget-0.5",
        "joint",
        "full+early-stop",
        "selective-2+early-stop",
    ],
)
def test_known_policies(name: str) -> None:
    """A policy is known by its name."""
    assert Policy(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "None",
        "selective-0",
        "selective",
        "memory-budget-1.5",
        "memory-budget",
        "cplex",
        "none+early-stop",
        "ilp+early-stop",
        "+early-stop",
    ],
)
def test_unknown_policies(name: str) -> None:
    """Any other name is refused, with the names that there are."""
    with pytest.raises(UsageError, match=r"unknown policy .*selective-N \(N >= 1\).*joint"):
        Policy(name)


def test_functions_are_imported_from_files_and_modules(tmp_path: Path) -> None:
    """make_step may be in a file beside the suite or in an importable module; arguments are bound."""
    (tmp_path / "mine.py").write_text("def make_step(device, *, n):\n    return device, n\n")
    assert make_step_of(tmp_path, "mine.py:make_step", {"n": 3})("cpu") == ("cpu", 3)
    assert make_step_of(tmp_path, "operator:add", {}).func(2, 3) == 5
    for wrong in ("mine.py:other", "no_such_module_here:f", "missing.py:f"):
        with pytest.raises(UsageError, match="cannot be imported"):
            make_step_of(tmp_path, wrong, {})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"budgets": ["6MiB", "6144KiB"]}, "the budget 6144KiB is given twice"),
        ({"budgets": []}, "has no budget"),
        ({"budgets": ["lots"]}, "expected an amount"),
        ({"policies": []}, "has no policies"),
        ({"policies": ["none", "none"]}, "the policy 'none' is given twice"),
        ({"policies": ["magic"]}, "unknown policy 'magic'"),
        ({"policies": ["memory-budget-0.5"]}, "'net' is an eager model"),
        ({"policies": ["full+early-stop"]}, "the policy full+early-stop is for TorchTitan jobs"),
        ({"more": "time_limit_s = 0"}, "time limit must be more than zero"),
        ({"more": 'time_limit_s = "long"'}, "time_limit_s is 'long': expected a finite number"),
        ({"more": 'milp = "gurobi"'}, "unknown MILP solver 'gurobi': choose one of cbc, highs"),
        ({"more": "colour = 3"}, "colour is not a known key"),
        ({"more": "utilisation = 2"}, "at most 1"),
        ({"more": '[case_study]\nmodel = "net"'}, "case_study.configuration is missing"),
        (
            {"more": '[case_study]\nmodel = "net"\nconfiguration = "C9"\nmodule = "m"\nbudgets = ["1GiB"]'},
            "no configuration of net 'C9'",
        ),
    ],
)
def test_bad_suites(
    write_suite: Write, capfd: pytest.CaptureFixture[str], change: dict[str, object], text: str
) -> None:
    """What is wrong with a suite is said on one line before anything is captured, with exit code 2."""
    path = write_suite(**change)
    assert main(["bench", str(path), "-o", str(path.parent / "out")]) == 2
    error = capfd.readouterr().err
    assert text in error and error.count("\n") == 1
    assert not (path.parent / "out").exists()


def test_a_suite_without_models(tmp_path: Path) -> None:
    """An empty model list is refused."""
    (tmp_path / "suite.toml").write_text('models = []\npolicies = ["none"]')
    with pytest.raises(UsageError, match="the suite 'suite' has no models"):
        load_suite(tmp_path / "suite.toml")


def test_a_solver_that_is_not_installed(write_suite: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known back end that is not there is refused when the suite is read, not after the captures."""

    def missing(name: str) -> None:
        raise UsageError(f"the MILP solver {name!r} is not installed (pip install highspy)")

    monkeypatch.setattr(suites, "make_backend", missing)
    with pytest.raises(UsageError, match="'highs' is not installed"):
        load_suite(write_suite(policies=["ilp"], more='milp = "highs"'))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--time-limit", "0"), "time limit must be more than zero"),
        (("--policies", "magic"), "unknown policy 'magic'"),
        (("--budgets", "1GiB,1GiB"), "given twice"),
        (("--budgets", ","), "none of them empty"),
        (("--models", "mesh"), "no model 'mesh'"),
        (("--measure", "--steps", "0"), "is not a whole number from 1 to"),
        (("--docs", "no/such/folder/bench.md"), "there is no folder"),
    ],
)
def test_bad_options(
    write_suite: Write, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    """Options that make no sense are refused on one line before anything is captured."""
    path = write_suite()
    assert main(["bench", str(path), "-o", str(path.parent / "out"), *options]) == 2
    error = capfd.readouterr().err
    assert text in error and error.count("\n") == 1
    assert not (path.parent / "out").exists()


def test_torchtitan_jobs_are_not_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real runs are for eager models; the message says what to do with a job."""
    (tmp_path / "job.toml").write_text("")
    (tmp_path / "suite.toml").write_text(
        'policies = ["none"]\n[[models]]\nname = "m"\njob = "job.toml"\nconfigurations = [{ name = "c" }]'
    )
    assert main(["bench", str(tmp_path / "suite.toml"), "--measure", "--device", "cpu"]) == 2
    assert "run the job with its plan instead" in capfd.readouterr().err
