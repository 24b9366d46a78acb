"""How many tokens each expert of a mixture-of-experts layer gets: the load is a setting, for routing depends on data.

**Popularity.** In every layer expert e has a weight w_e > 0, the same for all ranks and microbatches of a draw:

    balanced         no weights: tokens go to the experts in turn (round-robin), the default
    uniform          w_e = 1
    zipf[:s]         w_e = i_e ** -s, i a random permutation of 1 ... E (s = 1 by default)
    power-law[:a]    w_e = u_e ** (-1 / a), u_e uniform on (0, 1]: P(w > x) = x ** -a, Pareto's law (a = 1 by default)

or, as in the first steps of a training run,

    untrained        each word has experts of its own, at random, and words are as frequent as in texts (Zipf's law)

**Tokens.** A token takes k distinct experts by successive sampling with those weights (Plackett-Luce). As Gumbel top-k, or
an exponential race: expert e arrives at t_e ~ Exp(w_e), the k first win (`choose`). The counts of N tokens add up to N k.
Where a router is limited to some groups of experts (DeepSeek-V3), those with the largest sums of their two best scores
exp(-t_e) take part.

**Peers.** Under expert parallelism a rank receives from each peer what the peer's tokens send to the rank's experts. Those
tokens are drawn from the same popularity, independently: from a peer with N tokens expert e gets Binomial(N, pi_e), where
pi_e = P(e is among the k first) (`inclusion`). Conditional on the others, e wins if it arrives before the k-th of them, T_e:

    pi_e = E[1 - exp(-w_e T_e)],    T_e = the k-th smallest arrival of all but e,

estimated over a sample of races; the expectation over t_e is exact, so few races suffice. With groups: how often e won.
Untrained: the frequencies of the words of e, added up.

**The busiest rank.** Nobody goes on before the rank that got most: its experts take longest, and all meet in the exchange
back.
Which rank that is differs by layer. A capture with `busiest` takes its place in each one: what it gets from its peers is what
the busiest rank of the group gets. Executed beside a rank of that group, it makes that rank wait as it would in the real job.

**Seeds.** Every random number follows from (seed, draw, layer's name), the rank, and how often the layer has run in this
step: equal settings give equal captures, and what checkpointing computes again is routed as it was the first time
(`Routing.route` counts recomputations by themselves).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.errors import UsageError

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_EXPONENTS = {"power-law": 1.0, "zipf": 1.0}  # where none is given
_KINDS = ("balanced", "uniform", "untrained", *_EXPONENTS)
_LEAST_EXPONENT, _MOST_EXPONENT = 0.01, 100.0
_SAMPLED_RACES = 1 << 12
_WORDS = 1 << 15  # rarer ones change little
_RACES_AT_ONCE = 1 << 22  # arrivals in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELoad:
    """The distribution of tokens over experts, and which of its draws. See the module's docstring.

    `exponent` is power-law's alpha or Zipf's s, 0 for the others. `busiest`: as the rank of each group that gets most.
    """

    kind: str = "balanced"
    exponent: float = 0.0
    seed: int = 0
    draw: int = 0
    busiest: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UsageError(
                f"expert load imbalance {self.kind!r}: expected balanced, uniform, untrained, power-law[:ALPHA] or zipf[:S]"
            )
        if self.kind in _EXPONENTS and not _LEAST_EXPONENT <= self.exponent <= _MOST_EXPONENT:
            raise UsageError(
                f"expert load imbalance {self.kind}:{self.exponent:g}: the exponent must be from {_LEAST_EXPONENT:g} to "
                f"{_MOST_EXPONENT:g}"
            )
        if self.kind not in _EXPONENTS and self.exponent:
            raise UsageError(f"expert load imbalance {self.kind!r} takes no exponent")
        if self.seed < 0 or self.draw < 0:
            raise UsageError("seeds and draws of the expert load imbalance must not be negative")

    @staticmethod
    def parse(text: str, seed: int = 0) -> MoELoad:
        """The first draw of ``balanced``, ``uniform``, ``untrained``, ``power-law[:ALPHA]`` or ``zipf[:S]``. UsageError
        otherwise.
        """
        kind, colon, number = text.partition(":")
        try:
            exponent = float(number) if colon else _EXPONENTS.get(kind, 0.0)
        except ValueError:
            raise UsageError(f"expert load imbalance {text!r}: {number!r} is not a number") from None
        return MoELoad(kind=kind, exponent=exponent, seed=seed)

    @property
    def is_balanced(self) -> bool:
        """Nothing is drawn."""
        return self.kind == "balanced"

    def __str__(self) -> str:
        return f"{self.kind}:{self.exponent:g}" if self.kind in _EXPONENTS else self.kind

    def weights(self, experts: int, layer: str) -> Floats:
        """The experts' popularity in a layer; its largest weight is 1."""
        assert not self.is_balanced
        random = self.generator(layer)
        if self.kind in ("uniform", "untrained"):  # untrained: of a word
            return np.ones(experts)
        if self.kind == "zipf":
            return np.asarray(random.permutation(np.arange(1, experts + 1) ** -self.exponent))
        logarithm = -np.log1p(-random.random(experts)) / self.exponent  # of u ** (-1 / a), u = 1 - random
        return np.asarray(np.exp(logarithm - logarithm.max()))

    def generator(self, layer: str, *more: int) -> np.random.Generator:
        """The random numbers of a layer in this draw, for the purpose that `more` names."""
        return np.random.default_rng([self.seed, self.draw, zlib.crc32(layer.encode()), *more])


class Groups(NamedTuple):
    """The experts lie in `number` groups of equal size, of which a token may use `limit`."""

    number: int
    limit: int


def choose(weights: Floats, tokens: int, k: int, random: np.random.Generator, groups: Groups | None = None) -> Integers:
    """The experts that each token takes: (tokens, k), all different in a row, in the order of arrival."""
    chosen = np.empty((tokens, k), dtype=np.int64)
    step = max(1, _RACES_AT_ONCE // len(weights))
    for first in range(0, tokens, step):
        arrivals = _arrivals(weights, min(step, tokens - first), random, groups)
        nearest = np.argpartition(arrivals, k - 1, axis=1)[:, :k]
        order = np.argsort(np.take_along_axis(arrivals, nearest, axis=1), axis=1)
        chosen[first : first + step] = np.take_along_axis(nearest, order, axis=1)
    return chosen


def _arrivals(weights: Floats, tokens: int, random: np.random.Generator, groups: Groups | None) -> Floats:
    with np.errstate(divide="ignore"):  # a weight may be too small for a float: never
        arrivals = random.standard_exponential((tokens, len(weights))) / weights
    if groups is not None:
        grouped = arrivals.reshape(tokens, groups.number, -1)
        scores = np.partition(np.exp(-grouped), -2, axis=2)[:, :, -2:].sum(axis=2)
        out = np.argpartition(-scores, groups.limit - 1, axis=1)[:, groups.limit :]
        np.put_along_axis(grouped, out[:, :, None], np.inf, axis=1)
    return arrivals


def inclusion(weights: Floats, k: int, random: np.random.Generator, groups: Groups | None = None) -> Floats:
    """pi: how probably each expert is among the k that a token takes. They add up to k."""
    experts = len(weights)
    if k >= experts:
        return np.ones(experts)
    if k == 1 and groups is None:
        return np.asarray(weights / weights.sum())
    if groups is not None:
        sample = choose(weights, 2 * _SAMPLED_RACES, k, random, groups)
        return np.asarray(np.bincount(sample.reshape(-1), minlength=experts) / len(sample))
    arrivals = _arrivals(weights, _SAMPLED_RACES, random, None)
    last, next_one = np.partition(arrivals, (k - 1, k), axis=1)[:, k - 1 : k + 1].T[:, :, None]
    threshold = np.where(arrivals <= last, next_one, last)
    found = -np.expm1(-weights * threshold).mean(axis=0)
    return np.asarray(np.minimum(found * (k / found.sum()), 1.0))


@cache
def frequencies() -> Floats:
    """Of the words of a text: the i-th most frequent is 1 / i times as frequent as the first."""
    weights = 1 / np.arange(1, _WORDS + 1)
    return np.asarray(weights / weights.sum())


class _Draw(NamedTuple):
    """Who has drawn some counts: `layer` in its `number`-th run; `tokens` took `k` experts each."""

    layer: str
    number: int
    tokens: int
    k: int
    groups: Groups | None


def _in_common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many first parts two names share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Routing:
    """The routers of one captured rank. `locate` tells the module that runs, and whether it is recomputed."""

    def __init__(self, load: MoELoad, rank: int, locate: Callable[[], tuple[str, bool]]) -> None:
        self._load = load
        self._rank = rank
        self._locate = locate
        self._runs: dict[tuple[str, bool], int] = {}
        self._limits: list[int] = []  # of a router with groups: their number, then how many may be used
        self._latest: _Draw | None = None
        self._chosen: dict[str, Integers] = {}
        self._draws: dict[bytes, _Draw] = {}
        self._popularity: dict[tuple[str, int], Floats] = {}
        self._inclusion: dict[tuple[str, int, int, Groups | None], Floats] = {}
        self._words: dict[tuple[str, int, int, Groups | None], Integers] = {}

    def begin_step(self) -> None:
        """A training step begins, or its first microbatch: the layers' runs are counted from zero."""
        self._runs.clear()

    def route(self, shape: Sequence[int], k: int) -> Integers | None:
        """What `topk` of scores of this shape returns as indices; None for the two by which a router chooses groups."""
        *leading, experts = shape
        if len(leading) == 2:
            self._limits = [leading[1]]
            return None
        if len(self._limits) == 1 and self._limits[0] == experts:
            self._limits.append(k)
            return None
        groups = Groups(*self._limits) if len(self._limits) == 2 else None
        self._limits = []
        layer, repeated = self._locate()
        number = self._runs[layer, repeated] = self._runs.get((layer, repeated), -1) + 1
        tokens = math.prod(leading)
        self._latest = _Draw(layer, number, tokens, k, groups)
        random = self._load.generator(layer, 1, self._rank, number)
        if self._load.kind == "untrained":
            words = random.choice(_WORDS, tokens, p=frequencies())
            chosen = self._experts_of_words(layer, experts, k, groups)[words]
        else:
            chosen = choose(self._weights(layer, experts), tokens, k, random, groups)
        self._chosen[layer] = chosen
        return chosen.reshape(*leading, k)

    def counts_here(self, entries: int, experts: int) -> Integers | None:
        """How often the router nearest to the module that runs chose each expert, if its choice has so many entries.

        Compiled kernels between a choice and its count hide what is counted.
        """
        here = self._locate()[0].split(".")
        nearest = max(self._chosen, key=lambda layer: _in_common(layer.split("."), here), default=None)
        if nearest is None or self._chosen[nearest].size != entries or int(self._chosen[nearest].max()) >= experts:
            return None
        return np.bincount(self._chosen[nearest].reshape(-1), minlength=experts)

    def counted(self, counts: Integers) -> None:
        """These counts have been made of the choice that was made last. What checkpointing repeats is known already."""
        if self._latest is not None:
            tokens = int(counts.sum()) // self._latest.k  # fewer where ranks share a choice (sequence parallel)
            self._draws.setdefault(counts.tobytes(), self._latest._replace(tokens=tokens))

    def exchanged(self, counts: Integers, ranks: Sequence[int]) -> Integers:
        """What an all-to-all of counts brings: from each rank of the group, what it sends to this rank's experts.

        Of counts that no router has made: what this rank would send itself.
        """
        draw = self._draws.get(counts.tobytes())
        position = ranks.index(self._rank)
        if draw is None or not self._load.busiest:
            return self._received(counts, draw, ranks, position).reshape(-1)
        received = [self._received(counts, draw, ranks, place) for place in range(len(ranks))]
        return max(received, key=lambda parts: int(parts.sum())).reshape(-1)

    def _received(self, counts: Integers, draw: _Draw | None, ranks: Sequence[int], position: int) -> Integers:
        """What the rank at `position` gets from each rank, by its experts."""
        own = counts.reshape(len(ranks), -1)[position]
        found = np.tile(own, (len(ranks), 1))
        if draw is not None:
            pi = self._inclusion_of(draw, len(counts)).reshape(len(ranks), -1)[position]
            for i, peer in enumerate(ranks):
                if peer != self._rank:
                    random = self._load.generator(draw.layer, 2, peer, draw.number, ranks[position])
                    found[i] = random.binomial(draw.tokens, pi)
        return found

    def _weights(self, layer: str, experts: int) -> Floats:
        if (layer, experts) not in self._popularity:
            self._popularity[layer, experts] = self._load.weights(experts, layer)
        return self._popularity[layer, experts]

    def _inclusion_of(self, draw: _Draw, experts: int) -> Floats:
        key = (draw.layer, experts, draw.k, draw.groups)
        if key not in self._inclusion:
            self._inclusion[key] = self._included(draw, experts)
        return self._inclusion[key]

    def _included(self, draw: _Draw, experts: int) -> Floats:
        if self._load.kind == "untrained":
            chosen = self._experts_of_words(draw.layer, experts, draw.k, draw.groups)
            return np.asarray(
                np.bincount(chosen.reshape(-1), np.repeat(frequencies(), draw.k), experts), dtype=np.float64
            )
        random = self._load.generator(draw.layer, 3)
        return inclusion(self._weights(draw.layer, experts), draw.k, random, draw.groups)

    def _experts_of_words(self, layer: str, experts: int, k: int, groups: Groups | None) -> Integers:
        key = (layer, experts, k, groups)
        if key not in self._words:
            random = self._load.generator(layer, 4)
            self._words[key] = choose(self._weights(layer, experts), _WORDS, k, random, groups)
        return self._words[key]
