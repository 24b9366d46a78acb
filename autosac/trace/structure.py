"""The regular structure of a list of ranks."""

from __future__ import annotations


def structure(ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """The (size, stride) dimensions of a regular list of ranks, or None."""
    if len(ranks) == 1:
        return ()
    stride = ranks[1] - ranks[0]
    run = 1
    while run < len(ranks) and ranks[run] - ranks[run - 1] == stride:
        run += 1
    if len(ranks) % run:
        return None
    if run == len(ranks):
        return ((run, stride),)
    heads = ranks[::run]
    blocks = [tuple(rank - ranks[i] for rank in ranks[i : i + run]) for i in range(0, len(ranks), run)]
    outer = structure(heads)
    if outer is None or len(set(blocks)) != 1:
        return None
    return (*outer, (run, stride))
