"""Bad input ends with one line on standard error, the right exit code, no traceback and no half-written file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPU = ("--gpu", "h100-sxm-80gb")
Run = Callable[..., Any]


def complaint(ran: Any, code: int) -> str:
    """The one line that a failed command printed."""
    assert ran.code == code and ran.out == ""
    assert ran.err.startswith("autosac: ") and ran.err.count("\n") == 1 and "Traceback" not in ran.err
    return str(ran.err)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bogus",), "invalid choice"),
        ((), "required"),
        (("plan", "missing.toml", *GPU), "missing.toml: there is no such file"),
        (("plan", "{job}", "--gpu", "h1000"), "unknown GPU 'h1000'"),
        (("plan", "{job}", *GPU, "--budget", "lots"), "budget 'lots': expected an amount"),
        (("plan", "{job}", *GPU, "--budget", "12"), "say the unit"),
        (("plan", "{job}", *GPU, "--budget", "0GiB"), "more than zero"),
        (("plan", "{job}", *GPU, "--budget=-3GiB"), "more than zero"),
        (("plan", "{job}", *GPU, "--budget", "130%"), "more than the whole GPU"),
        (("plan", "{job}", *GPU, "--budget", "5 furlongs"), "unknown unit 'furlongs'"),
        (("plan", "{job}", *GPU, "--world-size", "none"), "not a whole number"),
        (("plan", "{job}", *GPU, "--solver", "magic"), "invalid choice: 'magic'"),
        (("plan", "{job}", *GPU, "--time-limit", "0"), "time limit must be more than zero"),
        (("plan", "{job}", *GPU, "--time-limit", "nan"), "time limit must be more than zero"),
        (("plan", "{job}", *GPU, "--gap", "1"), "the gap must be at least 0 and less than 1, not 1.0"),
        (("plan", "{job}", *GPU, "--milp", "magic"), "invalid choice: 'magic'"),
        (("plan", "{job}", *GPU, "--budgets", "1GiB,1024MiB"), "a budget is given twice"),
        (("plan", "{job}", *GPU, "--budgets", "1GiB,"), "budget ''"),
        (("plan", "{job}", *GPU, "--budgets", "1GiB", "--pareto", "3"), "give --budgets or --pareto, not both"),
        (("plan", "{job}", *GPU, "--alloc-conf", "nonsense"), "nonsense"),
        (("plan", "{job}", *GPU, "--cluster", "moon"), "moon"),
        (("plan", "{job}", *GPU, "--rank", "4", "--world-size", "2"), "rank 4 is not within a world of 2"),
        (("plan", "{job}", *GPU, "-o", "{tmp}/no/plan.json"), "there is no folder"),
        (("plan", "{job}", *GPU, "-o", "{tmp}"), "is a folder"),
        (("simulate", "{job}", *GPU, "--ac", "some"), "expected none, full, selective-op or selective-N"),
        (("simulate", "{job}", *GPU, "--plan", "{tmp}/none.json"), "cannot read the plan"),
        (("explain", "{tmp}/none.json"), "cannot read the plan"),
        (("explain", "{job}"), "is not an AutoSAC plan"),
    ],
)
def test_refused_before_any_capture(
    autosac: Run, job_file: str, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    """What is wrong by itself is refused at once, with exit code 2."""
    filled = [argument.format(job=job_file, tmp=tmp_path) for argument in arguments]
    assert text in complaint(autosac(*filled), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml"]


def test_a_solver_that_is_not_installed(autosac: Run, job_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing back end is named before anything is captured, with how to get it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = autosac("plan", job_file, *GPU, "--milp", "highs")
    assert complaint(ran, 2) == "autosac: the MILP solver 'highs' is not installed (pip install highspy)\n"


@pytest.mark.parametrize(
    ("overrides", "code", "text"),
    [
        (("--model.name", "llama9"), 2, "unknown model 'llama9'"),
        (("--model.flavor", "9B"), 2, "unknown flavor '9B' of llama3; it has: debugmodel"),
        (
            ("--model.converters", "float9"),
            2,
            "unknown converter 'float9'; TorchTitan has: quantize.grouped_mm.float8, ",
        ),
        (("--training.no_such", "1"), 2, "argument --training.no_such: there is no such setting; [training] has "),
        (("--optimizer.name", "Magic"), 1, "Optimizer Magic"),
        (("--training.seq_len", "128", "more"), 2, "argument more: expected --section.setting, or a value behind one"),
    ],
)
def test_refused_by_torchtitan(autosac: Run, job_file: str, overrides: tuple[str, ...], code: int, text: str) -> None:
    """What TorchTitan refuses ends with its own words, once."""
    ran = autosac("simulate", job_file, *GPU, "--quiet", "--world-size", "8", "--", *overrides)
    assert text in complaint(ran, code)


def test_malformed_job_file(autosac: Run, tmp_path: Path) -> None:
    """A job file that is no TOML is refused with the place of the error."""
    path = tmp_path / "broken.toml"
    path.write_text("[model\nname = ")
    assert "is not valid TOML" in complaint(autosac("simulate", path, *GPU), 2)
