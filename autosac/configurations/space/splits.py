"""How a model's layers are divided over pipeline stages.

`torchtitan_split` is what TorchTitan does by itself (``generate_llm_fqn_per_model_part``): the embedding counts as
`first_less` layers, the norm and output as `last_less`, and the first stages get what is left over.

`balanced_split` cuts so that the slowest stage is as short as possible:

    minimise over cuts   max over stages s of   c(s, its layers)

by dynamic programming over (stages, layers): exact for every c that does not fall as a stage gets more layers. So once a stage
alone takes as long as the best cut that is known, more layers need not be tried. The search's c is a stage's time with what
it has to recompute within its memory (`bounds.bounds.split_of`). Of splits that are equally good, the one whose early
stages are shorter is taken, for they hold more microbatches. `improved_split` moves single layers where ranks have several
stages, and between equally good splits: the later a slow stage stands, the longer it waits for those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any


def torchtitan_split(layers: int, stages: int, first_less: int = 1, last_less: int = 1) -> tuple[int, ...] | None:
    """Layers of each stage as TorchTitan divides them; None where it refuses."""
    if stages == 1:
        return (layers,)
    each, extra = divmod(layers + first_less + last_less, stages)
    if each == 0 or max(first_less, last_less) > each:
        return None
    counts = [each + (stage < extra) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    return tuple(counts)


def balanced_split(layers: int, stages: int, stage_ms: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Layers of each stage so that the slowest is as short as possible. Each stage gets at least one layer.

    `stage_ms(s, i, j)`: what stage s takes with the layers from i up to, and without, j, no less than with fewer of them;
    infinite if it cannot be.
    ValueError if there are fewer layers than stages.
    """
    if stages > layers:
        raise ValueError(f"{layers} layers are too few for {stages} stages")

    @cache
    def best(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        """The least maximum of the stages from `stage` on, which take the layers from `first` on, and their counts."""
        if stage == stages - 1:
            return stage_ms(stage, first, layers), (layers - first,)
        found: tuple[float, tuple[int, ...]] | None = None
        for last in range(first + 1, layers - (stages - 1 - stage) + 1):
            own_ms = stage_ms(stage, first, last)
            if found is not None and own_ms >= found[0]:
                break
            rest_ms, rest = best(stage + 1, last)
            worst = max(own_ms, rest_ms)
            if found is None or worst < found[0] - 1e-12:
                found = (worst, (last - first, *rest))
        assert found is not None
        return found

    return best(0, 0)[1]


def improved_split(split: Sequence[int], cost: Callable[[tuple[int, ...]], Any]) -> tuple[int, ...]:
    """The split after moving single layers between neighbouring stages for as long as that lowers the cost: no such move makes
    it better. Each stage keeps at least one layer.
    """
    best = tuple(split)
    least = cost(best)
    while True:
        moves = []
        for stage in range(len(best) - 1):
            for left in (1, -1):
                counts = list(best)
                counts[stage] += left
                counts[stage + 1] -= left
                if min(counts[stage], counts[stage + 1]) >= 1:
                    moves.append(tuple(counts))
        value, found = min(((cost(move), move) for move in moves), default=(least, best))
        if not value < least:
            return best
        best, least = found, value


def module_names(split: Sequence[int]) -> list[list[str]]:
    """TorchTitan's ``module_fqns_per_model_part`` of a split."""
    parts: list[list[str]] = []
    first = 0
    for count in split:
        parts.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts
