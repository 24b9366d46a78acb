"""In which order pipeline ranks work, as far as bounds of time and memory need it.

p ranks, v stages on each, m microbatches (`torch.distributed.pipelining.schedules`). Stage s is on rank s mod p; under
V-shaped schedules the stages run forth and back over the ranks. A rank's order of forwards (F) and backwards (B):

    GPipe               m F, then m B
    1F1B                w = min(m, p - rank) times F, then B and F in turns, then what is left of B
    Interleaved1F1B     w = min(m v, (v - 1) g + 2 (p - 1 - rank)) times F, then F and B in turns, then what is left of B;
                        groups of g = m / max(1, m // p) microbatches pass one of the rank's stages after the other, backwards
                        in the opposite order of stages

Of other schedules nothing is said but that each stage's first microbatch is held at some moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from autosac.configurations.space.layout import SINGLE_STAGE, V_SHAPED, Layout

WHOLE_BACKWARDS = (*SINGLE_STAGE, "Interleaved1F1B")


class PipelineRank(NamedTuple):
    """A pipeline rank: how many layers each of its stages holds, whether the model's last stage is the last of them, and how
    many of each stage's layers are leading ones (`bounds.shapes.Shape`).
    """

    rank: int
    counts: tuple[int, ...]
    last: bool
    leading: tuple[int, ...]

    @property
    def layers(self) -> int:
        """In all its stages."""
        return sum(self.counts)


def leading_of(split: Sequence[int], leading: int) -> list[int]:
    """How many of each stage's layers are among the first so many of the model. `split`: layers of each stage."""
    ends = list(itertools.accumulate(split, initial=0))
    return [min(last, leading) - min(first, leading) for first, last in itertools.pairwise(ends)]


def places(layout: Layout, split: Sequence[int], leading: int) -> list[PipelineRank]:
    """Every pipeline rank. `split`: layers of each stage of the model, the first of which are so many leading ones."""
    found = []
    leads = leading_of(split, leading)
    for rank in range(layout.pipeline):
        own = [stage for stage in range(len(split)) if rank_of(layout, stage) == rank]
        counts, last = tuple(split[stage] for stage in own), own[-1] == len(split) - 1
        found.append(PipelineRank(rank, counts, last, tuple(leads[stage] for stage in own)))
    return found


def rank_of(layout: Layout, stage: int) -> int:
    """The pipeline rank that holds a stage: in a loop, or forth and back for V-shaped schedules."""
    if layout.schedule in V_SHAPED:
        return min(stage, 2 * layout.pipeline - 1 - stage)
    return stage % layout.pipeline


class Moment(NamedTuple):
    """As a backward begins: how many microbatches each of a rank's stages holds; which stages have run backward before and
    will after this one (they have gradients that are not complete); whether the model's last stage has just run forward, and
    what follows is its backward; which of the stages runs backward (-1: not known).
    """

    held: tuple[int, ...]
    accumulating: tuple[bool, ...]
    behind: bool
    stage: int = -1


@lru_cache(maxsize=8192)
def moments(schedule: str, ranks: int, microbatches: int, stages: int, rank: int) -> tuple[Moment, ...]:
    """When a rank holds much: for each set of stages with incomplete gradients, the moment when it holds most microbatches.

    `behind` is true only on the last rank, of which the last stage is taken to be the model's last one.
    """
    if schedule not in WHOLE_BACKWARDS:
        none = (False,) * stages
        first = tuple(int(stage == 0) for stage in range(stages))
        return Moment(first, none, False), Moment(first[::-1], none, True)
    held, done = [0] * stages, [0] * stages
    before = ("", -1)
    found: dict[tuple[bool, ...], Moment] = {}
    for kind, stage in order(schedule, ranks, microbatches, stages, rank):
        if kind == "B":
            behind = stage == stages - 1 and rank == ranks - 1 and before == ("F", stage)
            left = [microbatches - 1 if other == stage else microbatches for other in range(stages)]
            moment = Moment(tuple(held), tuple(0 < n < most for n, most in zip(done, left, strict=True)), behind, stage)
            known = found.get(moment.accumulating)
            if known is None or (behind, sum(held)) > (known.behind, sum(known.held)):
                found[moment.accumulating] = moment
            done[stage] += 1
        held[stage] += 1 if kind == "F" else -1
        before = kind, stage
    return tuple(found.values())


def order(schedule: str, ranks: int, microbatches: int, stages: int, rank: int) -> list[tuple[str, int]]:
    """A rank's forwards ("F") and backwards ("B"), each with which of its stages runs it. See the module."""
    if schedule == "GPipe":
        return [("F", 0)] * microbatches + [("B", 0)] * microbatches
    if schedule == "1F1B":
        warm = min(microbatches, ranks - rank)
        turns = [("B", 0), ("F", 0)] * (microbatches - warm)
        return [("F", 0)] * warm + turns + [("B", 0)] * warm
    group, total = microbatches // max(1, microbatches // ranks), microbatches * stages
    warm = min(total, (stages - 1) * group + 2 * (ranks - 1 - rank))
    forwards = [("F", i // group % stages) for i in range(total)]
    backwards = [("B", stages - 1 - i // group % stages) for i in range(total)]
    turns = [work for pair in zip(forwards[warm:], backwards, strict=False) for work in pair]
    return forwards[:warm] + turns + backwards[total - warm :]
