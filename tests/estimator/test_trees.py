"""The array form of boosted trees against scikit-learn's own predictions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autosac.estimator.trees import TreeEnsemble

sklearn_ensemble = pytest.importorskip("sklearn.ensemble")


def _data(seed: int, rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    generator = np.random.default_rng(seed)
    x = np.round(generator.normal(size=(rows, 4)), 2)
    return x, np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * generator.normal(size=rows)


@pytest.fixture(scope="module")
def fitted() -> tuple[object, TreeEnsemble]:
    """A small scikit-learn model and its export."""
    model = sklearn_ensemble.HistGradientBoostingRegressor(max_iter=40, max_leaf_nodes=15, early_stopping=False)
    model.fit(*_data(0, 800))
    return model, TreeEnsemble.from_sklearn(model)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 60))
def test_equals_scikit_learn_up_to_its_rounding(fitted: tuple, seed: int, rows: int) -> None:
    """On random inputs, many of them exactly on thresholds, it differs by no more than the stated rounding."""
    model, trees = fitted
    x, _ = _data(seed, rows)
    difference = np.abs(trees.predict(x * 1.5) - model.predict(x * 1.5))
    assert difference.max() <= trees.rounding_error * (1 + 1e-9)
    assert trees.rounding_error < 1e-3


def test_a_batch_equals_its_rows(fitted: tuple) -> None:
    """300 rows, more than go down together, get to the bit what each of them gets alone."""
    _, trees = fitted
    x, _ = _data(3, 300)
    assert trees.predict(x).tolist() == [float(trees.predict(x[i : i + 1])[0]) for i in range(len(x))]


def test_survives_a_file(fitted: tuple, tmp_path: object) -> None:
    """Written to .npz and read without pickles, it predicts the same."""
    _, trees = fitted
    path = f"{tmp_path}/trees.npz"
    np.savez_compressed(path, **trees.arrays("a"), **trees.arrays("b"))
    with np.load(path, allow_pickle=False) as arrays:
        again = TreeEnsemble.from_arrays(arrays, "b")
    x, _ = _data(7, 30)
    assert (again.predict(x) == trees.predict(x)).all()


def test_a_stump_by_hand() -> None:
    """One tree: x <= 5 gives 1 - 2*0.5, else 1 + 3*0.5; the threshold itself goes left."""
    stump = TreeEnsemble(
        feature=np.array([0, 255, 255], np.uint8),
        bin=np.array([0, 0, 0], np.uint8),
        payload=np.array([2, -2, 3], np.int16),
        roots=np.array([0], np.int32),
        thresholds=np.array([5.0]),
        offsets=np.array([0, 1], np.int32),
        constants=np.array([1.0, 0.5, 1.0]),
    )
    assert stump.predict(np.array([[4.0], [5.0], [5.1]])).tolist() == [0.0, 0.0, 2.5]


def test_no_rows(fitted: tuple) -> None:
    """An empty batch gives an empty answer."""
    assert fitted[1].predict(np.zeros((0, 4))).shape == (0,)
