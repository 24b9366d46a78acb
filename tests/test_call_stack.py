"""Tests for `autosac.call_stack`."""

import resource
from collections.abc import Callable

import pytest

from autosac.call_stack import with_room
from autosac.capture.jobs import eager, step_process
from autosac.capture.process import worker
from autosac.cli import commands
from autosac.scripts import process, template


def _leaf() -> None:
    pass


def _most_faults(depth: int) -> int:
    """Of loops at so many depths, the most pages that the system gives for a thousand calls."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(1000):
        _leaf()
    here = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return max(here, _most_faults(depth - 1)) if depth else here


@with_room
def _most_faults_with_room(depth: int) -> int:
    return _most_faults(depth)


def test_calls_ask_for_no_memory() -> None:
    """At none of 250 depths does a thousand calls of a function take a thousand pages of the system."""
    assert _most_faults_with_room(250) < 500


@pytest.mark.parametrize(
    "function",
    [
        commands.run,
        process.main,
        template.serve,
        worker.main,
        eager._capture_into,
        step_process._serve,
    ],
)
def test_processes_have_room(function: Callable[..., object]) -> None:
    """What the processes spend their time in has room for thousands of frames."""
    assert function.__code__.co_stacksize == 2**18
