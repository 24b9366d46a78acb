"""The least that a layer has to recompute, for any memory that it may keep.

A layer's forward ran operators o of c_o milliseconds and made tensors T of s_T bytes; its backward needs some of them. Under
any plan, y_o says whether o runs again, k_T whether T is kept. A tensor that is needed is kept, or the operator that made it
runs again; whoever runs again needs what it read, which is kept or made again in turn:

    minimise    sum over o of  c_o y_o
    so that     k_T + y_o >= 1          T is needed, o made it
                k_T + y_o >= y_q        q read T, which o had made by then
                sum over T of  s_T k_T <= room,     y and k from 0 to 1

Every plan gives a solution, so the least sum is a lower bound of its recomputation (`operators_frontier`). It is a
convex function of the room, piecewise linear: it is known from its tangents, and whatever tangents have been found
bound it from below. With c_o = 0 for what is no matrix product, it is a lower bound of the products that run again
(`products_frontier`). Of a tensor that several operators wrote, the one that took longest of those counts; the others
are left out. What a layer reads from elsewhere is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

_SAFE = 1 - 1e-6  # the solver's precision
_DEPTH = 5


class Made(NamedTuple):
    """A tensor of a layer's forward. `maker`: the position of the operator that took longest to write it."""

    nbytes: int
    needed: bool
    maker: int


class Run(NamedTuple):
    """An operator of a layer's forward. `reads`: (tensor, operator that had made it by then), by their positions;
    `is_product`: a matrix product that takes longer at a lower clock.
    """

    ms: float
    name: str
    reads: tuple[tuple[int, int], ...]
    is_product: bool = False


class LayerForward(NamedTuple):
    """What a layer's forward ran and made."""

    runs: tuple[Run, ...]
    made: tuple[Made, ...]

    @property
    def needed_bytes(self) -> int:
        """Of what the backward needs."""
        return sum(tensor.nbytes for tensor in self.made if tensor.needed)


class _Line(NamedTuple):
    at: float
    value: float
    slope: float

    def __call__(self, room: float) -> float:
        return self.value + self.slope * (room - self.at)


def operators_frontier(forward: LayerForward) -> tuple[tuple[int, float], ...]:
    """(bytes, milliseconds) of how recomputation grows as less is kept: the cheapest bytes first, down to nothing."""
    return _frontier(forward, [run.ms for run in forward.runs])


def products_frontier(forward: LayerForward) -> tuple[tuple[int, float], ...]:
    """As `operators_frontier`, of the matrix products that run again at least."""
    return _frontier(forward, [run.ms if run.is_product else 0.0 for run in forward.runs])


def _frontier(forward: LayerForward, costs_ms: Sequence[float]) -> tuple[tuple[int, float], ...]:
    most = forward.needed_bytes
    if not most:
        return ()
    least = _Program(forward, costs_ms)
    lines = [_Line(most, 0.0, 0.0), least.tangent(0.0)]
    if lines[1].value <= 0:
        return ((most, 0.0),)
    lines[1:1] = _between(least, lines[0], lines[1], _DEPTH)
    rooms = [float(most), *(_meeting(a, b) for a, b in itertools.pairwise(lines)), 0.0]
    found = []
    for above, below in itertools.pairwise(rooms):
        ms = max(line(below) for line in lines) - max(line(above) for line in lines)
        if round(above) > round(below):
            found.append((round(above) - round(below), max(0.0, ms) * _SAFE))
    return tuple(found)


def rerun_ms(forward: LayerForward, is_saved: Callable[[str], bool]) -> float:
    """What runs again at least if nothing is kept but results of operators whose names are `is_saved`."""
    again: set[int] = set()
    open_ = [tensor.maker for tensor in forward.made if tensor.needed]
    while open_:
        run = open_.pop()
        if run in again or is_saved(forward.runs[run].name):
            continue
        again.add(run)
        open_ += [maker for _, maker in forward.runs[run].reads]
    return sum(forward.runs[run].ms for run in again)


class _Program:
    """The linear program of a layer. Variables: all y, then all k."""

    def __init__(self, forward: LayerForward, costs_ms: Sequence[float]) -> None:
        runs, made = forward.runs, forward.made
        rows: list[list[tuple[int, float]]] = []
        limits: list[float] = []
        for i, tensor in enumerate(made):
            if tensor.needed:
                rows.append([(len(runs) + i, -1.0), (tensor.maker, -1.0)])
                limits.append(-1.0)
        for q, run in enumerate(runs):
            for i, maker in run.reads:
                rows.append([(q, 1.0), (len(runs) + i, -1.0), (maker, -1.0)])
                limits.append(0.0)
        self._most = forward.needed_bytes
        rows.append([(len(runs) + i, tensor.nbytes / self._most) for i, tensor in enumerate(made)])
        entries = [(value, r, column) for r, row in enumerate(rows) for column, value in row]
        values, at, columns = zip(*entries, strict=True)
        self._matrix = coo_matrix((values, (at, columns)), shape=(len(rows), len(runs) + len(made))).tocsr()
        self._limits = np.array([*limits, 0.0])
        self._costs = np.array([*costs_ms, *[0.0] * len(made)])

    def tangent(self, room: float) -> _Line:
        """The least recomputation and its derivative in the room."""
        limits = self._limits.copy()
        limits[-1] = room / self._most
        solved = linprog(self._costs, A_ub=self._matrix, b_ub=limits, bounds=(0, 1), method="highs")
        assert solved.status == 0, solved.message
        return _Line(room, float(solved.fun), float(solved.ineqlin.marginals[-1]) / self._most)


def _between(least: _Program, a: _Line, b: _Line, depth: int) -> list[_Line]:
    """The tangents between two, in order of falling room."""
    room = _meeting(a, b)
    if depth == 0 or not b.at < room < a.at:
        return []
    line = least.tangent(room)
    if line.value <= a(room) * (1 + 1e-7) + 1e-9:
        return []
    return [*_between(least, a, line, depth - 1), line, *_between(least, line, b, depth - 1)]


def _meeting(a: _Line, b: _Line) -> float:
    """Where two tangents meet; `a` has the larger room."""
    if a.slope - b.slope <= 1e-18:
        return b.at
    return min(a.at, max(b.at, (b(0.0) - a(0.0)) / (a.slope - b.slope)))
