"""The types of options' values."""

from __future__ import annotations

import argparse

import pytest

from autosac.cli import options


@pytest.mark.parametrize(("text", "watts"), [("500W", 500.0), ("750", 750.0), ("0.5kW", None), ("0", None), ("", None)])
def test_watts_on_the_command_line(text: str, watts: float | None) -> None:
    """A number with or without its unit, from 1 W on."""
    if watts is None:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a power"):
            options.watts(text)
    else:
        assert options.watts(text) == watts
