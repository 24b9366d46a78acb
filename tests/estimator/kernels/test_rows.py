"""Rows by index, taken and added: figures worked out by hand for an H100 of 132 processors at 1,830 MHz."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.kernels import Kernels, Streams
from autosac.trace import Signature, TensorMeta

Meta = Callable[..., TensorMeta]
STREAMS = Streams(load_hardware("h100-sxm-80gb"))
H200 = Streams(load_hardware("h200-sxm-141gb"))
ISSUE = 132 * 1830  # one element a cycle and processor, in a microsecond
LARGE = 2**26  # bytes, more than the L2 holds


def _us(signature: Signature, streams: Streams = STREAMS) -> float | None:
    (answer,) = Kernels(streams).estimate([signature])
    return None if answer is None else answer.ms * 1e3


def test_rows_by_index_are_copied_in_vectors(meta: Meta) -> None:
    """32,768 rows of 2 KiB and their indices; the same for an index of `gather` that is expanded to whole rows."""
    table, index = meta((2**15, 1024)), meta((2**15,), "int64")
    expected = STREAMS.plain_us(2 * LARGE + 8 * 2**15)
    assert _us(Signature("aten.index.Tensor", (table, index), (table,))) == pytest.approx(expected)
    wide = TensorMeta((2**15, 1024), (1, 0), "int64")
    assert _us(Signature("aten.gather.default", (table, wide), (table,), (("dim", 0),))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "table", "index", "out"),
    [
        ("aten.index.Tensor", (2**15, 1023), (2**15,), (2**15, 1023)),  # rows of 2,046 bytes
        ("aten.index.Tensor", (64, 2**15, 8), (16,), (64, 16, 8)),  # of the second dimension
        ("aten.gather.default", (2**15, 1024), (2**15, 1024), (2**15, 1024)),  # an index for each element
    ],
)
def test_other_indices_are_left_to_other_models(
    meta: Meta, name: str, table: tuple[int, ...], index: tuple[int, ...], out: tuple[int, ...]
) -> None:
    """Rows that no vector of 16 bytes begins, other dimensions, and indices of single elements."""
    assert _us(Signature(name, (meta(table), meta(index, "int64")), (meta(out),), (("dim", 0),))) is None


@pytest.mark.parametrize(("rows", "measured"), [(2**15, 35.0), (2**13, 25.5)])
def test_rows_of_a_mixture_on_an_h200(meta: Meta, rows: int, measured: float) -> None:
    """Measured in a step: all rows of another table in the memory, and of one that the L2 holds."""
    signature = Signature("aten.index.Tensor", (meta((rows, 1024)), meta((2**15,), "int64")), (meta((2**15, 1024)),))
    assert _us(signature, H200) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("rows", "measured"), [(2**15, 100.4), (2**13, 112.0)])
def test_rows_added_in_a_mixtures_backward_on_an_h200(meta: Meta, rows: int, measured: float) -> None:
    """Measured in a step: sorting and adding 32,768 rows of 1,024, each to its own, and four to one."""
    table, index, source = meta((rows, 1024)), meta((2**15,), "int64"), meta((2**15, 1024))
    arguments = (("accumulate", True),)
    signature = Signature("aten.index_put_.default", (table, index, source), (table,), arguments, mutates=(0,))
    assert _us(signature, H200) == pytest.approx(measured, rel=0.12)


def test_rows_are_sorted_and_added(meta: Meta) -> None:
    """14 bits of rows are two digits: 24 us of sorting, then 2^26 additions. What is not in place copies the table first."""
    table, index, source = meta((2**14, 1024)), meta((2**16,), "int64"), meta((2**16, 1024))
    added = 24 + 2**26 / (1.58 * ISSUE)
    arguments = (("accumulate", True),)
    signature = Signature("aten.index_put_.default", (table, index, source), (table,), arguments, mutates=(0,))
    assert _us(signature) == pytest.approx(added)
    functional = Signature("aten.index_put.default", (table, index, source), (table,), arguments)
    assert _us(functional) == pytest.approx(added + STREAMS.plain_us(2 * 2**25))
    assert _us(Signature("aten.index_put_.default", (table, index, source), (table,), mutates=(0,))) is None


@pytest.mark.parametrize(("rows", "rate"), [(2**12, 1.05), (2**11, 1.05), (2**10, 0.17), (2**5, 0.17)])
def test_additions_that_meet_in_a_row_take_turns(meta: Meta, rows: int, rate: float) -> None:
    """65,536 rows into so many: 64 and more in each wait for each other."""
    table, index, source = meta((rows, 512)), meta((2**16,), "int64"), meta((2**16, 512))
    signature = Signature("aten.index_add_.default", (table, index, source), (table,), (("dim", 0),), mutates=(0,))
    assert _us(signature) == pytest.approx(2.6 + 2**25 / (rate * ISSUE))


def test_a_scatter_adds_as_an_indexed_sum_does(meta: Meta) -> None:
    """An index for each element of 2^25, into 2^22 places: eight meet in one."""
    table, source = meta((2**13, 512)), meta((2**16, 512))
    index = TensorMeta((2**16, 512), (1, 0), "int64")
    signature = Signature("aten.scatter_add_.default", (table, index, source), (table,), (("dim", 0),), mutates=(0,))
    assert _us(signature) == pytest.approx(2.6 + 2**25 / (1.05 * ISSUE))
