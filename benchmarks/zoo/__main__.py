"""Models of Hugging Face's transformers under plans for the smallest budget, against training without a plan.

    python -m benchmarks.zoo [--only NAME] [--markdown FILE]

Each model is small, of three layers or so, with its dropout and its other random numbers. It trains two steps on the CPU
with and without its plan, in float32 and with its forward under autocast to bfloat16; losses and gradients are compared bit
for bit. *right*: no difference. *warned*: no difference, and the module ran something that the plan did not know.
*refused*: one line said why there is no plan. *wrong*: something differs. *modules*: that the plan checkpoints. *least*:
its peak of active memory beside that without checkpointing. No model was chosen or left out for its result; BEiT,
Longformer, LED, Reformer, Wav2Vec2 and HuBERT showed faults when they were first tried, none of them a wrong gradient,
which are mended.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from autosac.files.writing import write_text_atomically
from benchmarks.zoo.trial import Outcome, kinds, trial


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="models with this in their names")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in kinds():
        if options.only in kind.name and kind.is_known:
            rows.append(Row(trial(kind), trial(kind, autocast=True)))
            print(_line(rows[-1]), flush=True)
    print(_counted(rows))
    if options.markdown:
        write_text_atomically(options.markdown, _page(rows))


class Row(NamedTuple):
    """A model in float32 and under autocast."""

    plain: Outcome
    autocast: Outcome


def _counted(rows: Sequence[Row]) -> str:
    counts = Counter(outcome.result for row in rows for outcome in row)
    return f"of {2 * len(rows)} trials, " + ", ".join(f"{count} {result}" for result, count in counts.most_common())


def _page(rows: Sequence[Row]) -> str:
    explained = textwrap.fill(" ".join(__doc__.split("\n\n")[2].split()), 128)
    printed = (
        f"Printed by `python -m benchmarks.zoo` with transformers {transformers.__version__} and torch {torch.__version__}: "
        f"{_counted(rows)}."
    )
    return "\n".join(
        (
            "# Models of transformers under plans",
            "",
            explained,
            "",
            textwrap.fill(printed, 128),
            "",
            "| model | float32 | modules | least | autocast | modules | least | |",
            "|---|---|---:|---:|---|---:|---:|---|",
            *map(_line, rows),
            "",
        )
    )


def _line(row: Row) -> str:
    cells = [
        f"{outcome.result} | {outcome.units or ''} | {'' if outcome.share is None else f'{100 * outcome.share:.0f} %'}"
        for outcome in row
    ]
    return f"| {row.plain.kind.model} | {' | '.join(cells)} | {row.plain.detail or row.autocast.detail} |"


if __name__ == "__main__":
    main()
