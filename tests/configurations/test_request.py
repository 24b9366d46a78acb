"""What a search may be asked for, from Python and on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import autosac
from autosac.capture.processors import available_processors
from autosac.cli import search as command
from autosac.cli.parser import build_parser, main
from autosac.configurations.space.offers import Offer, offers_of
from autosac.configurations.space.request import SearchRequest
from autosac.configurations.space.space import Space
from autosac.errors import UsageError

H100 = Offer(gpu="h100-sxm-80gb", world_size=8)


def asked(*words: str) -> SearchRequest:
    """What the command asks for."""
    arguments = build_parser().parse_args(["search", "jobs/llama.toml", *words])
    arguments.overrides = ()
    return command.requested(arguments)


def test_what_the_command_leaves_out_is_as_in_python() -> None:
    """Without options, the request has the defaults of a request, but for the study and the processes."""
    own = {"study": Path("llama.search"), "resume": False, "workers": available_processors()}
    assert asked("--gpu", "h100-sxm-80gb", "--world-size", "8") == SearchRequest(
        job="jobs/llama.toml", offers=(H100,), **own
    )


def test_as_many_processes_as_processors_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use one of a machine's processors (taskset, a container) evaluates in one process."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3}, raising=False)
    assert asked("--gpu", "h100-sxm-80gb").workers == 1


def test_what_the_command_says_is_in_the_request(tmp_path: Path) -> None:
    """Every option arrives."""
    space = tmp_path / "space.toml"
    space.write_text("microbatch = 4\n")
    words = "--gpus h100-sxm-80gb:8,h200-sxm-141gb:4 --price h100-sxm-80gb=2 --price h200-sxm-141gb=3"
    words += f" --space {space} --global-batch 64 --objective cost-per-token --budget 60GiB --confidence 0.99 --gap 0"
    words += " --resume old --workers 3 --ray auto --no-cache -o best.toml --html page.html"
    assert asked(*words.split()) == SearchRequest(
        job="jobs/llama.toml",
        offers=(Offer(gpu="h100-sxm-80gb", world_size=8, price=2), Offer(gpu="h200-sxm-141gb", world_size=4, price=3)),
        space=Space(microbatch=(4,)),
        global_batch=64,
        objective="cost-per-token",
        budget="60GiB",
        confidence=0.99,
        gap=0.0,
        study=Path("old"),
        resume=True,
        workers=3,
        ray="auto",
        use_cache=False,
        output=Path("best.toml"),
        html=Path("page.html"),
    )


def test_help_tells_the_requests_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """What the help says of defaults is what a request has."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["search", "--help"])
    words = re.sub(r"-\s+", "-", " ".join(capsys.readouterr().out.split()))
    default = SearchRequest(job="", offers=(H100,))
    for value in (default.budget, default.gap, default.objective):
        assert f"(default {value}" in words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offers": ()}, "offers: name the GPUs"),
        ({"offers": (H100, Offer(gpu="h100-sxm-80gb", world_size=4))}, "h100-sxm-80gb is offered twice"),
        ({"objective": "cost-per-token"}, "needs the price of one h100-sxm-80gb per hour"),
        ({"gap": 1.0}, "gap 1.0: expected a share"),
        ({"global_batch": 0}, "global_batch 0: expected 1 or more"),
        ({"workers": -1}, "workers -1: expected 0 or more"),
        ({"resume": True}, "resume: name the study's folder"),
        ({"space": {"tensor": [1]}}, "space: there is no knob 'tensor'"),
        ({"space": {"microbatch": [0]}}, r"space: microbatch is 0: expected 1 or more"),
    ],
)
def test_a_request_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    """Each mistake is told where the request is made, before anything is captured."""
    with pytest.raises(UsageError, match=re.escape(message)):
        SearchRequest(**{"job": "job.toml", "offers": (H100,), **changes})


@pytest.mark.parametrize(("world_size", "price"), [(0, 1.0), (8, -1.0), (8, float("nan"))])
def test_an_offer_that_cannot_be(world_size: int, price: float) -> None:
    """No GPUs, and prices below zero or that are no numbers."""
    with pytest.raises(UsageError, match="expected"):
        Offer(gpu="h100-sxm-80gb", world_size=world_size, price=price)


def test_a_job_alone_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`autosac.search` of a path takes GPUs of one kind, or offers, and all other values of a request."""
    asked: list[SearchRequest] = []
    monkeypatch.setattr(
        "autosac.report.search_files.completed_search", lambda request, **_: (asked.append(request), [])
    )
    autosac.search("job.toml", gpu="h100-sxm-80gb", world_size=8, budget="70GiB")
    autosac.search(Path("job.toml"), offers=[H100], progress=print)
    assert asked == [
        SearchRequest(job="job.toml", offers=(H100,), budget="70GiB"),
        SearchRequest(job="job.toml", offers=[H100]),
    ]


@pytest.mark.parametrize("gpus", [{}, {"gpu": "h100-sxm-80gb"}, {"world_size": 8}, {"gpu": "a", "offers": [H100]}])
def test_a_job_alone_does_not_say_what_to_search(gpus: dict[str, Any]) -> None:
    """GPUs are named once: by name and number, or as offers."""
    with pytest.raises(UsageError, match=r"give either gpu and world_size.*, or offers"):
        autosac.search("job.toml", **gpus)
    with pytest.raises(UsageError, match="neither a SearchRequest, nor a job, nor a function"):
        autosac.search(3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[model", "is not valid TOML: Expected ']'"),
        (b"\xff\xfe", "is not valid TOML: it is not UTF-8 text"),
        (b"", "is empty: it needs at least a section [model]"),
    ],
)
def test_a_job_file_that_cannot_be_read_is_one_line(
    content: bytes, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Damaged and empty job files end the search before it begins, without a study."""
    job = tmp_path / "job.toml"
    job.write_bytes(content)
    words = ["search", str(job), "--gpu", "h100-sxm-80gb", "--study", str(tmp_path / "study"), "--quiet"]
    assert main(words) == 2
    complaint = capfd.readouterr().err
    assert complaint.startswith(f"autosac: job file {job} {message}") and complaint.count("\n") == 1
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("output", ["space.toml", "gpu.toml", "/", "."])
def test_no_input_is_overwritten(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither the space nor a profile of the GPU, and a folder is no file for the best job."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    Path("space.toml").write_text("microbatch = 8\n")
    Path("gpu.toml").write_text("")
    command = ["search", "job.toml", "--gpu", "gpu.toml", "--world-size", "2", "--space", "space.toml", "-o", output]
    assert main(command) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and ("is also an input" in said or "is a folder" in said)


def test_a_price_is_given_once() -> None:
    """The last of two would hide a mistake."""
    with pytest.raises(UsageError, match="--price: h100-sxm-80gb is given twice"):
        offers_of("h100-sxm-80gb:2", ["h100-sxm-80gb=1", "h100-sxm-80gb=2"])
