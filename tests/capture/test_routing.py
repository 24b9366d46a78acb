"""Routing of tokens to experts: distributions against what follows from their definition, choices, exchanges with peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autosac.capture.moe_load import Groups, MoELoad, Routing, choose, inclusion
from autosac.errors import UsageError

ZIPF = MoELoad(kind="zipf", exponent=1.0, seed=3)


@pytest.mark.parametrize(
    ("text", "kind", "exponent"),
    [
        ("balanced", "balanced", 0),
        ("uniform", "uniform", 0),
        ("untrained", "untrained", 0),
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


def test_an_untrained_router_sends_a_word_to_the_same_experts() -> None:
    """The most frequent of 2^15 words is one of 10.97 (their harmonic sum) in a text: its experts get a tenth of the tokens at
    least, and 64 experts 6 x 8,192 in all. Another layer chooses others.
    """
    routing = router(MoELoad(kind="untrained"))
    chosen = routing.route((8192, 64), 6)
    assert chosen is not None
    words = {tuple(row) for row in chosen.tolist()}
    most = max(words, key=lambda word: int((chosen == word).all(axis=1).sum()))
    share = (chosen == most).all(axis=1).mean()
    assert share == pytest.approx(1 / sum(1 / i for i in range(1, 2**15 + 1)), rel=0.1)
    counts = np.bincount(chosen.reshape(-1), minlength=64)
    assert counts.sum() == 6 * 8192 and (counts[list(most)] >= share * 8192).all()
    other = router(MoELoad(kind="untrained"), layer="layers.1").route((8192, 64), 6)
    assert other is not None and np.bincount(other.reshape(-1), minlength=64).argmax() not in most


def test_peers_of_an_untrained_rank_send_what_its_words_would() -> None:
    """What two ranks of four experts exchange is as large as what one of them routes, in the mean over many layers."""
    received = []
    for i in range(40):
        routing = router(MoELoad(kind="untrained", seed=i))
        chosen = routing.route((4096, 8), 2)
        counts = np.bincount(np.asarray(chosen).reshape(-1), minlength=8)
        routing.counted(counts)
        received.append(routing.exchanged(counts, (0, 1)).sum() / 8192)
    assert np.mean(received) == pytest.approx(1, rel=0.05)


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


def test_the_busiest_rank() -> None:
    """In the busiest rank's place a rank gets what the rank of the group with most tokens gets, whoever captures it."""
    ranks = tuple(range(4))
    own = []
    for rank in ranks:
        routing = router(ZIPF, rank)
        counts = np.bincount(np.asarray(routing.route((4000, 16), 2)).reshape(-1), minlength=16)
        routing.counted(counts)
        own.append(int(routing.exchanged(counts, ranks).sum()))
    most = []
    for rank in ranks:
        routing = router(replace(ZIPF, busiest=True), rank)
        counts = np.bincount(np.asarray(routing.route((4000, 16), 2)).reshape(-1), minlength=16)
        routing.counted(counts)
        received = routing.exchanged(counts, ranks).reshape(4, 4)
        assert received[rank].tolist() in counts.reshape(4, 4).tolist()
        most.append(int(received.sum()))
        unknown = counts + 1
        assert np.array_equal(routing.exchanged(unknown, ranks).reshape(4, 4), [(counts + 1).reshape(4, 4)[rank]] * 4)
    assert max(own) > 1.2 * min(own)
    assert most == pytest.approx([max(own)] * 4, rel=0.02)  # each knows its own tokens, and draws those of others
