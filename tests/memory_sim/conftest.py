"""The builder of small traces, for the tests of memory_sim."""

from __future__ import annotations

import pytest

from traces import TraceBuilder


@pytest.fixture(scope="session")
def builder() -> type[TraceBuilder]:
    """The builder class."""
    return TraceBuilder
