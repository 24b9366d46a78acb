"""Scripts are run as users run them, in processes of their own; the library that stands for CUDA is built once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from warm_scripts import Pool

from autosac.cli.parser import main
from autosac.scripts import launch, template

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for this session's scripts."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def _prepared() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def command(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``command(source, *options, arguments=())``: arguments that run this source on an H100, in a folder of its own."""
    monkeypatch.setenv("AUTOSAC_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def words(source: str, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
        Path("train.py").write_text(source)
        rest = ["--", *arguments] if arguments else []
        return ["run", "train.py", "--gpu", "h100-sxm-80gb", *options, *rest]

    return words


@pytest.fixture
def run_alone(command: Callable[..., list[str]]) -> Run:
    """What `autosac run` prints, as a command of its own with processes of its own."""

    def call(*words: str, **arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autosac", *command(*words, **arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return call


@pytest.fixture
def warm(cache: Path, _prepared: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run in processes that are forked from one that has imported PyTorch."""
    monkeypatch.setenv("AUTOSAC_CACHE", str(cache))
    for module in (launch, template):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": _prepared.popen}))


@pytest.fixture
def autosac(warm: None, capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A command, in this process; for its scripts see `warm`."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(list(words))
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return call


@pytest.fixture
def run(command: Callable[..., list[str]], autosac: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    """As `run_alone`, without its processes: see `autosac`."""
    return lambda *words, **arguments: autosac(*command(*words, **arguments))
