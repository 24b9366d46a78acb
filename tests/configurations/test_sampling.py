"""Optuna's sampler against exhaustive search of spaces that are small enough for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autosac.configurations.running.sampling import Sampler, sampled
from autosac.configurations.space.layout import Layout, ModelFacts, is_legal, knobs_of, layout_of, legal
from autosac.configurations.space.space import Space

KNOBS = {"a": (1, 2, 4, 8), "b": (1, 2, 4, 8), "c": ("x", "y", "z"), "d": (False, True)}


def made(choice: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Legal is what multiplies to no more than 16."""
    return tuple(choice.values()) if choice["a"] * choice["b"] <= 16 else None


def value(candidate: tuple[Any, ...]) -> float:
    """A product, on which other knobs have a say; what is small does not fit."""
    a, b, c, d = candidate
    return math.inf if a * b < 4 else a + 3 / b + "zyx".index(c) + (0.5 if d else 0.0)


def test_a_small_space_is_searched_to_its_best() -> None:
    """The best of all combinations is found, and no candidate is proposed twice."""
    seen: list[tuple[Any, ...]] = []

    def work_out(candidates: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], float]:
        seen.extend(candidates)
        return {candidate: value(candidate) for candidate in candidates}

    count = sampled(Sampler(KNOBS, made), work_out)
    everything = [c for c in itertools.product(*KNOBS.values()) if c[0] * c[1] <= 16]
    assert count == len(seen) == len(set(seen)) <= len(everything)
    assert min(map(value, seen)) == min(map(value, everything))


def test_the_same_answers_give_the_same_proposals() -> None:
    """A search that goes on asks what it asked before."""
    rounds = []
    for _ in range(2):
        sampler = Sampler(KNOBS, made)
        first = sampler.propose(8)
        for candidate in first:
            sampler.learn(candidate, value(candidate))
        rounds.append((first, sampler.propose(8)))
    assert rounds[0] == rounds[1]


def test_answers_steer_proposals() -> None:
    """After the same first proposals other values lead to other ones."""
    rounds = []
    for sign in (1, -1):
        sampler = Sampler(KNOBS, made)
        first = sampler.propose()
        for candidate in first:
            sampler.learn(candidate, sign * candidate[0] * candidate[1])
        rounds.append((first, sampler.propose()))
    assert rounds[0][0] == rounds[1][0] and rounds[0][1] != rounds[1][1]


def test_choices_are_the_legal_layouts() -> None:
    """All choices of knobs' values make exactly the layouts that are listed, for a model with experts on 16 GPUs."""
    space = Space(pipeline_parallel=(1, 2), microbatch=(1, 2), pipeline_schedule=("1F1B", "ZBVZeroBubble"))
    facts = ModelFacts(layers=8, heads=8, kv_heads=4, experts=8, seq_len=1024)
    knobs = knobs_of(space, 16, 8, 64, facts, False)
    made = {
        layout
        for values in itertools.product(*knobs.values())
        if (layout := layout_of(dict(zip(knobs, values, strict=True)), "any", 16, 64))
        and is_legal(layout, space, facts)
    }
    listed: list[Layout] = list(legal(space, "any", 16, 8, 64, facts, False))
    assert len(listed) == len(made) and set(listed) == made
