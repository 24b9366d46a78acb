"""Data sets that are made up because they cannot be downloaded, with the real package."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from autosac.capture.patches.synthetic import ROWS, columns_of, install, made_up_encodings
from autosac.errors import UsageError

NOWHERE = "nobody/has-this-data-set"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text", {"text": ""}),
        ("text, label:1", {"text": "", "label": "1"}),
        ("image:1x1,label:10", {"image": "1x1", "label": "10"}),
    ],
)
def test_columns(text: str, expected: dict[str, str]) -> None:
    """A name alone is text, a number is of classes, two are of an image; one is the least."""
    assert columns_of(text) == expected


@pytest.mark.parametrize(
    "part", ["", ":2", "label:0", "label:-1", "image:0x4", "image:4x0", "image:2x2x2", "label:two"]
)
def test_what_is_no_column(part: str) -> None:
    """The message repeats the part."""
    with pytest.raises(UsageError, match=f"{part!r} is not a column: expected NAME, NAME:CLASSES or NAME:HxW"):
        columns_of(f"text,{part}")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[str]]]:
    """The package, which makes data sets up, and what was said of it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", datasets.load_dataset)
    notes: list[str] = []
    install({"text": "", "label": "3", "image": "4x6"}, notes.append)
    yield datasets, notes


def test_a_made_up_data_set(made: tuple[Any, list[str]]) -> None:
    """A thousand rows: 400 words, one of three classes, an image that is four high and six wide."""
    pytest.importorskip("PIL")
    datasets, notes = made
    splits = datasets.load_dataset(NOWHERE)
    assert sorted(splits) == ["test", "train", "validation"]
    train = splits["train"]
    assert len(train) == ROWS and set(train["label"]) == {0, 1, 2}
    assert all(len(text.split()) == 400 for text in train[:3]["text"]) and train[0]["image"].size == (6, 4)
    assert notes == [f"the data set {NOWHERE} is made up: {ROWS} rows of text, label, image (--synthetic-data)"]
    again = datasets.load_dataset(NOWHERE, split="train")
    assert again["label"] == train["label"] and again[5]["text"] == train[5]["text"]
    streamed = datasets.load_dataset(NOWHERE, split="train", streaming=True)
    assert next(iter(streamed))["label"] == train[0]["label"]


def test_a_made_up_encoding() -> None:
    """As many tokens as the file has, each bytes of its own, for the files that are known; others keep their error."""
    module = ModuleType("tiktoken.load")

    def download(*args: Any, **kwargs: Any) -> dict[bytes, int]:
        raise ConnectionError(args, kwargs)

    names: Any = module
    names.load_tiktoken_bpe = names.data_gym_to_mergeable_bpe_ranks = download
    notes: list[str] = []
    made_up_encodings(module, notes.append)
    gpt2 = names.data_gym_to_mergeable_bpe_ranks(vocab_bpe_file="https://nowhere/vocab.bpe", encoder_json_file="")
    assert sorted(gpt2.values()) == list(range(50256)) and gpt2[b"a"] == ord("a")
    assert len(names.load_tiktoken_bpe("https://nowhere/cl100k_base.tiktoken", expected_hash="0")) == 100256
    assert [note.partition(" is made up")[0] for note in notes] == [
        "tiktoken's vocab.bpe",
        "tiktoken's cl100k_base.tiktoken",
    ]
    with pytest.raises(ConnectionError, match="other"):
        names.load_tiktoken_bpe("https://nowhere/other.tiktoken")
