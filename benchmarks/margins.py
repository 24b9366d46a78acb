"""``python -m benchmarks.margins`` rewrites memory_sim/margins.toml from two pages of docs: accuracy.md, published.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
STUDY_PAGE, PUBLISHED_PAGE = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "published.md"
MARGINS = ROOT / "memory_sim" / "margins.toml"

_STUDY = re.compile(r"^(\S.+?) +\| +([\d.]+) +([\d.]+) +\S+% \| +([\d.]+) +([\d.]+) +\S+% \|", re.MULTILINE)
_PUBLISHED = re.compile(r"^(E\d+) [^|]*\| +([\d.]+) +([\d.]+) +[-+][\d.]+% \|", re.MULTILINE)
_OTHER_CODE = ("E0129",)  # its experts are TorchTitan's of before 2025-08-05, which nothing puts back
_DECIDED = ("E0105",)  # by its memory that series' runs on several nodes are taken for ones with expandable segments
_HEAD = """\
# Predicted and measured peaks of memory, of which `autosac.planning.confidence` makes margins.
# Written by `python -m benchmarks.margins` from docs/accuracy.md and docs/published.md; units as there.
# One table per cause of error.
"""


def margins(study_page: str, published_page: str) -> str:
    """The text of the margins file for the texts of the two pages."""
    study: list[tuple[str, ...]] = _STUDY.findall(study_page)
    eager, _, _ = published_page.partition("\n## Compiled runs")
    published: list[tuple[str, ...]] = _PUBLISHED.findall(eager)
    h100 = "measured on one H100, printed by benchmarks.h100_study"
    return _HEAD + "".join(
        (
            _table("active", f"active_bytes.all.peak, {h100}", [row[:3] for row in study]),
            _table(
                "reserved",
                f"reserved_bytes.all.peak without expandable segments, {h100}",
                [(row[0], *row[3:5]) for row in study],
            ),
            _table(
                "reserved-expandable",
                "reserved memory of published TorchTitan runs with expandable segments, printed by "
                "benchmarks.torchtitan_published",
                [row[:3] for row in published if row[0] not in (*_OTHER_CODE, *_DECIDED)],
            ),
        )
    )


def _table(name: str, source: str, rows: list[tuple[str, ...]]) -> str:
    lines = "".join(f'  ["{run}", {predicted}, {measured}],\n' for run, predicted, measured in rows)
    return f'\n[{name}]\nsource = "{source}"\nruns = [  # predicted, measured\n{lines}]\n'


if __name__ == "__main__":
    MARGINS.write_text(margins(STUDY_PAGE.read_text(), PUBLISHED_PAGE.read_text()))
