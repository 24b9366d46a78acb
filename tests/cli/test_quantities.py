"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from autosac.errors import UsageError
from autosac.quantities import format_enough_bytes, parse_budget, parse_bytes, text_of

GPU = 80 * 2**30


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("68GiB", 68 * 2**30),
        ("73 GB", 73 * 10**9),
        ("85%", 68 * 2**30),
        ("0.85", 68 * 2**30),
        (0.85, 68 * 2**30),
        (1.0, GPU),
        (1_000_000, 1_000_000),
        (1, 1),
    ],
)
def test_budgets(budget: str | float, nbytes: int) -> None:
    """Amounts with units, shares of the GPU as text or number, and whole numbers of bytes."""
    assert parse_budget(budget, GPU) == nbytes


@pytest.mark.parametrize("budget", [0, -1, 0.0, 1.5, 81 * 2**30, "68", "x", float("nan")])
def test_what_is_no_budget(budget: str | float) -> None:
    """Nothing, less than that, more than the GPU, numbers above one without a unit, and other texts are refused in a line."""
    with pytest.raises(UsageError, match=r"^budget [^\n]*$"):
        parse_budget(budget, GPU)


@pytest.mark.parametrize(("budget", "likely"), [("68", "68GiB"), ("8560574464", "8560574464B")])
def test_the_likely_unit(budget: str, likely: str) -> None:
    """A number without a unit is refused with the unit that was likely meant."""
    with pytest.raises(UsageError, match=f"say the unit, for example {likely} "):
        parse_budget(budget, GPU)


def test_amounts() -> None:
    """Bytes with a unit or as a whole number, which is written with its unit; a share is no amount."""
    assert parse_bytes("8GiB") == parse_bytes(2**33) == 2**33
    assert text_of(2**33) == "8589934592B" and text_of("8GiB") == "8GiB" and text_of(0.5) == "0.5"
    with pytest.raises(UsageError, match="expected bytes"):
        parse_bytes("85%")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (2**30, "1.00 GiB"),
        (2**30 + 1, "1.01 GiB"),
        (66.2 * 2**20 + 1, "66.3 MiB"),
        (1025, "1.1 KiB"),
        (1023.5, "1024 B"),
    ],
)
def test_enough_is_never_rounded_down(nbytes: float, text: str) -> None:
    """A budget of what is printed holds so many bytes."""
    assert format_enough_bytes(nbytes) == text
    assert parse_budget(text.replace(" ", ""), GPU) >= nbytes
