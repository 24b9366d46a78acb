"""Makes fitted trees small without a loss that shows: drops splits that say next to nothing, and rounds what is left.

    minimise  sum over rows of (full(x) - compact(x))^2 + cost * splits

The trees are taken in the order in which boosting made them. What the compact trees are behind the full ones on a row so
far is added to what the next tree has to say there: later trees make good what rounding and pruning took from earlier
ones, so the errors do not add up (as in sigma-delta conversion). Within one tree the best set of splits follows bottom-up:
a split stays where its two sides, each at its best, are better than one leaf by more than `cost`. A leaf's value is the
mean of its rows, rounded to a multiple of `step`.

A bin edge lies half way between two values of the data, and what lies on it goes left. `short_edges` moves it up a little
to a number of few digits, which compresses better. Never down: shapes half way between two others are common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.trees import Tree
from benchmarks.measurements import Array

_MOST_BITS = 23  # of a float32's fraction


def compacted(trees: Sequence[Tree], bins: NDArray[np.uint8], *, step: float, cost: float) -> list[Tree]:
    """Trees with fewer splits and rounded leaves; see the module's docstring. `bins`: the rows, binned."""
    behind = np.zeros(len(bins))
    found = []
    for tree in trees:
        leaves = tree.leaves_of(bins)
        wanted = tree.value[leaves] + behind
        small = _pruned(tree, leaves, wanted, step, cost)
        behind = wanted
        if len(small.feature) > 1 or small.value[0] != 0:
            behind = wanted - small.value[small.leaves_of(bins)]
            found.append(small)
    return found


def _pruned(tree: Tree, leaves: NDArray[np.int32], wanted: Array, step: float, cost: float) -> Tree:
    """One tree with the splits that are worth their cost, and leaves as the rows want them."""
    nodes = len(tree.feature)
    count = np.bincount(leaves, minlength=nodes).tolist()
    total = np.bincount(leaves, wanted, minlength=nodes).tolist()
    value, loss, splits = tree.value.tolist(), [0.0] * nodes, [False] * nodes
    for i in reversed(range(nodes)):
        left, right = int(tree.left[i]), int(tree.right[i])
        if tree.feature[i] >= 0:
            count[i], total[i] = count[left] + count[right], total[left] + total[right]
            value[i] = value[left] if count[left] >= count[right] else value[right]
        mean = total[i] / count[i] if count[i] else value[i]
        value[i] = round(mean / step) * step
        loss[i] = value[i] * (count[i] * value[i] - 2 * total[i])  # squared error, but for the sum of wanted^2
        if tree.feature[i] >= 0 and loss[left] + loss[right] + cost < loss[i]:
            loss[i], splits[i] = loss[left] + loss[right] + cost, True
    return _without(tree, np.array(splits), np.array(value))


def _without(tree: Tree, splits: NDArray[np.bool_], value: Array) -> Tree:
    """The tree whose nodes outside `splits` are leaves with these values."""
    reached = np.zeros(len(splits), dtype=bool)
    reached[0] = True
    for i in np.flatnonzero(splits):
        if reached[i]:
            reached[[tree.left[i], tree.right[i]]] = True
    place = (np.cumsum(reached) - 1).astype(np.int32)
    return Tree(
        feature=np.where(splits, tree.feature, -1)[reached],
        bin=np.where(splits, tree.bin, 0)[reached],
        left=np.where(splits, place[tree.left], 0)[reached],
        right=np.where(splits, place[tree.right], 0)[reached],
        value=np.where(splits, 0.0, value)[reached],
    )


def short_edges(edges: Array, column: Array) -> Array:
    """The edges, each moved up to the shortest binary number within half of what lies between it and the next value."""
    values = np.append(np.unique(column), np.inf)
    above = values[np.searchsorted(values, edges, side="right")]
    most = np.where(np.isfinite(above), edges + (above - edges) / 2, edges)
    found, unit = edges.copy(), 2.0 ** np.floor(np.log2(np.maximum(np.abs(edges), 1e-30)))
    for bits in reversed(range(_MOST_BITS + 1)):
        short = np.ceil(edges / unit * 2.0**bits) / 2.0**bits * unit
        found = np.where(short <= most, short, found)
    return found
