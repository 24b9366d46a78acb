"""Device meshes of many ranks: the captured rank's own groups, named so that ranks agree, whatever the size of the world."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.trace import Collective, Event, Trace

JOB = ("--model.name", "llama3", "--model.flavor", "debugmodel", "--training.local_batch_size", "4")
JOB += ("--training.seq_len", "64", "--parallelism.pipeline_parallel_degree", "2")
JOB += ("--parallelism.pipeline_parallel_schedule", "1F1B", "--parallelism.tensor_parallel_degree", "2")
JOB += ("--parallelism.data_parallel_shard_degree", "2")


@pytest.fixture(scope="module")
def capture(capture_server: CaptureServer) -> Callable[[int, int], Trace]:
    """Captures of a rank of two stages, two tensor-parallel ranks, two shards, and so many replicas."""
    known: dict[tuple[int, int], Trace] = {}

    def run(replicas: int, rank: int) -> Trace:
        if (replicas, rank) not in known:
            overrides = (*JOB, "--parallelism.data_parallel_replicate_degree", str(replicas))
            known[replicas, rank] = capture_server.capture(
                TitanRequest(
                    config_file=None, overrides=overrides, world_size=8 * replicas, rank=rank, checkpointing="none"
                )
            )
        return known[replicas, rank]

    return run


def members(trace: Trace) -> dict[str, tuple[int, ...]]:
    """The ranks of each group by its name."""
    return {group.name: group.ranks() for group in trace.groups}


def test_groups_of_the_own_rank(capture: Callable[[int, int], Trace]) -> None:
    """Ranks count stage, replica, shard, tensor: rank 5 of 16 is stage 0, replica 1, shard 0, tensor 1."""
    found = set(members(capture(2, 5)).values())
    assert {(5, 13), (1, 5), (5, 7), (4, 5)} <= found
    assert all(5 in ranks for ranks in found)


def test_names_agree(capture: Callable[[int, int], Trace]) -> None:
    """Groups with the same name on two ranks are the same dimension of the mesh: the same ranks, or none in common."""
    first, second = members(capture(2, 0)), members(capture(2, 5))
    assert first.keys() == second.keys()
    for name, ranks in first.items():
        assert ranks == second[name] or not set(ranks) & set(second[name])
    assert first[next(name for name, ranks in second.items() if ranks == (4, 5))] == (0, 1)


def without_peers(trace: Trace) -> list[Event]:
    """The events, with the rank that a send or receive goes to as its position in the group."""
    return [
        event._replace(peer=trace.groups[event.group].ranks().index(event.peer))
        if type(event) is Collective and event.peer >= 0
        else event
        for event in trace.events
    ]


def test_the_size_of_the_world(capture: Callable[[int, int], Trace]) -> None:
    """With 256 times as many replicas a rank issues the same events, on groups of the same names, told by structure."""
    small, large = capture(2, 0), capture(512, 0)
    assert without_peers(large) == without_peers(small)
    assert [group.name for group in large.groups] == [group.name for group in small.groups]
    assert not any(group.explicit for group in large.groups)
    assert max(group.size for group in large.groups) >= 512
