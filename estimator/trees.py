"""Gradient-boosted trees as plain arrays: a compact file format without pickles, and a vectorised evaluation.

    prediction(x) = baseline + step * sum over trees of leaf(tree, x)          leaf: a whole number

Features are binned first, as scikit-learn's histogram boosting does: bin(x) = number of the feature's thresholds below x.
A node sends x left if bin(x) <= its bin.

The nodes of all trees lie in one array, level by level: first the roots, then their children, and so on. The children of
the i-th node that splits are then the nodes `trees + 2 i` and `trees + 2 i + 1`, so no link has to be stored. What is
stored (`arrays`) is one bit for each node (is it a leaf?), two bytes for each split, two for each leaf, and the
thresholds that are used. The splits' bins lie feature by feature and the parts of wide numbers byte by byte, because that
is what the file's compression shrinks best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_ROWS = 128


class Tree(NamedTuple):
    """One tree while it is written. Its nodes are in any order in which children come after their parents.

    Per node: the `feature` that it splits by (-1: it is a leaf), the `bin` up to which a row goes `left`, the other child
    `right`, and the `value` of a leaf.
    """

    feature: NDArray[np.int32]
    bin: NDArray[np.int32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float64]

    def leaves_of(self, bins: NDArray[np.uint8]) -> NDArray[np.int32]:
        """The leaf that every row of bins ends in."""
        node = np.zeros(len(bins), dtype=np.int32)
        going = np.arange(len(bins))
        while (going := going[self.feature[node[going]] >= 0]).size:
            at = node[going]
            right = bins[going, self.feature[at]] > self.bin[at]
            node[going] = np.where(right, self.right[at], self.left[at])
        return node


class _Nodes(NamedTuple):
    """Per node: its feature and bin (0 in leaves), its children (left, right; a leaf's are itself), a leaf's value."""

    feature: NDArray[np.int32]
    bin: NDArray[np.uint8]
    children: NDArray[np.int32]
    value: NDArray[np.float64]
    leaf: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeEnsemble:
    """See the module's docstring. Nodes, splits and leaves are in level order.

    `is_leaf`: of every node; `feature` and `bin`: of every split; `value`: of every leaf, in multiples of `step`;
    `thresholds`: the ascending bin edges of every feature.
    """

    trees: int
    baseline: float
    step: float
    is_leaf: NDArray[np.bool_]
    feature: NDArray[np.uint8]
    bin: NDArray[np.uint8]
    value: NDArray[np.int16]
    thresholds: tuple[NDArray[np.float64], ...]

    @property
    def rounding_error(self) -> float:
        """The most by which a prediction can differ from that of the same trees with unrounded leaves."""
        return self.trees * self.step / 2

    @cached_property
    def _nodes(self) -> _Nodes:
        here, splits = np.arange(len(self.is_leaf), dtype=np.int32), ~self.is_leaf
        children = np.stack([here, here], axis=1)
        children[splits] = self.trees + np.arange(2 * len(self.feature), dtype=np.int32).reshape(-1, 2)
        feature, bin_ = np.zeros(len(here), np.int32), np.zeros(len(here), np.uint8)
        feature[splits], bin_[splits] = self.feature, self.bin
        value = np.zeros(len(here))
        value[self.is_leaf] = self.value
        return _Nodes(feature, bin_, children.ravel(), value, self.is_leaf)

    def binned(self, rows: NDArray[np.float64]) -> NDArray[np.uint8]:
        """The bin of every feature of every row."""
        bins = np.empty(rows.shape, dtype=np.uint8)
        for f, edges in enumerate(self.thresholds):
            bins[:, f] = np.searchsorted(edges, rows[:, f], side="left")
        return bins

    def predict(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The ensemble's value for every row of features."""
        bins = self.binned(rows)
        parts = [self._leaves(bins[i : i + _ROWS]) for i in range(0, len(rows), _ROWS)]
        return np.asarray(self.baseline + self.step * np.concatenate([np.zeros(0), *parts]))

    def _leaves(self, bins: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The sum of the leaves' values for every row of bins, few enough to stay in the cache.

        All (row, tree) pairs go down together; those that have reached their leaf are left behind now and then.
        """
        nodes, rows = self._nodes, len(bins)
        found = np.tile(np.arange(self.trees, dtype=np.int32), rows)
        pairs, node = np.arange(rows * self.trees), found.copy()
        values, first = bins.ravel(), np.repeat(np.arange(rows) * bins.shape[1], self.trees)
        while pairs.size:
            for _ in range(2):
                node = nodes.children[2 * node + (values[first + nodes.feature[node]] > nodes.bin[node])]
            found[pairs] = node
            going = ~nodes.leaf[node]
            pairs, node, first = pairs[going], node[going], first[going]
        return np.asarray(nodes.value[found].reshape(rows, self.trees).sum(axis=1))

    # ---- the file ----------------------------------------------------------------------------------------------

    def arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """The ensemble as named arrays, for an .npz file of several ensembles."""
        zigzag = ((self.value.astype(np.int32) << 1) ^ (self.value.astype(np.int32) >> 15)).astype("<u2")
        thresholds = np.concatenate([np.zeros(0), *self.thresholds]).astype("<f8")
        found: dict[str, NDArray[Any]] = {
            "is_leaf": np.packbits(self.is_leaf),
            "feature": self.feature,
            "bin": self.bin[np.argsort(self.feature, kind="stable")],
            "value": _planes(zigzag),
            "thresholds": _planes(thresholds),
            "offsets": np.cumsum([0, *map(len, self.thresholds)]).astype("<i4"),
            "constants": np.array([self.trees, self.baseline, self.step], dtype="<f8"),
        }
        return {f"{prefix}.{name}": array for name, array in found.items()}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]], prefix: str) -> TreeEnsemble:
        """The ensemble that `arrays(prefix)` gave. KeyError if it is not there."""
        stored = {name.removeprefix(f"{prefix}."): array for name, array in arrays.items()}
        trees, baseline, step = stored["constants"].tolist()
        feature = stored["feature"]
        bin_ = np.empty_like(feature)
        bin_[np.argsort(feature, kind="stable")] = stored["bin"]
        zigzag = _joined(stored["value"], "<u2").astype(np.int32)
        edges, offsets = _joined(stored["thresholds"], "<f8"), stored["offsets"]
        return TreeEnsemble(
            trees=int(trees),
            baseline=baseline,
            step=step,
            is_leaf=np.unpackbits(stored["is_leaf"], count=int(trees) + 2 * len(feature)).astype(bool),
            feature=feature,
            bin=bin_,
            value=((zigzag >> 1) ^ -(zigzag & 1)).astype(np.int16),
            thresholds=tuple(np.split(edges, offsets[1:-1])),
        )

    @staticmethod
    def from_trees(
        trees: Sequence[Tree], thresholds: Sequence[NDArray[np.float64]], *, baseline: float, step: float
    ) -> TreeEnsemble:
        """Round the leaves of `trees` to multiples of `step`, and drop the thresholds that no split uses.

        ValueError if a leaf is more than 32767 steps.
        """
        sizes = [len(tree.feature) for tree in trees]
        roots = np.cumsum([0, *sizes])[:-1]
        shift = np.repeat(roots, sizes)
        feature, bin_, left, right, value = (np.concatenate(column) for column in zip(*trees, strict=True))
        children = np.stack([left + shift, right + shift], axis=1)
        levels, level = [], roots
        while len(level):
            levels.append(level)
            level = children[level[feature[level] >= 0]].ravel()
        order = np.concatenate(levels)
        leaf = feature[order] < 0
        multiples = np.rint(value[order[leaf]] / step)
        if np.abs(multiples).max() > np.iinfo(np.int16).max:
            raise ValueError(f"a leaf of {np.abs(value).max():g} is too large for steps of {step:g}")
        splits = order[~leaf]
        used = [np.unique(bin_[splits[feature[splits] == f]]) for f in range(len(thresholds))]
        renamed = np.zeros(len(splits), dtype=np.uint8)
        for f, bins in enumerate(used):
            mine = feature[splits] == f
            renamed[mine] = np.searchsorted(bins, bin_[splits[mine]])
        return TreeEnsemble(
            trees=len(trees),
            baseline=baseline,
            step=step,
            is_leaf=leaf,
            feature=feature[splits].astype(np.uint8),
            bin=renamed,
            value=multiples.astype(np.int16),
            thresholds=tuple(edges[bins] for edges, bins in zip(thresholds, used, strict=True)),
        )


def _planes(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """All first bytes, then all second bytes, and so on."""
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(len(numbers), -1).T)


def _joined(planes: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """The inverse of `_planes`."""
    return np.ascontiguousarray(planes.T).view(dtype).ravel()


def trees_of_sklearn(model: Any) -> tuple[list[Tree], list[NDArray[np.float64]], float]:
    """The trees, bin edges and baseline of a HistGradientBoostingRegressor (numeric features, no missing values)."""
    trees = []
    for (predictor,) in model._predictors:
        nodes = predictor.nodes
        leaf = nodes["is_leaf"].astype(bool)
        trees.append(
            Tree(
                feature=np.where(leaf, -1, nodes["feature_idx"]).astype(np.int32),
                bin=np.where(leaf, 0, nodes["bin_threshold"]).astype(np.int32),
                left=nodes["left"].astype(np.int32),
                right=nodes["right"].astype(np.int32),
                value=np.where(leaf, nodes["value"], 0.0),
            )
        )
    edges = [np.asarray(e, dtype=np.float64) for e in model._bin_mapper.bin_thresholds_]
    return trees, edges, float(np.ravel(model._baseline_prediction)[0])
