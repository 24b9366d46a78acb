"""Maxima of any range of a series at once: a table of ``max(series[i : i + 2**k])`` for all i and k."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autosac.memory_sim.lifetimes import IntArray


class RangeMaximum:
    """O(n log n) to build, O(1) a query; queries may be arrays."""

    def __init__(self, series: IntArray) -> None:
        """Build the table of a series that is not empty."""
        assert series.size
        self.table = [series]
        width = 1
        while 2 * width <= series.size:
            last = self.table[-1]
            self.table.append(np.maximum(last[:-width], last[width:]))
            width *= 2

    def __call__(self, first: npt.ArrayLike, last: npt.ArrayLike) -> IntArray:
        """``max(series[first:last])`` for each pair; ``0 <= first < last <= len(series)``."""
        begin, end = np.broadcast_arrays(np.asarray(first, dtype=np.int64), np.asarray(last, dtype=np.int64))
        assert np.all((begin >= 0) & (begin < end) & (end <= self.table[0].size)), "empty or outside of the series"
        level = np.frexp((end - begin).astype(np.float64))[1] - 1
        result = np.empty(begin.shape, dtype=np.int64)
        for k in np.unique(level):
            here = level == k
            row = self.table[k]
            result[here] = np.maximum(row[begin[here]], row[end[here] - (1 << int(k))])
        return result
