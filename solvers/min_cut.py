"""The convex hull of one unit's trade-off curve, by minimum cuts (project selection).

For a price q of a byte, the policy that minimises

    sum_c t_c r_c + q sum_s a_s d_s k_i(s)

is a minimum cut (Picard 1976; the problem is in `closure.py`). Nodes on the source's side are true: d_s (result s is asked
for), m_i (item i is made, not kept), r_c (operator c runs again). Edges: source to d_s for what the backward asks for, r_c to
d_s for what c reads, m_i to r_c for c that make the item, all without limit; d_s to m_i with q a_s, which is cut where s is
asked for and kept; r_c to the sink with t_c. All corners of the hull follow from the two ends of the curve: the price at which
two neighbours cost the same finds a corner between them, or there is none (Eisner and Severance 1976).

Capacities are whole numbers below 2^30 (`scipy.sparse.csgraph.maximum_flow`), so a corner that lies below its neighbours'
chord by less than 2^-20 of it may be missed; corners are evaluated exactly. An item whose results have different makers, or
are read half-written, is no pairwise term: such a one is relaxed (each of its results is kept or made for itself, and what is
read half-written is free to keep), and the hull is a lower bound there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autosac.solvers.local import LocalProblem

_ENDLESS = 2**31 - 1
_WHOLE = 2**30
_CLOSE = 2.0**-20


class Corner(NamedTuple):
    """A corner of the hull: bytes and time (of the relaxation, where there is one), and the items to keep for it."""

    memory_bytes: int
    recompute_ms: float
    kept: tuple[int, ...]


def lower_hull(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The corners of the lower left convex hull of (bytes, ms), by ascending bytes and descending time."""
    found: list[tuple[int, float]] = []
    for x, y in sorted(points):
        if found and y >= found[-1][1]:
            continue
        while len(found) > 1 and (found[-1][1] - found[-2][1]) * (x - found[-1][0]) >= (y - found[-1][1]) * (
            found[-1][0] - found[-2][0]
        ):
            found.pop()
        found.append((x, y))
    return tuple(found)


def min_cut_hull(problem: LocalProblem) -> tuple[Corner, ...]:
    """The corners of the lower convex hull over all policies of a unit, by ascending bytes."""
    network = _Network(problem)
    first, last = network.cut(1.0, 0.0), network.cut(0.0, 1.0)
    found = {last.memory_bytes: last}
    if first.memory_bytes != last.memory_bytes:
        found[first.memory_bytes] = first
    waiting = [(first, last)]
    while waiting:
        left, right = waiting.pop()
        more_bytes, less_ms = right.memory_bytes - left.memory_bytes, left.recompute_ms - right.recompute_ms
        if more_bytes <= 0 or less_ms <= 0:
            continue
        middle = network.cut(less_ms, float(more_bytes))
        chord = left.memory_bytes * less_ms + left.recompute_ms * more_bytes
        below = chord - (middle.memory_bytes * less_ms + middle.recompute_ms * more_bytes)
        if below > _CLOSE * more_bytes * less_ms:
            known = found.get(middle.memory_bytes)
            if known is None or middle.recompute_ms < known.recompute_ms:
                found[middle.memory_bytes] = middle
            waiting += [(left, middle), (middle, right)]
    hull = lower_hull((corner.memory_bytes, corner.recompute_ms) for corner in found.values())
    return tuple(found[memory_bytes] for memory_bytes, _ in hull)


class _Network:
    """The graph of one unit, whose capacities follow from the prices. Nodes: source, sink, operators, then the others."""

    def __init__(self, problem: LocalProblem) -> None:
        self._problem = problem
        self._closure = closure = problem.demand
        self._nodes = 2 + len(closure.operators)
        self._contents: dict[tuple[int, tuple[int, ...]], int] = {}
        self._choices: dict[object, int] = {}
        self._edges: dict[tuple[int, int], tuple[float, float]] = {}  # time and bytes at the price of one, inf: endless
        self._keep: list[tuple[int, int, int, int]] = []  # item, content's node, choice's node, bytes
        self._shared = self._pairwise_items()
        for c, operator in enumerate(closure.operators):
            self._edges[2 + c, 1] = (operator.recompute_ms, 0.0)
            for s in operator.reads:
                self._edges[2 + c, self._content(s, c)] = (np.inf, 0.0)
        for s in closure.asked:
            self._edges[0, self._content(s, len(closure.operators))] = (np.inf, 0.0)
        edges = list(self._edges)
        self._rows = np.array([a for a, _ in edges], dtype=np.int32)
        self._columns = np.array([b for _, b in edges], dtype=np.int32)
        self._ms = np.array([self._edges[edge][0] for edge in edges])
        self._bytes = np.array([self._edges[edge][1] for edge in edges])

    def _pairwise_items(self) -> set[int]:
        """Items whose results are all made by the same operators, and read only after all of these, but for operators that
        make nothing else: they do not run if the item is kept.
        """
        makers: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for result in self._closure.results:
            makers[result.item].add(result.makers)
        shared = {item for item, found in makers.items() if len(found) == 1}
        items: dict[int, set[int]] = defaultdict(set)
        for result in self._closure.results:
            for c in result.makers:
                items[c].add(result.item)
        for c, operator in enumerate(self._closure.operators):
            for s in operator.reads:
                result = self._closure.results[s]
                if result.makers[-1] >= c and items[c] != {result.item}:
                    shared.discard(result.item)
        return shared

    def _content(self, s: int, before: int) -> int:
        """The node of a result as it is before an operator."""
        result = self._closure.results[s]
        makers = tuple(c for c in result.makers if c < before)
        key = (s, makers)
        if key not in self._contents:
            node = self._contents[key] = self._node()
            forced = self._problem.items[result.item].forced
            if forced is False or (makers != result.makers and result.item in self._shared):
                self._edges |= {(node, 2 + c): (np.inf, 0.0) for c in makers}
            else:
                nbytes = result.memory_bytes if makers == result.makers else 0
                self._edge_of_choice(node, result.item, key, makers, nbytes, bool(forced))
        return self._contents[key]

    def _edge_of_choice(
        self, node: int, item: int, key: object, makers: tuple[int, ...], nbytes: int, forced: bool
    ) -> None:
        """A content is kept, for its bytes, or made by its makers."""
        if forced:
            self._edges[node, 1] = (0.0, float(nbytes))
            self._keep.append((item, node, 1, nbytes))
            return
        name = item if item in self._shared else key
        if name not in self._choices:
            choice = self._choices[name] = self._node()
            self._edges |= {(choice, 2 + c): (np.inf, 0.0) for c in makers}
        self._edges[node, self._choices[name]] = (0.0, float(nbytes))
        self._keep.append((item, node, self._choices[name], nbytes))

    def _node(self) -> int:
        self._nodes += 1
        return self._nodes - 1

    def cut(self, price_per_byte: float, price_per_ms: float) -> Corner:
        """The policy with the least cost at these prices."""
        from scipy.sparse import csr_array  # only long curves need it
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        endless = np.isinf(self._ms)
        cost = np.where(endless, 0.0, self._ms) * price_per_ms + self._bytes * price_per_byte
        total = float(cost.sum())
        capacity = np.where(endless, _ENDLESS, np.rint(cost * (_WHOLE / total if total > 0 else 0.0)))
        shape = (self._nodes, self._nodes)
        graph = csr_array((capacity.astype(np.int32), (self._rows, self._columns)), shape=shape)
        residual = graph - maximum_flow(graph, 0, 1).flow
        residual.data = np.where(residual.data > 0, 1, 0)
        residual.eliminate_zeros()
        return self._corner(set(breadth_first_order(residual, 0, return_predecessors=False).tolist()))

    def _corner(self, true: set[int]) -> Corner:
        spent = [o.recompute_ms for c, o in enumerate(self._closure.operators) if 2 + c in true]
        serving = [keep for keep in self._keep if keep[1] in true and keep[2] not in true]
        kept = tuple(sorted({item for item, _, _, _ in serving}))
        return Corner(sum(nbytes for _, _, _, nbytes in serving), float(sum(spent)), kept)
