"""Max-min fair sharing of links between the transfers that are under way (water-filling).

Every transfer t moves its messages in lockstep, so that one rate x_t stands for all of its flows. At x_t it takes
k_tl x_t of the capacity of link l, which is 1, and alone it would reach at most its limit b_t::

    sum over t of k_tl x_t <= 1    for every link l
    0 <= x_t <= b_t

The rates are max-min fair: none can grow without a smaller or equal one shrinking. So each transfer reaches its limit, or has
a *bottleneck*: a full link on which no other transfer has a higher rate (Bertsekas and Gallager, Data Networks, 6.5.2; for
flows in lockstep SimGrid's "bottleneck max fairness"). All rates grow together; where a link fills up, or a transfer reaches
its limit, its transfers stop growing (`max_min_rates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SLACK = 1e-12


def max_min_rates(limits: Sequence[float], uses: Sequence[Mapping[int, float]]) -> list[float]:
    """The rates x, one for each transfer. `limits`: b_t, positive; `uses`: k_tl by link, not negative."""
    rates = list(limits)
    growing = set(range(len(limits)))
    on_link: dict[int, list[int]] = {}
    for t, use in enumerate(uses):
        for link, k in use.items():
            if k > 0:
                on_link.setdefault(link, []).append(t)
    left = dict.fromkeys(on_link, 1.0)
    while growing:
        level, full = min(limits[t] for t in growing), []
        for link, members in on_link.items():
            weight = sum(uses[t][link] for t in members if t in growing)
            if weight <= 0:
                continue
            fill = max(0.0, left[link]) / weight
            if fill < level * (1 - _SLACK):
                level, full = fill, [link]
            elif full and fill <= level * (1 + _SLACK):
                full.append(link)
        stopping = {t for link in full for t in on_link[link] if t in growing}
        stopping = stopping or {t for t in growing if limits[t] <= level * (1 + _SLACK)}
        for t in stopping:
            rates[t] = level
            growing.discard(t)
            for link, k in uses[t].items():
                if k > 0:
                    left[link] -= k * level
    return rates
