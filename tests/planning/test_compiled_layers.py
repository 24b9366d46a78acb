"""What tells a compiled job, and which layer a module lies in."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosac.plans.layers import layer_number
from autosac.titan.settings import asks_to_compile


@pytest.mark.parametrize(
    ("text", "arguments", "asks"),
    [
        ("[compile]\nenable = true", (), True),
        ("[compile]\nenable = false", (), False),
        ("[model]\nname = 'llama3'", (), False),
        ("[compile]\nenable = true\ncomponents = ['loss']", (), False),
        ("[compile]\nenable = false", ("--compile.enable",), True),
        ("[compile]\nenable = false", ("--compile.enable", "--compile.components", "loss"), None),
        ("[compile]\nenable = true", ("--compile.no-enable",), None),
        ("[compile", (), None),
    ],
)
def test_whether_a_job_asks_to_compile(
    tmp_path: Path, text: str, arguments: tuple[str, ...], asks: bool | None
) -> None:
    """Its file tells, unless arguments about compilation do; what neither tells is not known."""
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert asks_to_compile(str(file), arguments) is asks
    assert asks_to_compile(str(tmp_path / "none.toml"), arguments) is (asks if arguments else None)
    assert asks_to_compile(None, arguments) is (asks if arguments else False)


@pytest.mark.parametrize(
    ("name", "number"), [("layers.7", 7), ("layers.12.attention.wq", 12), ("model.layers.3", None), ("output", None)]
)
def test_the_layer_of_a_module(name: str, number: int | None) -> None:
    """Of a member of ``layers`` its number, of a module inside it the same."""
    assert layer_number(name) == number
