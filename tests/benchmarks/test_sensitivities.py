"""The regression of published runs' errors over what prices do to their steps."""

from __future__ import annotations

import pytest

from benchmarks.sensitivities import KINDS, fitted, left_out, report


def _row(source: str, error: float, **kinds: float) -> dict[str, object]:
    return {"case": source, "source": source, "error": error, "kinds": dict.fromkeys(KINDS, 0.0) | kinds}


def test_a_kind_that_explains_all_has_its_factor() -> None:
    """Errors of half the share of products: their coefficient is 0.5, and nothing is left; attention explains nothing."""
    rows = [
        _row(name, share / 2, products=share, attention=0.1) for name, share in (("a", 0.2), ("b", 0.4), ("c", 0.8))
    ]
    (found, other), deviations = fitted(rows, ["products", "attention"])
    assert found == pytest.approx(0.5)
    assert other == pytest.approx(0, abs=1e-9)
    assert deviations == pytest.approx([0, 0], abs=1e-9)
    assert left_out(rows, ["products"]) == pytest.approx(0)
    assert left_out(rows, ["attention"]) > 0.1


def test_each_source_counts_once() -> None:
    """Three runs of one source weigh as much as one of another: the mean of 0.1 and 0.3."""
    rows = [_row("a", 0.1, products=1.0)] * 3 + [_row("b", 0.3, products=1.0)]
    (found,), _ = fitted(rows, ["products"])
    assert found == pytest.approx(0.2)
    assert "products" in "\n".join(report(rows))
