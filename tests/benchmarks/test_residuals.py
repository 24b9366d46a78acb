"""The errors of published runs: reading what was printed, and splitting their variance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autosac.errors import UsageError
from benchmarks.residuals import Residual, components, read_residuals, report
from benchmarks.torchtitan_published.runs import read_unseen

_PAGE = """
```
U8     Llama3-8B      fsdp8 1x8192           selective-op  2025-02 |  47.69     47.65   +0.1% |     6581      6500   +1.2% |
U1*    Llama3-8B      fsdp8 1x8192           selective-op  2025-01 |  81.77         -       - |     3302      3985  -17.1% |
U20    Llama3-8B      fsdp8 tp8 12x8192      selective-op  2025-06 |  43.20     43.20   +5.0% |     4363         -       - |
X9     Llama3-8B      fsdp8 1x8192           selective-op  2025-02 |  47.69     47.65   +0.1% |     6581      6500   +1.2% |
```
"""


def test_lines_with_a_throughput_are_read() -> None:
    """Its error, not that of memory, from the lines of known runs that have one."""
    found = read_residuals(_PAGE, [], read_unseen())
    assert [(one.run.case, round(math.expm1(one.error), 4), one.unseen) for one in found] == [
        ("U8", 0.012, True),
        ("U1", -0.171, True),
    ]


def test_variance_within_and_between_sources() -> None:
    """Two sources of two runs: within 4 / 2, between (16 - 2) / 2, worked out by hand."""
    spread = components([[1.0, 3.0], [5.0, 7.0]])
    assert (round(spread.within**2, 12), round(spread.between**2, 12)) == (2.0, 7.0)
    assert (spread.groups, spread.runs) == (2, 4)


def test_one_run_of_each_source_says_nothing_about_the_spread() -> None:
    """The variance within sources needs a source with two runs."""
    with pytest.raises(UsageError, match="one with two runs"):
        components([[1.0], [2.0]])


def test_jobs_of_two_publications() -> None:
    """Runs that differ in their source only are one job, whose errors are listed side by side."""
    one, two = read_unseen()[:2]
    ones = [
        Residual(one, math.log(1.1), True),
        Residual(replace(one, case="V", source="elsewhere"), math.log(0.9), True),
    ]
    twos = [Residual(two, 0.0, True), Residual(replace(two, case="W", source="elsewhere"), 0.0, True)]
    text = report([*ones, *twos])
    assert f"{one.case} +10.0%, V -10.0%" in text
    assert f"{two.case} +0.0%, W +0.0%" in text
    assert "within these jobs: 10.0% (4 runs of 2 jobs)" in text
