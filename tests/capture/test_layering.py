"""How the layers of a job repeat, and what distinguishes them, without captures."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from autosac.capture.jobs import layers
from autosac.capture.jobs.layers import Layering, config_attributes, kinds, module_attributes, repetition
from autosac.capture.request import TitanRequest


def test_kinds_leave_out_what_counts_the_layers() -> None:
    """A number that is different in every layer tells nothing, one that comes twice does."""
    layers = [{"index": i, "scale": 0.02 / (i + 1), "has_experts": i % 2 == 1, "width": 8} for i in range(6)]
    assert kinds(layers) == [0, 1, 0, 1, 0, 1]
    layers[0]["width"] = 16
    assert kinds(layers) == [0, 1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0] * 6, (0, 1)),
        ([0, 1, 1, 1, 1], (1, 1)),
        ([0, 1] * 4, (0, 2)),
        ([3, 0, 1, 2, 0, 1, 2], (1, 3)),
        ([0, 0, 0, 1], (4, 1)),
    ],
)
def test_repetition_is_found(numbers: list[int], expected: tuple[int, int]) -> None:
    """How many layers lead and with which period the others repeat."""
    assert repetition(numbers) == expected


def test_cuts_end_at_the_same_place_of_the_period() -> None:
    """61 layers, 3 of them leading, period 4: 17, 21 and 25 (all = 1 mod 4), of at least 3 + 3 * 4 layers."""
    layering = Layering(61, 3, 4)
    assert [layering.cut(i) for i in range(3)] == [17, 21, 25]
    assert not layering.is_worthwhile()
    assert Layering(80, 0, 1).is_worthwhile()


@pytest.mark.parametrize(
    ("layering", "worthwhile"),
    [
        (Layering(26, 0, 1), False),  # 3 + 4 + 5 layers and 8: 20 of 19.5
        (Layering(27, 0, 1), True),  # of 20.25
        (Layering(176, 0, 1), True),  # 132 where layers are compiled, of 132
    ],
)
def test_when_cuts_are_worthwhile(layering: Layering, worthwhile: bool) -> None:
    """Three cuts and a fixed cost must not exceed three quarters of the layers; the cost is higher if layers are compiled."""
    assert layering.is_worthwhile() is worthwhile
    assert layering.is_worthwhile(compiled=True) is (layering.layers == 176)
    assert not Layering(175, 0, 1).is_worthwhile(compiled=True)


def test_two_cuts_are_worthwhile_for_fewer_layers() -> None:
    """Of 27 layers, one of them leading, and beginning with the cut of 5: 5 + 6 layers and 2 / 3 of 8 are 16.3 of at most
    20.25, with 7 more and all of the 8 it is 26. 22 layers allow 16.5 and 21 layers 15.75.
    """
    deepseek = Layering(27, 1, 1)
    assert (deepseek.is_worthwhile(cuts=2, first=1), deepseek.is_worthwhile(first=1)) == (True, False)
    assert [Layering(count, 1, 1).is_worthwhile(cuts=2, first=1) for count in (21, 22)] == [False, True]


@pytest.mark.parametrize(
    ("layering", "cuts", "processors", "worthwhile"),
    [
        (Layering(27, 1, 1), 3, 2, True),  # 7 layers (9.7) beside 6 and 5 (16.3) of 20.25
        (Layering(24, 0, 2), 3, 2, False),  # 12 layers (14.7) beside 10 and 8 (23.3) of 18
        (Layering(24, 0, 2), 2, 2, True),  # 10 layers (12.7) beside 8 (10.7)
        (Layering(24, 0, 2), 3, 3, False),  # 12, 10 and 8 layers and 8, which is more work than 24 and 8 / 3
    ],
)
def test_cuts_are_captured_beside_each_other(layering: Layering, cuts: int, processors: int, worthwhile: bool) -> None:
    """On several processors less time is enough, if the work is no more than that of all layers; 8 / 3 layers each more."""
    assert layering.is_worthwhile(cuts=cuts, first=1, processors=processors) is worthwhile


def test_layers_are_looked_at_once_for_all_captures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a job under any checkpointing; another job's are looked at again, and those of a file that has changed."""
    monkeypatch.setattr(layers, "known_layers", {})
    asked: list[str] = []

    class Job:
        """Ten equal layers."""

        def layers(self, config: str) -> list[dict[str, object]]:
            asked.append(config)
            return [{}] * 10

    first = TitanRequest(config_file="job.toml")
    other = replace(first, overrides=("--model.flavor", "8B"))
    for request, config in ((first, "a"), (replace(first, checkpointing="full"), "b"), (other, "c"), (other, "d")):
        layers.know_layers(cast(Any, Job()), config, request)
    assert asked == ["a", "c"]
    file = tmp_path / "job.toml"
    for time_s, config in ((1, "e"), (1, "f"), (2, "g")):
        file.touch()
        os.utime(file, (time_s, time_s))
        layers.know_layers(cast(Any, Job()), config, TitanRequest(config_file=str(file)))
    assert asked == ["a", "c", "e", "g"]


@dataclass
class Part:
    """A part of a layer's configuration."""

    width: int
    sizes: tuple[int, ...] = ()


@dataclass
class Configuration:
    """A layer's."""

    heads: int
    part: Part
    name: str = "layer"
    other: Part | None = field(default=None)


def test_what_distinguishes_configurations() -> None:
    """Every field by its path, those of parts too, and what kind of thing each part is."""
    found = config_attributes(Configuration(4, Part(8, (1, 2))))
    assert set(found) == {":", ".heads", ".part:", ".part.width", ".part.sizes", ".name", ".other"}
    assert found[":"] is Configuration and found[".part:"] is Part
    assert (found[".heads"], found[".part.width"], found[".name"], found[".other"]) == (4, 8, "layer", None)
    wider = config_attributes(Configuration(4, Part(16, (1, 2))))
    assert {name for name in found if found[name] != wider[name]} == {".part.width"}


def test_what_distinguishes_modules() -> None:
    """Classes, public attributes, and the shape, type and use of parameters and buffers; nothing private."""
    plain = module_attributes(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    assert plain[":"] is nn.Sequential and plain["0:"] is nn.Linear and plain["0.in_features"] == 2
    assert plain["0.weight:"] == ((3, 2), torch.float32, True) and plain["1.running_mean:"][2] is False
    assert not any("._" in name for name in plain)
    frozen = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=0.5))
    frozen[0].weight.requires_grad_(False)
    other = module_attributes(frozen)
    assert {name for name in plain if plain[name] != other[name]} == {"0.weight:", "1.momentum"}
