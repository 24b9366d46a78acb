"""Measuring collectives, on one real gloo rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autosac.estimator.calibration.collectives import KINDS, measure_collectives

CPU = torch.device("cpu")


@pytest.fixture
def rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_kind_and_size_is_measured_or_missing_for_a_reason(rank: None) -> None:
    """1 KiB and 4 KiB of each kind that gloo has; a kind that it lacks is asked for once."""
    found, missing = measure_collectives(CPU, 3600.0, largest_bytes=4096)
    assert {kind for kind, _, _ in found} | set(missing) == set(KINDS)
    assert "all_reduce" not in missing and all(missing.values())
    for kind in set(KINDS) - set(missing):
        assert [key for key in found if key[0] == kind] == [(kind, 1, 1024), (kind, 1, 4096)]
    assert all(ms > 0 for ms in found.values())


def test_times_are_in_milliseconds(rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a quarter of a second each time that it is read."""
    clock = itertools.count(step=0.25)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    found, _ = measure_collectives(CPU, 3600.0, largest_bytes=1024)
    assert found and set(found.values()) == {250.0}


def test_nothing_is_measured_when_the_time_is_up(rank: None) -> None:
    """It is said from which size on."""
    found, missing = measure_collectives(CPU, -1.0)
    assert (found, missing) == ({}, {"all_gather from 1024 bytes": "the time ran out"})
