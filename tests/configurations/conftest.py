"""What tests of searches share."""

from __future__ import annotations

from pathlib import Path

import pytest
from searches import JOB


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `searches.JOB`."""
    path = tmp_path_factory.mktemp("search") / "job.toml"
    path.write_text(JOB)
    return path
