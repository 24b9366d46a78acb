"""How a model's layers are divided over pipeline stages.

`torchtitan_split` is what TorchTitan does by itself (``generate_llm_fqn_per_model_part``): the embedding counts as
`first_less` layers, the norm and output as `last_less`, and the first stages get what is left over.

`balanced_split` cuts so that the slowest stage is as short as possible. Layer i costs c_i, the embedding c_e, the output c_o:

    minimise over cuts   max over stages s of   sum of c_i in s  (+ c_e in the first)  (+ c_o in the last)

by dynamic programming over (stages, layers): exact. Of splits that are equally good, the one whose early stages are shorter
is taken, for they hold more microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


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


def balanced_split(
    layer_ms: Sequence[float], stages: int, embedding_ms: float = 0.0, output_ms: float = 0.0
) -> tuple[int, ...]:
    """Layers of each stage so that the slowest is as short as possible. Each stage gets at least one layer.

    ValueError if there are fewer layers than stages.
    """
    count = len(layer_ms)
    if stages > count:
        raise ValueError(f"{count} layers are too few for {stages} stages")
    sums = [0.0]
    for ms in layer_ms:
        sums.append(sums[-1] + ms)

    def stage_ms(first: int, last: int, stage: int) -> float:
        own = sums[last] - sums[first]
        return own + (embedding_ms if stage == 0 else 0.0) + (output_ms if stage == stages - 1 else 0.0)

    @cache
    def best(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        """The least maximum of the stages from `stage` on, which take the layers from `first` on, and their counts."""
        if stage == stages - 1:
            return stage_ms(first, count, stage), (count - first,)
        found: tuple[float, tuple[int, ...]] | None = None
        for last in range(first + 1, count - (stages - 1 - stage) + 1):
            rest_ms, rest = best(stage + 1, last)
            worst = max(stage_ms(first, last, stage), rest_ms)
            if found is None or worst < found[0] - 1e-12:
                found = (worst, (last - first, *rest))
        assert found is not None
        return found

    return best(0, 0)[1]


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
