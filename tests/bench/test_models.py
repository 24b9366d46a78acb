"""Models of a suite and pictures of a bench that cannot be, or just can."""

from __future__ import annotations

from typing import Any

import pytest
from pictures import Pictures

from autosac.bench.figures import Figure, Series
from autosac.bench.report import picture
from autosac.bench.suite import Configuration, Model
from autosac.errors import UsageError

ONE = (Configuration(name="C1", arguments=()),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "model 'm': give make_step or job (one of them)"),
        ({"make_step": "a:b", "job": "j"}, "model 'm': give make_step or job (one of them)"),
        ({"make_step": "a"}, "model 'm': make_step 'a' is not of the form module:function"),
        ({"make_step": "a:"}, "model 'm': make_step 'a:' is not of the form module:function"),
        ({"make_step": "a:b", "configurations": ()}, "model 'm' has no configurations"),
        ({"job": "j", "configurations": (*ONE, *ONE)}, "C1"),
        ({"make_step": "a:b", "world_size": 2}, "model 'm': an eager model runs on one GPU"),
    ],
)
def test_models_that_are_refused(given: dict[str, Any], message: str) -> None:
    """With the model's name and what is expected."""
    with pytest.raises(UsageError) as caught:
        Model(**{"name": "m", "configurations": ONE, **given})
    assert message in str(caught.value)


def test_models_that_are_taken() -> None:
    """An eager one, and a job on one GPU or more."""
    assert Model(name="m", configurations=ONE, make_step="a:b").world_size == 1
    assert [Model(name="m", configurations=ONE, job="j", world_size=n).world_size for n in (1, 2)] == [1, 2]


@pytest.mark.parametrize(("letters", "rotation"), [(45, 0.0), (46, 30.0)])
def test_long_names_are_written_aslant(letters: int, rotation: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of together more than 90 letters."""
    drawn = Pictures(monkeypatch).drawn
    names = ("a" * 45, "b" * letters)
    figure = Figure("k", "title", "value", names, (Series("s", (1.0, None), "#000"),), vertical=((1.0, "here"),))
    assert picture(figure).startswith(b"\x89PNG")
    ((axes, *_),) = drawn
    assert [tick[1] for tick in axes["ticks"]] == [rotation, rotation]
    assert [text[0] for text in axes["texts"]] == ["here"] and len(axes["bars"]) == 2
