"""The least recomputation of a layer against all plans of small ones."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.configurations.bounds.recomputation import (
    LayerForward,
    Made,
    Run,
    operators_frontier,
    products_frontier,
    rerun_ms,
)


@st.composite
def forwards(draw: st.DrawFn) -> LayerForward:
    """Up to five operators, each of which makes a tensor or two and reads some of those before."""
    runs: list[Run] = []
    made: list[Made] = []
    for i in range(draw(st.integers(1, 5))):
        read = [t for t in range(len(made)) if draw(st.booleans())]
        reads = tuple((t, made[t].maker) for t in read)
        runs.append(Run(draw(st.integers(0, 9)), f"op{i}", reads, draw(st.booleans())))
        made += [Made(draw(st.integers(1, 9)), draw(st.booleans()), i) for _ in range(draw(st.integers(1, 2)))]
    return LayerForward(tuple(runs), tuple(made))


def plan_ms(forward: LayerForward, kept: frozenset[int], *, products: bool = False) -> float:
    """What runs again if these tensors are kept; of products alone, if asked for."""
    again: set[int] = set()
    open_ = [tensor.maker for t, tensor in enumerate(forward.made) if tensor.needed and t not in kept]
    while open_:
        run = open_.pop()
        if run not in again:
            again.add(run)
            open_ += [maker for t, maker in forward.runs[run].reads if t not in kept]
    return sum(forward.runs[run].ms for run in again if forward.runs[run].is_product or not products)


@pytest.mark.parametrize("products", [False, True])
@given(forwards())
def test_no_plan_recomputes_less_than_the_frontier(products: bool, forward: LayerForward) -> None:
    """Whatever is kept, also what the backward does not need, costs at least what its bytes cost on the frontier; so do the
    products alone.
    """
    pieces = products_frontier(forward) if products else operators_frontier(forward)
    assert sum(nbytes for nbytes, _ in pieces) == forward.needed_bytes
    rates = [ms / nbytes for nbytes, ms in pieces]
    assert all(a <= b * (1 + 1e-6) + 1e-9 for a, b in itertools.pairwise(rates))
    tensors = range(len(forward.made))
    for kept in itertools.chain.from_iterable(itertools.combinations(tensors, n) for n in range(len(tensors) + 1)):
        free, bound = forward.needed_bytes - sum(forward.made[t].nbytes for t in kept), 0.0
        for nbytes, ms in pieces:
            share = min(1.0, max(0.0, free / nbytes))
            bound, free = bound + share * ms, free - share * nbytes
        assert bound <= plan_ms(forward, frozenset(kept), products=products) + 1e-6


def test_a_tensor_that_was_not_kept_is_made_again_too() -> None:
    """A product (5 ms) whose result only a rotation (1 ms) reads: to free the rotation's result, both run again."""
    forward = LayerForward((Run(5, "mm", ()), Run(1, "rotate", ((0, 0),))), (Made(8, False, 0), Made(8, True, 1)))
    assert operators_frontier(forward) == ((8, pytest.approx(6, rel=1e-5)),)
    assert products_frontier(forward) == ((8, 0.0),)
    assert rerun_ms(forward, lambda name: name == "mm") == 1
    assert rerun_ms(forward, lambda _: False) == 6


def test_an_operator_with_two_results_runs_once() -> None:
    """Attention with 8 and 2 bytes in 5 ms: to free all costs 5 ms."""
    forward = LayerForward((Run(5, "attention", ()),), (Made(8, True, 0), Made(2, True, 0)))
    pieces = operators_frontier(forward)
    assert math.isclose(sum(ms for _, ms in pieces), 5, rel_tol=1e-5)
    assert sum(nbytes for nbytes, _ in pieces) == 10
