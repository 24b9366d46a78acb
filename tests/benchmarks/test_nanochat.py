"""The program that compares nanochat's training script with its leaderboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosac.errors import UsageError
from benchmarks.nanochat import PUBLISHED, simulated_ms


def test_published_speeds() -> None:
    """524,288 tokens in 655.9 ms: the time of the steps after the tenth by their number."""
    assert 1e3 * 524_288 / PUBLISHED[24] == pytest.approx(655.9, abs=0.05)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    """Before anything is copied or run."""
    with pytest.raises(UsageError, match=r"is no checkout of nanochat at 348fbb3$"):
        simulated_ms(tmp_path, 24)
