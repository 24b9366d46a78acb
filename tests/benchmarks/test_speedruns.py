"""The program that compares speed runs of GPT-2 with the times in their logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autosac.errors import UsageError
from benchmarks.speedruns import Record, make_data, read_record

_BAR = "=" * 100 + "\n"
_LOG = (
    f"{_BAR}print(1)\n{_BAR}Running pytorch 2.5.0+cu124 compiled for CUDA 12.4\n{_BAR}"
    "step:1/2 train_loss:10.9 train_time:900ms step_avg:nanms\n"
    "step:2/2 train_loss:9.9 train_time:1043ms step_avg:143.25ms\n"
    "step:2/2 val_loss:9.9 train_time:1044ms step_avg:141.82ms\n"
)


def test_a_log_has_a_script_a_version_and_times() -> None:
    """The last time counts."""
    assert read_record(_LOG) == Record("print(1)\n", "2.5.0+cu124", 141.82)


@pytest.mark.parametrize(
    "log", [_LOG.replace("pytorch", "jax"), _LOG.replace("step_avg", "avg"), _LOG.replace(_BAR, "")]
)
def test_another_log_is_refused(log: str) -> None:
    """Without a version, times or bars."""
    with pytest.raises(UsageError, match=r"^no log of a speed run"):
        read_record(log)


def test_made_up_tokens_have_the_format_of_llm_c(tmp_path: Path) -> None:
    """256 integers with a magic number, a version and the number of tokens, then as many tokens of 16 bits."""
    make_data(tmp_path)
    files = sorted((tmp_path / "data/fineweb10B").iterdir())
    assert [file.name for file in files] == ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    header = np.frombuffer(files[0].read_bytes()[:1024], dtype=np.int32)
    assert header[:4].tolist() == [20_240_520, 1, 2_200_000, 0]
    assert files[0].stat().st_size == 1024 + 2 * 2_200_000
