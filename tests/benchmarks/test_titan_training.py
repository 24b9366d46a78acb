"""Real TorchTitan trainings: what is asked of them, and how gradients are compared."""

from __future__ import annotations

from benchmarks.titan_training.__main__ import distance
from benchmarks.titan_training.jobs import Job


def test_a_compiled_job_says_so_to_torchtitan() -> None:
    """A job with a backend has TorchTitan's two settings behind its own, and the backend in its description."""
    job = Job("llama3", 2, ("training.global_batch_size 16",), backend="inductor")
    assert job.arguments == [
        *("--training.global_batch_size", "16"),
        *("--compile.enable", "--compile.backend", "inductor"),
    ]
    assert job.describe() == "llama3, global batch size 16, inductor"
    assert job._replace(backend="").arguments == ["--training.global_batch_size", "16"]


def test_distances_are_those_of_the_worst_parameter() -> None:
    """Two parameters, off by 3 and 4 of a norm of 10, and by 1 where the other gradient is zero, in the first step."""
    one = {"sketches": [[[13.0, 4.0], [1.0, 0.0]], [[9.0, 9.0], [9.0, 9.0]]]}
    other = {"sketches": [[[10.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]}
    assert distance(one, other) == 1.0
    one["sketches"][0][1] = [0.0, 0.0]
    assert distance(one, other) == 0.5
