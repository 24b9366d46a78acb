"""The array form of boosted trees against scikit-learn's own predictions, and the shipped files' size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autosac.estimator.learned import MODELS, load_bundle
from autosac.estimator.trees import Tree, TreeEnsemble, trees_of_sklearn
from benchmarks import compact_trees

sklearn_ensemble = pytest.importorskip("sklearn.ensemble")
STEP = 1e-3


def _data(seed: int, rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    generator = np.random.default_rng(seed)
    x = np.round(generator.normal(size=(rows, 4)), 2)
    return x, np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * generator.normal(size=rows)


@pytest.fixture(scope="module")
def fitted() -> tuple[object, TreeEnsemble]:
    """A small scikit-learn model and its export with all splits, the bin edges as they are."""
    model = sklearn_ensemble.HistGradientBoostingRegressor(max_iter=40, max_leaf_nodes=15, early_stopping=False)
    model.fit(*_data(0, 800))
    trees, edges, baseline = trees_of_sklearn(model)
    return model, TreeEnsemble.from_trees(trees, edges, baseline=baseline, step=STEP)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 60))
def test_equals_scikit_learn_up_to_its_rounding(fitted: tuple, seed: int, rows: int) -> None:
    """On random inputs, many of them exactly on thresholds, it differs by no more than the stated rounding."""
    model, trees = fitted
    x, _ = _data(seed, rows)
    difference = np.abs(trees.predict(x * 1.5) - model.predict(x * 1.5))
    assert difference.max() <= trees.rounding_error * (1 + 1e-9)
    assert trees.rounding_error == pytest.approx(40 * STEP / 2)


def test_a_batch_equals_its_rows(fitted: tuple) -> None:
    """300 rows, more than go down together, get to the bit what each of them gets alone."""
    _, trees = fitted
    x, _ = _data(3, 300)
    assert trees.predict(x).tolist() == [float(trees.predict(x[i : i + 1])[0]) for i in range(len(x))]


def test_survives_a_file(fitted: tuple, tmp_path: Path) -> None:
    """Written to .npz and read without pickles, it predicts the same."""
    _, trees = fitted
    path = tmp_path / "trees.npz"
    np.savez_compressed(path, **trees.arrays("a"), **trees.arrays("b"))
    with np.load(path, allow_pickle=False) as arrays:
        again = TreeEnsemble.from_arrays(dict(arrays), "b")
    x, _ = _data(7, 30)
    assert (again.predict(x) == trees.predict(x)).all()


def _tree(feature: list[int], bins: list[int], left: list[int], right: list[int], value: list[float]) -> Tree:
    whole = [np.array(column, np.int32) for column in (feature, bins, left, right)]
    return Tree(*whole, np.array(value))


def test_a_stump_by_hand() -> None:
    """One tree: x <= 5 gives 1 - 2*0.5, else 1 + 3*0.5; the threshold itself goes left."""
    tree = _tree([0, -1, -1], [1, 0, 0], [1, 0, 0], [2, 0, 0], [0.0, -1.0, 1.5])
    stump = TreeEnsemble.from_trees([tree], [np.array([2.0, 5.0, 7.0])], baseline=1.0, step=0.5)
    assert stump.predict(np.array([[4.0], [5.0], [5.1]])).tolist() == [0.0, 0.0, 2.5]
    assert [edges.tolist() for edges in stump.thresholds] == [[5.0]]  # the others are not used


def test_nodes_lie_level_by_level() -> None:
    """Two trees, one of them a leaf, the other with a split below its root: the roots first, then the children."""
    leaf = _tree([-1], [0], [0], [0], [4.0])
    deep = _tree([0, 0, -1, -1, -1], [1, 0, 0, 0, 0], [1, 2, 0, 0, 0], [4, 3, 0, 0, 0], [0, 0, 1.0, 2.0, 3.0])
    trees = TreeEnsemble.from_trees([leaf, deep], [np.array([0.0, 10.0])], baseline=0.0, step=1.0)
    assert trees.is_leaf.tolist() == [True, False, False, True, True, True]
    assert trees.value.tolist() == [4, 3, 1, 2]
    assert trees.predict(np.array([[-1.0], [5.0], [11.0]])).tolist() == [5.0, 6.0, 7.0]


def test_a_leaf_that_is_too_large_is_refused() -> None:
    """32767 steps is the most."""
    leaf = _tree([-1], [0], [0], [0], [33.0])
    with pytest.raises(ValueError, match=r"a leaf of 33 is too large for steps of 0\.001"):
        TreeEnsemble.from_trees([leaf], [np.zeros(0)], baseline=0.0, step=1e-3)


def test_no_rows(fitted: tuple) -> None:
    """An empty batch gives an empty answer."""
    assert fitted[1].predict(np.zeros((0, 4))).shape == (0,)


# ---- made small --------------------------------------------------------------------------------------------------


def test_small_trees_predict_nearly_the_same(fitted: tuple) -> None:
    """Nine tenths of the splits predict the same within 3 % of the target's spread (rms), seven tenths within 6 %."""
    model, full = fitted
    trees, edges, baseline = trees_of_sklearn(model)
    x, y = _data(0, 800)
    bins = np.array([np.searchsorted(e, c) for e, c in zip(edges, x.T, strict=True)], np.uint8).T
    short = [compact_trees.short_edges(e, c) for e, c in zip(edges, x.T, strict=True)]
    for cost, share, most in ((0.05, 0.7, 0.06), (0.02, 0.9, 0.03)):
        small = compact_trees.compacted(trees, bins, step=STEP, cost=cost)
        compact = TreeEnsemble.from_trees(small, short, baseline=baseline, step=STEP)
        assert len(compact.feature) < share * len(full.feature)
        for rows in (x, _data(1, 500)[0]):
            change = compact.predict(rows) - model.predict(rows)
            assert np.sqrt((change**2).mean()) < most * y.std()


def test_without_a_cost_only_rounding_is_left(fitted: tuple) -> None:
    """The error of every row stays near a step, however many trees there are: later trees make good earlier ones' rounding."""
    model, _ = fitted
    trees, edges, baseline = trees_of_sklearn(model)
    x, _ = _data(0, 800)
    bins = np.array([np.searchsorted(e, c) for e, c in zip(edges, x.T, strict=True)], np.uint8).T
    small = compact_trees.compacted(trees, bins, step=0.01, cost=0.0)
    compact = TreeEnsemble.from_trees(small, edges, baseline=baseline, step=0.01)
    change = compact.predict(x) - model.predict(x)
    assert np.sqrt((change**2).mean()) < 0.01 < compact.rounding_error / 10


def test_short_edges_move_up_a_little() -> None:
    """5.3 below 7 becomes 6, since 5.5 needs a digit more; close to the next value, or above all, an edge keeps its digits."""
    edges = compact_trees.short_edges(np.array([5.3, 8.00015, 9.1]), np.array([4.0, 7.0, 8.0001, 8.0002]))
    assert edges[0] == 6.0
    assert 8.00015 <= edges[1] <= 8.000175
    assert edges[2] == 9.1


def test_shipped_models_are_small() -> None:
    """All fitted models together take at most a megabyte."""
    assert sum(path.stat().st_size for path in MODELS.iterdir()) <= 1_000_000


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.npz")), ids=lambda path: path.stem)
def test_shipped_models_are_near_the_full_ones(path: Path) -> None:
    """Every file of trees says how far its predictions were from the trees' before they were made small: 0.4 % rms at most."""
    numbers = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    kinds = [kind for kind in numbers if kind != "source"]
    assert set(kinds) == set(load_bundle(path.stem).trees)
    for kind in kinds:
        assert numbers[kind]["rounding"]["rms_percent"] < 0.4
        assert numbers[kind]["rounding"]["max_percent"] < 5
