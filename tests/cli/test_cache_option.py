"""--no-cache reaches the capture process of every command that captures TorchTitan jobs. None is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autosac.cli.parser import main
from autosac.errors import UsageError

JOB = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'
BATCHES = ("--budget", "1GiB", "--maximize", "tokens-per-second", "--batch-sizes", "1,2")


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "words", [("simulate",), ("plan", "--budget", "1GiB"), ("plan", *BATCHES)], ids=["simulate", "plan", "batch sizes"]
)
def test_captures_are_taken_from_the_cache_or_made(
    words: tuple[str, ...], use_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the cache unless --no-cache is given."""
    asked: list[bool] = []

    def server(**options: Any) -> None:
        asked.append(options["use_cache"])
        raise UsageError("nothing is captured here")

    for module in ("tasks", "batches"):
        monkeypatch.setattr(f"autosac.jobs.{module}.CaptureServer", server)
    (tmp_path / "job.toml").write_text(JOB)
    machine = ("--gpu", "h100-sxm-80gb", "--world-size", "2", "--quiet")
    code = main([words[0], str(tmp_path / "job.toml"), *machine, *words[1:], *["--no-cache"] * (not use_cache)])
    assert (code, asked) == (2, [use_cache])
