"""Expert load imbalance: captures with each setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared_captures import USUAL

from autosac.capture.jobs.adapter import JobDescription
from autosac.capture.jobs.layers import layering_of
from autosac.capture.moe_load import MoELoad
from autosac.capture.process.server import CaptureServer
from autosac.capture.process.store import request_fingerprint
from autosac.capture.request import TitanRequest
from autosac.trace import Collective, Phase, Trace

JOB = ("--model.name", "deepseek_v3", "--model.flavor", "debugmodel", "--training.local_batch_size", "2")
JOB += ("--training.seq_len", "256", "--parallelism.expert_parallel_degree", "4")


def request(load: str = "balanced", seed: int = 0, **arguments: Any) -> TitanRequest:
    """The debug model with 512 tokens a rank, three experts of eight each, on four ranks with two experts each."""
    settings = {"world_size": 4, "checkpointing": "none", "gpu": USUAL, **arguments}
    return TitanRequest(config_file=None, overrides=JOB, moe_load=MoELoad.parse(load, seed), **settings)


@pytest.fixture(scope="module")
def capture(capture_server: CaptureServer) -> Callable[..., Trace]:
    """Captures through one server; the same request is captured once."""
    known: dict[TitanRequest, Trace] = {}

    def run(*settings: Any, **arguments: Any) -> Trace:
        wanted = request(*settings, **arguments)
        if wanted not in known:
            known[wanted] = capture_server.capture(replace(wanted, layers=3))
        return known[wanted]

    return run


def exchanged(trace: Trace, phase: Phase = Phase.FORWARD) -> list[int]:
    """Bytes of the all-to-alls of a phase: counts, tokens to the experts, and back, for every layer."""
    return [e.nbytes for e in trace.events if type(e) is Collective and e.kind == "all_to_all" and e.phase is phase]


def test_balanced_exchanges(capture: Callable[..., Trace]) -> None:
    """Balanced, a rank gets as many tokens as it sends, 512 x 3 rows of 256 bfloat16, and no load is told."""
    trace = capture()
    assert set(exchanged(trace)) == {8 * 8, 512 * 3 * 256 * 2}
    assert trace.info.moe_load is None


@pytest.mark.parametrize("load", ["uniform", "power-law", "zipf:1.2"])
def test_drawn_exchanges(capture: Callable[..., Trace], load: str) -> None:
    """A rank sends all it has, and back what it got, which differs by layer; a seed repeats a capture, another does not."""
    trace = capture(load)
    counts, sent, back = (exchanged(trace)[i::3] for i in range(3))
    assert set(counts) == {8 * 8} and set(sent) == {512 * 3 * 256 * 2}
    assert len(set(back)) > 1 and all(nbytes % (256 * 2) == 0 for nbytes in back)
    if load == "uniform":  # another process draws alike; how seeds differ in each distribution: test_routing
        assert exchanged(capture(load, 1)) != exchanged(trace)
        with CaptureServer() as server:
            assert server.capture(request(load, layers=3)) == trace


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_compiled_router_sends_what_an_eager_one_does(
    capture: Callable[..., Trace], capture_server: CaptureServer, checkpointing: str
) -> None:
    """Compiled kernels between the choice of experts and its count hide nothing: all exchanges are those of the eager job."""
    eager = capture("zipf", checkpointing=checkpointing)
    compiled = replace(request("zipf", checkpointing=checkpointing, layers=3), overrides=(*JOB, "--compile.enable"))
    trace = capture_server.capture(compiled)
    for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        assert exchanged(trace, phase) == exchanged(eager, phase)


def test_recomputed_exchanges(capture: Callable[..., Trace]) -> None:
    """Full checkpointing repeats every exchange of the forward with the same sizes."""
    trace = capture("zipf", checkpointing="full")
    layers = zip(*(exchanged(trace)[i::3] for i in range(3)), strict=True)
    again = zip(*(exchanged(trace, Phase.RECOMPUTE)[i::3] for i in range(3)), strict=True)
    assert list(again) == list(layers)[::-1]


def test_recomputed_exchanges_of_microbatches(capture_server: CaptureServer) -> None:
    """In a pipeline each of two microbatches has its own tokens, and its recomputation the same ones."""
    pipeline = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B")
    wanted = replace(request("zipf", world_size=8, checkpointing="full"), overrides=(*JOB, *pipeline))
    trace = capture_server.capture(wanted)
    back = exchanged(trace)[2::3]
    half = len(back) // 2
    assert len(back) >= 4 and back[:half] != back[half:]
    assert sorted(exchanged(trace, Phase.RECOMPUTE)[2::3]) == sorted(back)


def test_keys_and_cuts(tmp_path: Path) -> None:
    """Captures are kept by load, seed and draw; a job with a drawn load is not captured by a few of its layers."""
    requests = [request(), request("uniform"), request("uniform", 1), request("zipf"), request("zipf:2")]
    requests.append(replace(requests[1], moe_load=replace(requests[1].moe_load, draw=1)))
    keys = [request_fingerprint(r, {}) for r in requests]
    assert None not in keys and len(set(keys)) == len(keys)
    assert all(TitanRequest.from_json(r.to_json()) == r for r in requests)

    class Job:
        """Ten equal layers."""

        def describe(self, _: Any) -> JobDescription:
            return JobDescription("ten layers", "none", True, False)

        def layers(self, _: Any) -> list[dict[str, Any]]:
            return [{"kind": 1}] * 10

        def with_layers(self, config: Any, _: int) -> Any:
            return config

    class Parallelism:
        """Nothing is split."""

        pipeline_parallel_layers_per_stage = None
        pipeline_parallel_schedule = "1F1B"

        def __getattr__(self, _: str) -> int:
            return 1

    class Config:
        """A job."""

        parallelism = Parallelism()

    assert layering_of(Job(), Config(), requests[0]) is not None
    assert layering_of(Job(), Config(), requests[1]) is None
