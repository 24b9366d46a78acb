"""Expert load imbalance: distributions against what follows from their definition, routing, captures with each setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autosac.capture.jobs.adapter import JobDescription
from autosac.capture.jobs.layers import layering_of
from autosac.capture.moe_load import Groups, MoELoad, Routing, choose, inclusion
from autosac.capture.process.server import CaptureServer
from autosac.capture.process.store import request_fingerprint
from autosac.capture.request import TitanRequest
from autosac.errors import UsageError
from autosac.trace import Collective, Phase, Trace

ZIPF = MoELoad(kind="zipf", exponent=1.0, seed=3)


@pytest.mark.parametrize(
    ("text", "kind", "exponent"),
    [
        ("balanced", "balanced", 0),
        ("uniform", "uniform", 0),
        ("zipf", "zipf", 1),
        ("zipf:0.5", "zipf", 0.5),
        ("power-law:2", "power-law", 2),
    ],
)
def test_settings(text: str, kind: str, exponent: float) -> None:
    """A setting is read with its exponent, or the usual one, and printed so that it can be read again."""
    load = MoELoad.parse(text, seed=5)
    assert (load.kind, load.exponent, load.seed, load.draw) == (kind, exponent, 5, 0)
    assert MoELoad.parse(str(load), seed=5) == load


@pytest.mark.parametrize("text", ["", "skewed", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "zipf:0", "uniform:2"])
def test_bad_settings(text: str) -> None:
    """What is no setting is refused, and so is a negative seed."""
    with pytest.raises(UsageError):
        MoELoad.parse(text)
    with pytest.raises(UsageError):
        MoELoad.parse("uniform", seed=-1)


def test_weights() -> None:
    """Zipf's weights are 1, 1/2, 1/3, ... in another order in every layer; power-law's follow Pareto's law."""
    weights = ZIPF.weights(64, "layers.0")
    assert sorted(1 / weights) == pytest.approx(list(range(1, 65)))
    assert (ZIPF.weights(64, "layers.1") != weights).any() and (
        replace(ZIPF, draw=1).weights(64, "layers.0") != weights
    ).any()
    pareto = MoELoad.parse("power-law:2").weights(200_000, "")
    pareto = pareto / pareto.min()
    assert [(pareto > x).mean() for x in (2, 4)] == pytest.approx([1 / 4, 1 / 16], rel=0.05)


@pytest.mark.parametrize("groups", [None, Groups(4, 2)])
def test_tokens_take_distinct_experts(groups: Groups | None) -> None:
    """Every token has k different experts, in as many groups as it may use at most; the counts add up to tokens x k."""
    chosen = choose(ZIPF.weights(32, ""), 500, 6, np.random.default_rng(0), groups)
    assert chosen.shape == (500, 6) and np.bincount(chosen.reshape(-1), minlength=32).sum() == 3000
    assert all(len(set(row)) == 6 for row in chosen.tolist())
    if groups is not None:
        assert max(len({expert // 8 for expert in row}) for row in chosen.tolist()) == 2


def test_expectations_of_zipf() -> None:
    """One expert each: expert i gets 1 / (i H_E) of the tokens. Two of three: the sum over both orders of being drawn."""
    weights = 1 / np.arange(1, 17)
    shares = weights / weights.sum()
    counts = np.bincount(choose(weights, 40_000, 1, np.random.default_rng(1)).reshape(-1), minlength=16)
    assert np.abs(counts - 40_000 * shares).max() < 5 * np.sqrt(40_000 * shares).max()
    assert inclusion(weights, 1, np.random.default_rng(0)) == pytest.approx(shares)
    p = np.array([6, 3, 2]) / 11
    pairs = np.array([p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)])
    assert inclusion(p, 2, np.random.default_rng(0)) == pytest.approx(pairs, rel=0.03)
    assert inclusion(p, 3, np.random.default_rng(0)).tolist() == [1, 1, 1]
    found = inclusion(np.ones(64), 8, np.random.default_rng(0))
    assert found == pytest.approx(np.full(64, 1 / 8), rel=0.05) and found.sum() == pytest.approx(8)


def router(load: MoELoad, rank: int = 0, layer: str = "layers.0", repeated: list[bool] | None = None) -> Routing:
    """The routing of a rank in one layer; whether it is recomputed is the last of `repeated`."""
    state = [False] if repeated is None else repeated
    return Routing(load, rank, lambda: (layer, state[-1]))


def test_recomputation_is_routed_alike() -> None:
    """Each run of a layer in a step is drawn anew; its recomputation, and the next step, are as the first time."""
    repeated = [False]
    routing = router(ZIPF, repeated=repeated)
    first, second = (routing.route((100, 16), 2) for _ in range(2))
    repeated[-1] = True
    again = [routing.route((100, 16), 2) for _ in range(2)]
    assert first is not None and second is not None and (first != second).any()
    assert np.array_equal(again, [first, second])
    routing.begin_step()
    repeated[-1] = False
    assert np.array_equal(routing.route((100, 16), 2), first)


def test_draws_differ() -> None:
    """Seed, draw, rank and layer each change the choice; the same ones repeat it."""
    settings: list[tuple[Any, ...]] = [
        (ZIPF,),
        (replace(ZIPF, seed=4),),
        (replace(ZIPF, draw=1),),
        (ZIPF, 1),
        (ZIPF, 0, "layers.1"),
    ]
    found = [np.asarray(router(*arguments).route((50, 16), 2)).tobytes() for arguments in settings]
    assert len(set(found)) == len(found)
    assert np.asarray(router(ZIPF).route((50, 16), 2)).tobytes() == found[0]


def test_routers_with_groups() -> None:
    """A router that chooses 2 of 4 groups by two `topk` of its own gets experts of 2 groups from the third."""
    routing = router(ZIPF)
    assert routing.route((100, 4, 8), 2) is None and routing.route((100, 4), 2) is None
    chosen = routing.route((100, 32), 6)
    assert chosen is not None and max(len({expert // 8 for expert in row}) for row in chosen.tolist()) == 2


def test_counts_of_peers() -> None:
    """A rank keeps its own part, and gets from peers what their tokens send to its experts: as many as its popularity says."""
    ranks = tuple(range(0, 32, 4))
    for rank in (0, 12):
        routing = router(ZIPF, rank)
        counts = np.bincount(np.asarray(routing.route((4000, 16), 2)).reshape(-1), minlength=16)
        routing.counted(counts)
        received = routing.exchanged(counts, ranks).reshape(8, 2)
        position = ranks.index(rank)
        own = counts.reshape(8, 2)[position]
        assert received[position].tolist() == own.tolist()
        assert len({tuple(row) for row in received.tolist()}) > 4  # peers have tokens of their own
        assert received == pytest.approx(np.tile(own, (8, 1)), rel=0.3)
        assert np.array_equal(routing.exchanged(counts, ranks).reshape(8, 2), received)
        unknown = counts + 1
        assert routing.exchanged(unknown, ranks).reshape(8, 2).tolist() == [(own + 1).tolist()] * 8


# ---- captures -------------------------------------------------------------------------------------------------------

JOB = ("--model.name", "deepseek_v3", "--model.flavor", "debugmodel", "--training.local_batch_size", "2")
JOB += ("--training.seq_len", "256", "--parallelism.expert_parallel_degree", "4")


def request(load: str = "balanced", seed: int = 0, **arguments: Any) -> TitanRequest:
    """The debug model with 512 tokens a rank, three experts of eight each, on four ranks with two experts each."""
    settings = {"world_size": 4, "checkpointing": "none", **arguments}
    return TitanRequest(config_file=None, overrides=JOB, moe_load=MoELoad.parse(load, seed), **settings)


@pytest.fixture(scope="module")
def capture(capture_server: CaptureServer) -> Callable[..., Trace]:
    """Captures through one server; the same request is captured once."""
    known: dict[TitanRequest, Trace] = {}

    def run(*settings: Any, **arguments: Any) -> Trace:
        wanted = request(*settings, **arguments)
        if wanted not in known:
            known[wanted] = capture_server.capture(wanted)
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
    assert exchanged(capture(load, 1)) != exchanged(trace)
    if load == "uniform":  # another process draws alike
        with CaptureServer() as server:
            assert server.capture(request(load)) == trace


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
