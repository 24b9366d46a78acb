"""The commands about the tool itself: what GPUs and clusters are known, the cache, shell completion."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autosac.capture.process.store import CaptureStore
from autosac.cli.completion import script
from autosac.cli.parser import build_parser, main
from autosac.estimator import known_clusters, known_hardware, load_cluster, load_hardware


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that works prints."""
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_gpus_lists_all_with_their_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    """Every GPU by its whole name, its memory, rates, link and source, within the width."""
    monkeypatch.setenv("COLUMNS", width)
    out = said(capsys, "gpus")
    assert all(name in out for name in known_hardware())
    assert all(len(line) <= int(width) for line in out.splitlines())
    for figure in ("79.1", "3,350", "989", "1,979", "NVLink4", "datasheet"):
        assert figure in out


def test_gpus_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    """By the beginning of its name; what is unknown is wrong usage and names those that are known."""
    out = said(capsys, "gpus", "h200")
    assert "139.81 GiB as CUDA reports it, 141 GiB nominal" in out and "fitted to h200-sxm-141gb" in out
    assert json.loads(said(capsys, "gpus", "h200", "--json"))["mem_bandwidth_gbps"] == 4800.0
    assert main(["gpus", "h300"]) == 2
    assert "h200-sxm-141gb" in capsys.readouterr().err


def test_clusters_lists_all_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Every cluster by its whole name; one with its links."""
    out = said(capsys, "clusters")
    assert all(name in out for name in known_clusters())
    one = said(capsys, "clusters", "hgx-h100")
    assert "450 GB/s per GPU, 0.6 us" in one and "400 GB/s per node, 4 us" in one
    assert len(json.loads(said(capsys, "clusters", "--json"))) == len(known_clusters())


def test_every_profile_says_its_source() -> None:
    """What is listed as known has a source."""
    assert all(load_hardware(name).source for name in known_hardware())
    assert all(load_cluster(name).source for name in known_clusters())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache with two captures of 1 and 2 KiB, and a file that an interrupted writer left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOSAC_CACHE", raising=False)
    folder = tmp_path / "autosac" / "captures"
    store = CaptureStore(folder)
    store.put("a", bytes(1024))
    store.put("b", bytes(2048))
    (folder / ".c.trace.x1y2").write_bytes(b"half")
    return folder


def test_cache_says_where_and_how_much(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two captures, 3 KiB; with AUTOSAC_CACHE=off there is nothing to see, and that is said."""
    assert said(capsys, "cache") == f"{store}: 2 captures, 3.0 KiB of at most 1.00 GiB\n"
    document = json.loads(said(capsys, "cache", "--json"))
    assert document == {"path": str(store), "entries": 2, "bytes": 3072, "limit_bytes": 2**30, "cleared": False}
    monkeypatch.setenv("AUTOSAC_CACHE", "off")
    assert main(["cache"]) == 2
    assert "AUTOSAC_CACHE is off" in capsys.readouterr().err


def test_cache_is_cleared(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Captures and half-written files go, other files stay; a cache that is not there is empty."""
    (store / "notes.txt").write_text("mine")
    assert said(capsys, "cache", "--clear") == f"removed 2 captures, 3.0 KiB from {store}\n"
    assert [path.name for path in store.iterdir()] == ["notes.txt"]
    (store / "notes.txt").unlink()
    store.rmdir()
    assert said(capsys, "cache") == f"{store}: 0 captures, 0 B of at most 1.00 GiB\n"


@pytest.mark.parametrize(
    ("command", "option", "library"),
    [
        ("plan", "--pareto-html", "plotly"),
        ("plan", "--pareto-png", "matplotlib"),
        ("simulate", "--memory-png", "matplotlib"),
    ],
)
def test_pictures_are_refused_before_the_work(
    command: str, option: str, library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without what draws them: one line says what to install, before the job is looked at, which here does not even exist."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([command, "nowhere.toml", "--gpu", "h100-sxm-80gb", option, "p"]) == 2
    said = capsys.readouterr().err
    assert said == f"autosac: {option} needs {library}, which is not installed: pip install 'autosac[pictures]'\n"


def completed(words: list[str], folder: Path) -> set[str]:
    """What bash offers for the last of the words."""
    ask = (
        'eval "$SCRIPT"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '_shtab_autosac autosac "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}" 2>/dev/null; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    child = subprocess.run(
        ["bash", "-c", ask, "bash", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"SCRIPT": script(build_parser(), "bash"), "PATH": "/usr/bin:/bin"},
    )
    return set(child.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path) -> None:
    """Commands, options, choices, files, and the names of GPUs and clusters."""
    (tmp_path / "job.toml").write_text("")
    assert completed(["autosac", "pl"], tmp_path) == {"plan"}
    rtx = {name for name in known_hardware() if name.startswith("rtx")}
    assert {"rtx-2080-ti", "rtx-3090", "rtx-a6000", "rtx-pro-6000"} < rtx
    assert completed(["autosac", "plan", "--gpu", "rtx"], tmp_path) == rtx
    assert completed(["autosac", "simulate", "job.toml", "--cluster", "aws"], tmp_path) == {"aws-p4d", "aws-p5"}
    assert completed(["autosac", "plan", "j"], tmp_path) == {"job.toml"}
    assert completed(["autosac", "plan", "--solver", "k"], tmp_path) == {"knapsack"}
    assert completed(["autosac", "gpus", "l4"], tmp_path) == {"l4", "l40s"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_reads_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    """Zsh finds no error in what is printed for it."""
    text = said(capsys, "completion", "zsh")
    assert subprocess.run(["zsh", "-n"], input=text, text=True).returncode == 0


def test_zsh_knows_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts of zsh and tcsh name every GPU and every cluster."""
    for shell in ("zsh", "tcsh"):
        words = set(re.findall(r"[\w-]+", said(capsys, "completion", shell)))
        assert {*known_hardware(), *known_clusters()} <= words


def test_tcsh_knows_which_names(capsys: pytest.CaptureFixture[str]) -> None:
    """GPUs where a GPU is named, clusters where a cluster is."""
    text = said(capsys, "completion", "tcsh")
    for option, names in (("--gpu", known_hardware()), ("--cluster", known_clusters())):
        assert f"'c/{option}=/{' '.join(names)}/'" in text
    for command, names in (("gpus", known_hardware()), ("clusters", known_clusters())):
        assert f"'n/{command}/{' '.join(names)}/'" in text


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_mistake(closed: str, tmp_path: Path) -> None:
    """The shell has closed standard streams: the command works, and what it writes holds nothing that was printed."""
    output = tmp_path / "completion"
    words = f'"{sys.executable}" -m autosac gpus {closed}; "{sys.executable}" -m autosac completion bash > "{output}"'
    ran = subprocess.run(["sh", "-c", f"set -e; {words}"], stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert output.read_text() == script(build_parser(), "bash") + "\n"
