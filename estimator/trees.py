"""Gradient-boosted trees as plain arrays: a compact file format without pickles, and a vectorised evaluation.

    prediction(x) = baseline + scale * sum over trees of leaf(tree, x)

Features are binned first, as scikit-learn's histogram boosting does: bin(x) = number of the feature's
thresholds below x. A node sends x left if bin(x) <= its bin. Nodes of all trees lie one after the other in
depth-first order, so the left child is the next node and only the right child (as a distance from the tree's
root) must be stored; a leaf stores its value in the same place, as a 16-bit multiple of `scale`. That is four
bytes a node. Rounding changes a prediction by at most ``trees * scale / 2`` (`rounding_error`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAF = 255
_ROWS = 128
_FIELDS = ("feature", "bin", "payload", "roots", "thresholds", "offsets", "constants")


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeEnsemble:
    """See the module's docstring.

    `feature` is 255 in leaves; `payload` is the right child in inner nodes and the value in leaves; `roots`
    are the trees' first nodes; `thresholds[offsets[f]:offsets[f + 1]]` are the bin edges of feature f.
    """

    feature: NDArray[np.uint8]
    bin: NDArray[np.uint8]
    payload: NDArray[np.int16]
    roots: NDArray[np.int32]
    thresholds: NDArray[np.float64]
    offsets: NDArray[np.int32]
    constants: NDArray[np.float64]  # baseline, scale, depth of the deepest tree

    @property
    def rounding_error(self) -> float:
        """The most by which a prediction can differ from the unrounded trees'."""
        return float(len(self.roots) * self.constants[1] / 2)

    @cached_property
    def _nodes(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """Per node: its feature (0 in leaves), where it sends a row (left, right; a leaf to itself), whether it is a leaf."""
        here, leaf = np.arange(len(self.feature), dtype=np.int32), self.feature == _LEAF
        root = np.repeat(self.roots, np.diff(np.append(self.roots, len(here))))
        right = root + self.payload.view(np.uint16)
        children = np.stack([np.where(leaf, here, here + 1), np.where(leaf, here, right)], axis=1)
        return np.where(leaf, 0, self.feature).astype(np.int32), children.astype(np.int32).ravel(), leaf

    def predict(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The ensemble's value for every row of features."""
        bins = np.empty(rows.shape, dtype=np.uint8)
        for f in range(rows.shape[1]):
            edges = self.thresholds[self.offsets[f] : self.offsets[f + 1]]
            bins[:, f] = np.searchsorted(edges, rows[:, f], side="left")
        parts = [self._leaves(bins[i : i + _ROWS]) for i in range(0, len(rows), _ROWS)]
        return np.asarray(self.constants[0] + self.constants[1] * np.concatenate([np.zeros(0), *parts]))

    def _leaves(self, bins: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The sum of the leaves' values for every row of bins, few enough to stay in the cache.

        All (row, tree) pairs go down together; those that have reached their leaf are left behind now and then.
        """
        feature, children, leaf = self._nodes
        rows, trees = len(bins), len(self.roots)
        found = np.tile(self.roots, rows)
        pairs, node = np.arange(rows * trees), found
        values, first = bins.ravel(), np.repeat(np.arange(rows) * bins.shape[1], trees)
        for depth in range(int(self.constants[2])):
            node = children[2 * node + (values[first + feature[node]] > self.bin[node])]
            if depth % 2:
                found[pairs] = node
                going = ~leaf[node]
                pairs, node, first = pairs[going], node[going], first[going]
        found[pairs] = node
        return np.asarray(self.payload[found].astype(np.float64).reshape(rows, trees).sum(axis=1))

    def arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """The ensemble as named arrays, for an .npz file of several ensembles."""
        return {f"{prefix}.{name}": getattr(self, name) for name in _FIELDS}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]], prefix: str) -> TreeEnsemble:
        """The ensemble that `arrays(prefix)` gave. KeyError if it is not there."""
        return TreeEnsemble(**{name: arrays[f"{prefix}.{name}"] for name in _FIELDS})

    @staticmethod
    def from_sklearn(model: Any) -> TreeEnsemble:
        """Export a fitted HistGradientBoostingRegressor (numeric features without missing values)."""
        trees = [predictors[0].nodes for predictors in model._predictors]
        edges = [np.asarray(e, dtype=np.float64) for e in model._bin_mapper.bin_thresholds_]
        values = np.concatenate([t["value"][t["is_leaf"].astype(bool)] for t in trees])
        scale = float(np.abs(values).max()) / 32767 or 1.0
        payload = []
        for tree in trees:
            leaf = tree["is_leaf"].astype(bool)
            inner = np.flatnonzero(~leaf)
            assert (tree["left"][inner] == inner + 1).all(), "nodes are not in depth-first order"
            assert len(tree) <= 65536, "tree too large"
            rounded = np.rint(tree["value"] / scale).astype(np.int16)
            payload.append(np.where(leaf, rounded, tree["right"].astype(np.uint16).view(np.int16)))
        leaves = [t["is_leaf"].astype(bool) for t in trees]
        return TreeEnsemble(
            feature=np.concatenate(
                [np.where(x, _LEAF, t["feature_idx"]) for x, t in zip(leaves, trees, strict=True)]
            ).astype(np.uint8),
            bin=np.concatenate([np.where(x, 0, t["bin_threshold"]) for x, t in zip(leaves, trees, strict=True)]).astype(
                np.uint8
            ),
            payload=np.concatenate(payload),
            roots=np.cumsum([0] + [len(t) for t in trees[:-1]]).astype(np.int32),
            thresholds=np.concatenate(edges),
            offsets=np.cumsum([0] + [len(e) for e in edges]).astype(np.int32),
            constants=np.array(
                [
                    float(np.ravel(model._baseline_prediction)[0]),
                    scale,
                    float(max(t["depth"].max() for t in trees)),
                ]
            ),
        )
