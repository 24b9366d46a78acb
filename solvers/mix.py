"""Which of a few measured policies each of many equal units follows.

A group g has n_g equal units. A unit of it under policy p takes a_gp bytes and t_gp milliseconds of the step. A *mix* of a
group is one policy for all of its units, or two policies p and q for k and n_g - k of them; every policy of a mix costs
`policy_ms` once (a compiled graph of its own):

    minimise    sum_g (k_g t_gp + (n_g - k_g) t_gq + policy_ms * policies of the mix)
    subject to  sum_g (k_g a_gp + (n_g - k_g) a_gq) <= limit

With one limit for all groups, the relaxation in which units are divided has an optimum that splits a single group, between
two policies; so two are enough for any group up to one unit. `best_mix` is exact over these mixes: it lists every group's
undominated ones and merges the lists (Nemhauser and Ullmann 1969).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from autosac.errors import InfeasibleError

Mix: TypeAlias = tuple[tuple[int, int], ...]
"""(policy, units) of one group, in the order of bytes."""


class Cost(NamedTuple):
    """What one unit takes under a policy."""

    nbytes: int
    ms: float


class EqualUnits(NamedTuple):
    """So many equal units, each of which follows one of `policies`."""

    units: int
    policies: tuple[Cost, ...]


class MixChoice(NamedTuple):
    """One mix of every group, and what they take together; `ms` without the price of policies."""

    nbytes: int
    ms: float
    mixes: tuple[Mix, ...]


class _Label(NamedTuple):
    nbytes: int
    priced_ms: float
    choice: MixChoice


def best_mix(groups: Sequence[EqualUnits], limit_bytes: int, policy_ms: float = 0.0) -> MixChoice:
    """The fastest mix of every group within a limit. InfeasibleError says how much the least takes."""
    front = [_Label(0, 0.0, MixChoice(0, 0.0, ()))]
    for group in groups:
        mixes = _undominated(_mixes(group, policy_ms))
        front = _undominated([_joined(a, b) for a in front for b in mixes])
    fitting = [label for label in front if label.nbytes <= limit_bytes]
    if not fitting:
        raise InfeasibleError(f"the smallest mix of policies takes {front[0].nbytes} bytes, the limit is {limit_bytes}")
    return fitting[-1].choice


def _mixes(group: EqualUnits, policy_ms: float) -> list[_Label]:
    count, policies = group
    found = [_label(policies, ((p, count),), policy_ms) for p in range(len(policies))]
    for p, low in enumerate(policies):
        for q, high in enumerate(policies):
            if low.nbytes < high.nbytes and low.ms > high.ms:
                found += [_label(policies, ((p, count - k), (q, k)), policy_ms) for k in range(1, count)]
    return found


def _label(policies: Sequence[Cost], mix: Mix, policy_ms: float) -> _Label:
    nbytes = sum(policies[p].nbytes * k for p, k in mix)
    ms = sum(policies[p].ms * k for p, k in mix)
    return _Label(nbytes, ms + policy_ms * len(mix), MixChoice(nbytes, ms, (mix,)))


def _joined(a: _Label, b: _Label) -> _Label:
    choice = MixChoice(a.choice.nbytes + b.choice.nbytes, a.choice.ms + b.choice.ms, a.choice.mixes + b.choice.mixes)
    return _Label(a.nbytes + b.nbytes, a.priced_ms + b.priced_ms, choice)


def _undominated(labels: list[_Label]) -> list[_Label]:
    """By ascending bytes and descending time."""
    found: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not found or label.priced_ms < found[-1].priced_ms:
            found.append(label)
    return found
